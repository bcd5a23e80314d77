"""Tall products through oneDNN: which are replaced, and the numbers they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from twinstep.worker.compile.passes import products
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.products import tall_products
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.ops.linear import LINEAR

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def beats_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is faster, whatever this one is."""
    monkeypatch.setattr(products, "beats_blas", lambda: True)


def context() -> PassContext:
    return PassContext(slots=(), num_rates=0, num_batch=0, backend="inductor")


def inputs(rows: int = 600) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in ((rows, 8), (8, 6), (6,)))  # type: ignore[return-value]


def traced(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


TALL: dict[str, Callable[..., Any]] = {
    "mm": lambda x, w, b: x @ w,
    "mm and a bias": lambda x, w, b: x @ w + b,
    "mm and a bias before it": lambda x, w, b: b + x @ w,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "weight stored the other way": lambda x, w, b: x @ w.t().contiguous().t(),
    "read twice": lambda x, w, b: (lambda y: (y + b, y * 2))(x @ w),
    "added to itself": lambda x, w, b: (lambda y: y + y)(x @ w),
    "a residual": lambda x, w, b: x[:, :6] + x @ w,
}


@pytest.mark.parametrize("name", TALL)
def test_a_tall_product_is_replaced_and_keeps_its_value(name: str) -> None:
    given = inputs()
    graph = traced(TALL[name], *given)
    assert tall_products(graph, context()) == 1
    graph.graph.lint()
    graph.recompile()
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(LINEAR) == 1
    assert not {aten.mm.default, aten.addmm.default} & set(targets)
    if name in ("mm and a bias", "mm and a bias before it"):
        assert aten.add.Tensor not in targets
    torch.testing.assert_close(graph(*given), TALL[name](*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: x[:100] @ w,
        lambda x, w, b: x.t() @ x,
        lambda x, w, b: x.double() @ w.double(),
        lambda x, w, b: torch.addmm(b, x, w, alpha=2.0),
        lambda x, w, b: torch.addmm(x[:, :6], x, w),
        lambda x, w, b: x[:, :0] @ w[:0],
    ],
    ids=["short", "left side turned", "float64", "scaled", "a matrix as bias", "nothing summed"],
)
def test_other_products_stay(function: Callable[..., Any]) -> None:
    graph = traced(function, *inputs())
    before = str(graph.graph)
    assert tall_products(graph, context()) == 0
    assert str(graph.graph) == before


def test_where_the_blas_is_as_fast_nothing_changes_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "beats_blas", lambda: False)
    surroundings = context()
    assert tall_products(traced(TALL["mm"], *inputs()), surroundings) == 0
    assert "BLAS" in surroundings.notes["tall_products"]


@pytest.mark.inductor
def test_a_step_with_them_equals_eager() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = {}
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        compiler = StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
        losses = [float(compiler(torch.randn(600, 4)).detach()) for _ in range(3)]
        found[backend] = (losses, [p.detach().clone() for p in model.parameters()])
        if backend == "inductor":
            assert next(iter(compiler._runners.values())).captured.changed["tall_products"] >= 2
    assert found["inductor"][0] == pytest.approx(found["eager"][0], rel=1e-5)
    for ours, theirs in zip(found["inductor"][1], found["eager"][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
