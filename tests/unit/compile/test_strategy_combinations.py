"""Strategies in any combination, over drawn models, optimizers and steps: the step stays eager's.

Passes meet each other here: rounding before casts, casts before row gradients, row gradients in what is computed again.
Most of it is run as captured, without a backend, so that many are tried; one with all of them goes
through Inductor.
What changes numbers on purpose has its own eager: a model that rounds with a straight-through gradient, a wider
tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile import StepCompiler, strategies
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.strategies import Strategy, resolve
from twinstep.worker.embedding.optim import RowWiseAdagrad

ROWS, DIM, STEPS = 60, 6, 3
GRID = strategies.Quantize(parameters=("table.weight",), num_buckets=17, low=-0.4, high=0.4)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rowwise_adagrad": lambda p: RowWiseAdagrad(p, lr=0.1),
}


class ToGrid(torch.autograd.Function):
    """Rounds to the grid; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        width = (GRID.high - GRID.low) / (GRID.num_buckets - 1)
        return ((x - GRID.low) / width).round().clamp(0, GRID.num_buckets - 1) * width + GRID.low

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@dataclass(frozen=True)
class Case:
    """What is drawn."""

    layers: int = 2
    bags: bool = False
    clip: bool = True
    parts: int = 1
    sparse: str = "adagrad"
    dense: str = "adam"
    wanted: frozenset[str] = frozenset()
    budget: float = 0.9

    @property
    def narrow(self) -> bool:
        return "mixed_precision" in self.wanted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """A table whose rows are looked up one by one or summed by bag, equal blocks, a head."""

    def __init__(self, case: Case, *, rounded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, DIM)
        with torch.no_grad():
            self.table.weight.mul_(0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(case.layers))
        self.head = nn.Linear(DIM, 1)
        self.rounded, self.bags = rounded, case.bags

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        rows = ToGrid.apply(rows) if self.rounded else rows
        x = rows.sum(1) if self.bags else rows.flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def make(case: Case, *, rounded: bool = False) -> tuple[Net, dict[str, Any]]:
    model = Net(case, rounded=rounded)
    dense = [each for name, each in model.named_parameters() if not name.startswith("table")]
    return model, {
        "sparse": OPTIMIZERS[case.sparse](model.table.parameters()),
        "dense": OPTIMIZERS[case.dense](dense),
    }


def step_of(case: Case) -> Any:
    def step(model: Any, optimizers: Any, ids: Tensor) -> Tensor:
        for each in optimizers.values():
            each.zero_grad()
        total = torch.zeros(())
        for part in ids.chunk(case.parts):
            loss = (model(part) - 1).square().mean() / case.parts
            loss.backward()
            total = total + loss.detach()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers.values():
            each.step()
        return total

    return step


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(ROWS, (4, 3), generator=generator) for _ in range(STEPS)]


def asked_for(case: Case) -> list[Strategy]:
    """The case's strategies as values; `rematerialise` gets a share of what the step would hold without it."""
    values: dict[str, Strategy] = {
        "sparse_embedding": strategies.SparseEmbedding(min_rows_per_id=1.0),
        "fused_update": strategies.FusedUpdate(),
        "fold_layers": strategies.FoldLayers(min_nodes=1),
        "mixed_precision": strategies.MixedPrecision(),
        "quantize": GRID,
    }
    found = [values[name] for name in values if name in case.wanted]
    if "rematerialise" in case.wanted:
        loose = captured(case, [*found, strategies.Rematerialise(budget_bytes=1 << 40)])[0]
        peak = loose.context.notes["rematerialise"]["peak bytes before"]
        tight = [*found, strategies.Rematerialise(budget_bytes=int(case.budget * peak))]
        try:
            captured(case, tight)
        except CompileError as error:
            if "cannot be met" not in str(error):
                raise
            return [*found, strategies.Rematerialise(budget_bytes=peak)]
        return tight
    return found


def captured(case: Case, wanted: list[Strategy]) -> tuple[Captured, StepCompiler]:
    model, optimizers = make(case)
    compiler = StepCompiler(step_of(case), model, optimizers, backend="inductor", strategies=wanted)
    lifted: Any = compiler._lifted
    table = lifted.backend.decompositions()
    example = batches()[0]
    return (
        capture(
            step_of(case),
            lifted.state,
            optimizers,
            example,
            table,
            backend="inductor",
            strategies=resolve(wanted),
        ),
        compiler,
    )


def eager(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizers = make(case, rounded="quantize" in case.wanted)
    losses = [float(step_of(case)(model, optimizers, ids)) for ids in batches()]
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def hold(case: Case, losses: list[float], parameters: dict[str, Tensor]) -> None:
    want_losses, want = eager(case)
    if case.narrow:  # 8 bits of every factor
        torch.testing.assert_close(losses, want_losses, rtol=5e-2, atol=5e-3)
        for name, value in want.items():
            assert float((parameters[name] - value).abs().max()) <= 0.25 * STEPS, name
        return
    torch.testing.assert_close(losses, want_losses, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(parameters, want, rtol=2e-4, atol=2e-5)


@st.composite
def cases(draw: Any) -> Case:
    names = ["sparse_embedding", "fused_update", "fold_layers", "mixed_precision", "quantize", "rematerialise"]
    wanted = frozenset(draw(st.sets(st.sampled_from(names))))
    # With bfloat16, optimizers that divide by what gradients were turn a gradient's sign into a whole step.
    narrow = "mixed_precision" in wanted
    tables = ["sgd"] if narrow else ["sgd", "adagrad", "rowwise_adagrad", "adam", "rmsprop"]
    others = ["sgd", "nesterov"] if narrow else sorted(set(OPTIMIZERS) - {"rowwise_adagrad"})
    return Case(
        layers=draw(st.integers(0, 3)),
        bags=draw(st.booleans()),
        clip=draw(st.booleans()),
        parts=draw(st.integers(1, 2)),
        sparse=draw(st.sampled_from(tables)),
        dense=draw(st.sampled_from(others)),
        wanted=wanted,
        budget=draw(st.sampled_from([0.8, 0.95, 1.0])),
    )


@pytest.mark.timeout(900)  # a dozen captures
@settings(max_examples=4, deadline=None)
@given(case=cases())
def test_passes_in_any_combination_keep_the_step(case: Case) -> None:
    graph, compiler = captured(case, asked_for(case))
    state = [each.detach().clone() for each in compiler.state.tensors()]
    rates = [each.clone() for each in compiler.state.learning_rates()]
    losses = []
    for ids in batches():
        *state, loss = graph.graph(*state, *rates, ids, *graph.constants)
        losses.append(float(loss))
    names = [slot.name for slot in compiler.state.slots]
    hold(case, losses, {name: value for name, value in zip(names, state, strict=True) if name in set(eager(case)[1])})


def through_inductor(case: Case) -> None:
    model, optimizers = make(case)
    compiler = StepCompiler(step_of(case), model, optimizers, backend="inductor", strategies=asked_for(case))
    losses = [float(compiler(ids)) for ids in batches()]
    hold(case, losses, {name: value.detach() for name, value in model.named_parameters()})


@pytest.mark.inductor
def test_all_on_demand_at_once_follow_eager_through_inductor() -> None:
    names = ["sparse_embedding", "fused_update", "mixed_precision", "quantize", "rematerialise"]
    through_inductor(Case(layers=1, bags=True, sparse="rowwise_adagrad", wanted=frozenset(names), budget=1.0))
