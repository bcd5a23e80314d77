"""The compiled step against eager PyTorch: every optimizer, schedules, buffers, ties, aliases, dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.embedding.optim import RowWiseAdagrad

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=1e-2, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
}


class Net(nn.Module):
    """A table, a tied projection, batch statistics, a parameter without gradient, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.LayerNorm(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(0, 3)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.table(ids))) * self.frozen)


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    optimizer.zero_grad()
    logits = model(batch["ids"])
    loss = nn.functional.cross_entropy(logits, batch["target"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss, "logits": logits, "note": None}


def batches(count: int, rows: int = 5) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield {
            "ids": torch.randint(11, (rows,), generator=generator),
            "target": torch.randint(11, (rows,), generator=generator),
        }


def train(backend: str, make: Callable[[Any], torch.optim.Optimizer], steps: int = 5) -> tuple[Net, Any, list[Tensor]]:
    model = Net()
    optimizer = make(model.parameters())
    compiler = StepCompiler(step, model, optimizer, backend=backend)  # type: ignore[arg-type]
    losses = []
    for index, batch in enumerate(batches(steps)):
        if index == 3:  # as a schedule would
            optimizer.param_groups[0]["lr"] *= 0.5
        output = compiler(batch)
        assert output["note"] is None
        assert output["logits"].shape == (5, 11)
        losses.append(output["loss"])
    compiler.pull()
    return model, optimizer, losses


@pytest.mark.parametrize("backend", ["inductor", "xla"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_a_schedule_follows_eager(name: str, backend: str) -> None:
    want_model, want_optimizer, want_losses = train("eager", OPTIMIZERS[name])
    model, optimizer, losses = train(backend, OPTIMIZERS[name])
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), rtol=1e-4, atol=5e-6)
    want_state, state = want_optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    for index, entries in want_state.items():
        for entry, value in entries.items():
            if value is not None and name_of(model, index) not in ("frozen", "unused.weight", "unused.bias"):
                torch.testing.assert_close(state[index][entry], value, rtol=1e-4, atol=5e-6)


def name_of(model: nn.Module, index: int) -> str:
    """The name of an optimizer's parameter number `index`."""
    return [name for name, _ in model.named_parameters()][index]


def test_unused_and_frozen_parameters_stay_bit_equal() -> None:
    model, _, _ = train("xla", OPTIMIZERS["adamw"])
    fresh = Net()
    assert torch.equal(model.frozen, fresh.frozen)
    assert torch.equal(model.unused.bias, fresh.unused.bias)
    assert model.unused.weight.shape == (3, 0)


@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_rowwise_adagrad_follows_eager_and_leaves_untouched_rows_alone(backend: str) -> None:
    def make() -> tuple[nn.Embedding, RowWiseAdagrad]:
        torch.manual_seed(0)
        table = nn.Embedding(9, 4)
        return table, RowWiseAdagrad(table.parameters(), lr=0.1)

    def table_step(model: nn.Module, optimizer: Any, ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(ids).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    want, optimizer = make()
    table, compiled_optimizer = make()
    before = table.weight.detach().clone()
    compiler = StepCompiler(table_step, table, compiled_optimizer, backend=backend)  # type: ignore[arg-type]
    for _ in range(3):
        table_step(want, optimizer, torch.tensor([1, 1, 4]))
        compiler(torch.tensor([1, 1, 4]))
    compiler.pull()
    torch.testing.assert_close(table.weight, want.weight, rtol=1e-5, atol=1e-7)
    assert torch.equal(table.weight[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


class Aliases(nn.Module):
    """Buffers that swap, remember, and are returned as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("a", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("b", torch.tensor([10.0, 20.0, 30.0]))
        self.register_buffer("previous", torch.zeros(3))


def alias_step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Tensor]:
    kept = model.weight.detach() + 0
    optimizer.zero_grad()
    (model.weight * x).sum().backward()
    optimizer.step()
    a, b = model.a.clone(), model.b.clone()
    model.previous.copy_(kept)
    model.a.copy_(b)
    model.b.copy_(a)
    return {"old": kept, "a": model.a, "view": model.b[1:], "weight": model.weight}


@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_swapped_and_returned_state_holds_the_values_eager_gives(backend: str) -> None:
    results = {}
    for each in ("eager", backend):
        model = Aliases()
        compiler = StepCompiler(
            alias_step,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            backend=each,  # type: ignore[arg-type]
        )
        outputs = [copy.deepcopy(compiler(torch.full((3,), float(index)))) for index in (1, 2, 3)]
        compiler.pull()
        results[each] = (outputs, model.state_dict())
    torch.testing.assert_close(results[backend], results["eager"])


@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_an_output_is_not_changed_by_the_next_step(backend: str) -> None:
    model = Aliases()
    compiler = StepCompiler(
        alias_step,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        backend=backend,  # type: ignore[arg-type]
    )
    first = compiler(torch.ones(3))
    kept = copy.deepcopy(first)
    compiler(torch.ones(3))
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_dropout_draws_a_new_mask_at_every_step(backend: str) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))

    def masked(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        kept = model[0](x)
        optimizer.zero_grad()
        model[1](kept).sum().backward()
        optimizer.step()
        return kept

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiler = StepCompiler(masked, model, optimizer, backend=backend)  # type: ignore[arg-type]
    masks = [compiler(torch.ones(64)) > 0 for _ in range(3)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    assert all(10 < int(mask.sum()) < 54 for mask in masks)


def test_two_optimizers_by_name_share_one_step() -> None:
    def both(model: nn.Module, optimizers: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["ids"]), batch["target"])
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        return loss

    states = []
    for backend in ("eager", "xla"):
        model = Net()
        optimizers = {
            "dense": torch.optim.Adam([*model.norm.parameters(), *model.body.parameters()], lr=1e-2),
            "sparse": torch.optim.Adagrad(model.table.parameters(), lr=1e-1),
        }
        compiler = StepCompiler(both, model, optimizers, backend=backend)  # type: ignore[arg-type]
        for batch in batches(4):
            compiler(batch)
        compiler.pull()
        states.append(model.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-6)


def test_a_write_to_the_live_model_reaches_the_device() -> None:
    model = nn.Linear(2, 1)
    compiler = StepCompiler(_square_step, model, torch.optim.SGD(model.parameters(), lr=0.0), backend="xla")
    compiler(torch.ones(1, 2))
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.zero_()
    assert float(compiler(torch.ones(1, 2))) == 36.0
    compiler.pull()
    assert torch.equal(model.weight, torch.full((1, 2), 3.0))


def _square_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss
