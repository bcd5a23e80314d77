"""The sparse embedding pass against eager PyTorch: which tables it takes, which it leaves dense, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.lower.inductor import InductorBackend
from twinstep.worker.compile.lower.xla import XlaBackend
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import SparseEmbedding, resolve
from twinstep.worker.embedding.optim import RowWiseAdagrad

ROWS, DIM = 211, 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "rowwise": lambda p: RowWiseAdagrad(p, lr=0.05),
    "rowwise_decay": lambda p: RowWiseAdagrad(p, lr=0.05, weight_decay=0.1),
}
BACKENDS = [pytest.param("inductor", marks=pytest.mark.inductor), "xla"]
Optimizers = dict[str, torch.optim.Optimizer]


class Lookups(nn.Module):
    """One table looked up three ways: by F.embedding under a mask, by nn.Embedding again, and by indexing."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, DIM, **kwargs)
        self.first_order = nn.Parameter(torch.randn(ROWS))
        self.head = nn.Linear(DIM, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        masked = torch.where((ids % 3 > 0).unsqueeze(-1), self.table(ids), 0.0)
        others = self.table(batch["others"]) + self.table.weight[batch["others"] - ROWS]
        return (self.head(masked).sum(1) + self.head(others).tanh().sum(1)).squeeze(-1) + self.first_order[ids].sum(1)


def make(model: nn.Module, kind: str) -> Optimizers:
    tables = [each for each in model.parameters() if each.shape[0] == ROWS]
    flat = [each for each in tables if each.dim() == 1]
    made = {
        "sparse": OPTIMIZERS[kind]([each for each in tables if each.dim() == 2]),
        "dense": torch.optim.Adam([each for each in model.parameters() if each.shape[0] != ROWS], lr=1e-2),
    }
    if flat:
        made["flat"] = torch.optim.Adagrad(flat, lr=0.1)
    return made


def step(model: nn.Module, optimizers: Optimizers, batch: Mapping[str, Tensor]) -> Tensor:
    for each in optimizers.values():
        each.zero_grad()
    loss = (model(batch) - batch["target"]).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for each in optimizers.values():
        each.step()
    return loss


def batch(seed: int, low: int = 0, high: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(low, high, (4, 5), generator=generator),
        "others": torch.randint(low, high, (4, 3), generator=generator),
        "target": torch.randn(4, generator=generator),
    }


def captured(model: nn.Module, optimizers: Any, given: Any, backend: str, train_step: Any = step) -> Captured:
    state = TrainState(model, optimizers)
    lowering: Any = {"inductor": InductorBackend, "xla": XlaBackend}[backend](state, cache_dir=None)
    decompositions = lowering.decompositions()
    strategies = resolve([SparseEmbedding()])
    return capture(train_step, state, optimizers, given, decompositions, backend=backend, strategies=strategies)


def of_all_rows(graph: fx.GraphModule, rows: int = ROWS) -> list[fx.Node]:
    """Nodes that hold something for every row of a table, but for the tables themselves, old and written to."""
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta["val"], Tensor)
        and rows in node.meta["val"].shape
        and node.target is not torch.ops.twinstep.write_rows.default
    ]


def notes(found: Captured) -> list[str]:
    return list(found.context.notes["sparse_embedding"].values())


@pytest.mark.parametrize("backend", ["inductor", "xla"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_value_of_all_rows_is_left_in_the_graph(kind: str, backend: str) -> None:
    model = Lookups()
    found = captured(model, make(model, kind), batch(0), backend)
    assert of_all_rows(found.graph) == []
    assert [note.split(":")[0] for note in notes(found)] == ["sparse", "sparse"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_follow_eager(kind: str, backend: str) -> None:
    want, model = Lookups(padding_idx=7), Lookups(padding_idx=7)
    want_optimizers, optimizers = make(want, kind), make(model, kind)
    compiler = StepCompiler(step, model, optimizers, backend=backend)
    for seed in range(20):
        # Of few rows, so that most ids repeat; at times all are one.
        given = batch(seed, 5, 6 if seed % 4 == 3 else 17)
        want_loss = step(want, want_optimizers, given).detach()
        torch.testing.assert_close(compiler(given), want_loss, rtol=1e-4, atol=1e-6)
    compiler.pull()
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-6)
    for name, each in optimizers.items():
        left, right = each.state_dict()["state"], want_optimizers[name].state_dict()["state"]
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    fresh = Lookups(padding_idx=7)
    assert torch.equal(model.table.weight[17:], fresh.table.weight[17:])


class Bags(nn.Module):
    """Multi-hot features: bags of one length, and bags cut by offsets, empty ones and weighted ids among them."""

    def __init__(self, mode: str, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.table = nn.EmbeddingBag(ROWS, DIM, mode=mode, **kwargs)
        self.head = nn.Linear(DIM, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        cut = self.table(batch["ids"].flatten(), batch["offsets"])
        if self.mode == "sum":
            weights = torch.linspace(0.5, 1.5, 20).reshape(4, 5)
            cut = cut + self.table(batch["ids"], per_sample_weights=weights)
        return self.head(cut + self.table(batch["ids"])).squeeze(-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mode", "kwargs"), [("sum", {}), ("mean", {}), ("mean", {"padding_idx": 7})])
def test_bags_follow_eager(mode: str, kwargs: dict[str, Any], backend: str) -> None:
    want, model = Bags(mode, **kwargs), Bags(mode, **kwargs)
    want_optimizers, optimizers = make(want, "adagrad"), make(model, "adagrad")
    compiler = StepCompiler(step, model, optimizers, backend=backend)
    for seed in range(4):
        given = {**batch(seed, 5, 17), "offsets": torch.tensor([0, 2, 2, 7])}
        want_loss = step(want, want_optimizers, given).detach()
        torch.testing.assert_close(compiler(given), want_loss, rtol=1e-4, atol=1e-6)
    compiler.pull()
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-6)
    found = compiler.runner(given).captured
    assert of_all_rows(found.graph) == []
    assert notes(found)[0].startswith("sparse")
