"""Repeated layers become one region, with the same numbers; layers that only look alike do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.lower.inductor import InductorBackend
from twinstep.worker.compile.lower.inductor_pieces import Pieces, Schedule, split
from twinstep.worker.compile.partition import folded
from twinstep.worker.compile.passes.fold_layers import Repeated
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import FoldLayers, resolve

WIDTH = 8


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0, eps: float = 1e-5, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.scale = dropout, scale

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.up(self.norm(x)))
        return x + self.scale * nn.functional.dropout(self.down(hidden), self.dropout, self.training) * mask


class Stack(nn.Module):
    """A linear layer, blocks, and a mask that all blocks share."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer.zero_grad()
    result = model(batch["x"], batch["mask"])
    loss = result.square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "result": result}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(6, WIDTH, generator=generator), "mask": torch.ones(6, 1)}


def fold(model: nn.Module, *, min_nodes: int = 4) -> tuple[Captured, fx.GraphModule]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer)
    decompositions = InductorBackend(state, cache_dir=None).decompositions()
    captured = capture(
        step,
        state,
        optimizer,
        batch(),
        decompositions,
        backend="inductor",
        strategies=resolve([FoldLayers(min_nodes=min_nodes)]),
    )
    return captured, folded(captured, "inductor")


def assert_equal(captured: Captured, graph: fx.GraphModule) -> None:
    inputs = values(captured)
    for got, want in zip(graph(*inputs), captured.graph(*inputs), strict=True):
        assert torch.equal(got, want)


def loops(graph: fx.GraphModule) -> list[Repeated]:
    return [module for module in graph.children() if isinstance(module, Repeated)]


def targets(loop: Repeated) -> set[Any]:
    return {node.target for node in loop.body.graph.nodes}


def values(captured: Captured) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.rand(each.shape, generator=generator).add(0.5) if each.is_floating_point() else each
        for each in captured.example
    ]


@pytest.mark.parametrize("depth", [2, 5])
def test_equal_layers_become_one_region_forward_and_one_backward_with_the_same_bits(depth: int) -> None:
    torch.manual_seed(0)
    captured, graph = fold(Stack([Block() for _ in range(depth)]))
    assert sorted(loop.count for loop in loops(graph)) == [depth, depth]
    assert_equal(captured, graph)


def test_each_further_layer_adds_its_parameters_and_updates_alone() -> None:
    sizes = [len(fold(Stack([Block() for _ in range(depth)]))[1].graph.nodes) for depth in (2, 3, 4)]
    parameters = 6
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
    # Of each: its placeholder, its gradient as it leaves the loop and is turned, and the nodes of its update.
    assert sizes[1] - sizes[0] <= 6 * parameters


@pytest.mark.parametrize(
    "odd",
    [
        lambda: Block(eps=1e-3),
        lambda: Block(scale=0.5),
    ],
    ids=["constant", "extra_op"],
)
def test_a_layer_that_differs_is_never_folded_with_the_others(odd: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    captured, graph = fold(Stack([Block(), Block(), odd(), Block(), Block()]))
    assert_equal(captured, graph)
    forward = [loop for loop in loops(graph) if torch.ops.aten.var_mean.correction in targets(loop)]
    assert [loop.count for loop in forward] == [2, 2]


def test_a_frozen_layer_folds_forward_only_and_keeps_its_numbers() -> None:
    torch.manual_seed(0)
    model = Stack([Block(), Block(), Block().requires_grad_(False), Block()])
    captured, graph = fold(model)
    assert_equal(captured, graph)
    assert [loop.count for loop in loops(graph) if torch.ops.aten.var_mean.correction in targets(loop)] == [4]


def test_two_stacks_of_equal_layers_side_by_side_stay_two() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Stack([Block(), Block()]), Stack([Block(), Block()])

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.left(x, mask) * self.right(x, mask)

    captured, graph = fold(Towers())
    assert len(loops(graph)) >= 2
    assert_equal(captured, graph)


def test_layers_that_read_two_layers_back_are_left_alone_with_a_reason() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            before, x = x, self.first(x) * mask
            for block in self.blocks:
                before, x = x, torch.tanh(block(torch.sigmoid(torch.relu(before))) + x)
            return x

    captured, graph = fold(Dense())
    assert_equal(captured, graph)


def test_a_run_too_short_to_be_worth_its_calls_is_left_alone() -> None:
    _, graph = fold(Stack([Block() for _ in range(3)]), min_nodes=200)
    assert loops(graph) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_pieces_run_by_their_schedule_give_the_bits_of_the_whole_graph(depth: int) -> None:
    torch.manual_seed(0)
    captured, graph = fold(Stack([Block() for _ in range(depth)]))
    pieces, schedule = split(graph)
    assert len(pieces) == (1 if depth == 1 else 5)  # what is before, between and after the loops; and their bodies
    run = Pieces(
        tuple(lambda given, piece=piece: piece(*given) for piece in pieces),
        Schedule.from_json(json.loads(json.dumps(schedule.as_json()))),
    )
    given = values(captured)
    for got, want in zip(run(list(given)), captured.graph(*given), strict=True):
        assert torch.equal(got, want)
    read = {number for call in schedule.calls for number in call.takes} - set(schedule.returns)
    assert read == {number for call in schedule.calls for number in call.done}, "a value is kept, or let go too soon"


@pytest.mark.inductor
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_inductor_calls_one_body_for_each_layer_with_eagers_numbers_and_masks(dropout: float) -> None:
    want, want_losses = train("eager", [], dropout=dropout)
    model, losses = train("inductor", ["fold_layers"], dropout=dropout)
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=2e-6)


def train(backend: str, strategies: Sequence[Any], *, dropout: float = 0.0) -> tuple[Stack, list[Tensor]]:
    torch.manual_seed(0)
    model = Stack([Block(dropout=dropout) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiler = StepCompiler(step, model, optimizer, backend=backend, strategies=strategies)  # type: ignore[arg-type]
    torch.manual_seed(1)
    losses = [compiler(batch())["loss"] for _ in range(4)]
    compiler.pull()
    return model, losses


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_xla_scans_over_layers_with_the_numbers_of_the_unfolded_step(dropout: float) -> None:
    want, want_losses = train("xla", [], dropout=dropout)
    model, losses = train("xla", [FoldLayers(targets=("cpu",))], dropout=dropout)
    if dropout == 0.0:  # the scan draws its masks in another order of keys
        torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-6)
    assert len(set(map(float, losses))) == 4
