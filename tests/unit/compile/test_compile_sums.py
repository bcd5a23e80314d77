"""Tall sums in two steps: which are split, and that a compiled step with them equals eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.sums import split_tall_sums
from twinstep.worker.compile.step_compiler import StepCompiler

aten = torch.ops.aten
CONTEXT = PassContext(slots=(), num_rates=0, num_batch=0, backend="inductor")


def traced(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("rows", [1024, 4448, 1090])
def test_a_tall_sum_becomes_two_with_the_same_value(rows: int, keepdim: bool) -> None:
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
    graph = traced(lambda x: x.sum(0, keepdim=keepdim), x)
    assert split_tall_sums(graph, CONTEXT) == 1
    graph.graph.lint()
    graph.recompile()
    sums = graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert len(sums) == 2
    torch.testing.assert_close(graph(x), x.double().sum(0, keepdim=keepdim).float(), rtol=1e-5, atol=1e-5)
    assert sums[-1].meta["val"].shape == graph(x).shape


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.sum(0), torch.zeros(1023, 3)),
        (lambda x: x.sum(0), torch.zeros(4099, 3)),
        (lambda x: x.sum(1), torch.zeros(2048, 2048)),
        (lambda x: x.sum((0, 1)), torch.zeros(2048, 3)),
        (lambda x: x.sum(0), torch.zeros(2048, 3, dtype=torch.bfloat16)),
        (lambda x: x.sum(0, dtype=torch.float64), torch.zeros(2048, 3)),
        (lambda x: x.sum(0), torch.zeros(2048)),
    ],
    ids=["short", "prime", "along rows", "whole", "bfloat16", "cast", "vector"],
)
def test_other_sums_are_left_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    graph = traced(function, x)
    before = str(graph.graph)
    assert split_tall_sums(graph, CONTEXT) == 0
    assert str(graph.graph) == before


@pytest.mark.inductor
def test_a_step_over_many_rows_equals_eager() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = {}
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        compiler = StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
        losses = [float(compiler(torch.randn(2048, 4)).detach()) for _ in range(3)]
        found[backend] = (losses, [p.detach().clone() for p in model.parameters()])
        if backend == "inductor":
            assert next(iter(compiler._runners.values())).captured.changed["split_tall_sums"] >= 2
    assert found["inductor"][0] == pytest.approx(found["eager"][0], rel=1e-5)
    for ours, theirs in zip(found["inductor"][1], found["eager"][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
