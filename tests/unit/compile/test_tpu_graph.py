"""What is taken apart for a TPU gives the same numbers as before, and is left alone where it would not pay."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.lower import pallas_attention, tpu_graph, xla_trace
from twinstep.worker.compile.partition import copy_graph, folded
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import resolve
from twinstep.worker.ops.hstu_attention import AttentionRule, attention_rows, hstu_attention

aten = torch.ops.aten
ROWS, WIDTH = 64, 8


class Gated(nn.Module):
    """A gate and two values from one product, as in an STU layer; `whole` also reads the product as it is."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(512, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(4 * WIDTH))
        self.whole = whole

    def forward(self, ids: Tensor) -> Tensor:
        product = self.table(ids) @ self.weight + self.bias
        u, v, w = torch.split(product, [WIDTH, WIDTH, 2 * WIDTH], dim=1)
        gated = nn.functional.silu(u) * v.cos() * w[:, :WIDTH].sin()
        return gated * product.sum(1, keepdim=True) if self.whole else gated


class Attends(nn.Module):
    """q, k and v from one product over tokens, attended to in rows of 8 slots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, 6 * WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(6 * WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        B, S = ROWS // 8, 8
        product = self.table(ids) @ self.weight + self.bias
        q, k, v = (part.reshape(B, S, 2, WIDTH) for part in torch.split(product, 2 * WIDTH, dim=1))
        lengths = torch.full((B,), 6)
        rows = attention_rows(lengths, lengths // 3, num_slots=S, rule=AttentionRule(2))
        return hstu_attention(q, k, v, rows, torch.tensor(float(S)), alpha=0.4)


def captured_step(model: nn.Module, *strategies: str) -> Captured:
    def step(model: nn.Module, optimizer: Any, ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    ids = torch.randint(512, (ROWS,), generator=torch.Generator().manual_seed(1))
    state = TrainState(model, optimizer)
    return capture(
        step, state, optimizer, ids, xla_trace.decompositions(), backend="xla", strategies=resolve(strategies)
    )


def narrowed(captured: Captured) -> tuple[fx.GraphModule, dict[str, int]]:
    graph = fx.GraphModule(captured.graph, copy_graph(captured.graph.graph))
    return graph, tpu_graph.narrow(graph)


def count(graph: fx.GraphModule, target: Any) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=target))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_graph, "MIN_ROWS", ROWS)


@pytest.mark.usefixtures("few_rows")
def test_parts_of_a_product_are_products_of_their_own_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_graph, "by_columns", lambda x: x)  # runs on JAX's values; here torch runs the graph
    torch.manual_seed(0)
    captured = captured_step(Gated())
    graph, found = narrowed(captured)
    assert found["products"] == 1
    assert found["sums"] == 1
    assert count(graph, aten.mm.default) > count(captured.graph, aten.mm.default)
    assert all("val" in node.meta for node in graph.graph.nodes if node.op != "output")
    inputs = [each.clone() for each in captured.example]
    for got, want in zip(graph(*inputs), captured.graph(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("few_rows")
def test_sums_of_attentions_gradients_come_from_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def interpreted(*args: Any, totals: bool) -> Any:
        return pallas_attention.backward(*args, totals=totals, interpret=True)

    def in_torch(*args: Any) -> tuple[Tensor, ...]:
        given = [jnp.asarray(each.numpy()) if isinstance(each, Tensor) else each for each in args]
        return tuple(torch.from_numpy(np.array(each)) for each in on_jax(*given))

    on_jax = tpu_graph.gradients_and_totals
    monkeypatch.setattr(pallas_attention, "spread_backward", interpreted)
    monkeypatch.setattr(tpu_graph, "gradients_and_totals", in_torch)
    monkeypatch.setattr(tpu_graph, "by_columns", lambda x: x)
    torch.manual_seed(0)
    captured = captured_step(Attends(), "fused_attention")
    graph, found = narrowed(captured)
    assert found["totals"] == 3
    assert count(graph, aten.sum.dim_IntList) == count(captured.graph, aten.sum.dim_IntList) - 1
    inputs = [each.clone() for each in captured.example]
    for got, want in zip(graph(*inputs), captured.graph(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_rows")
def test_a_product_that_is_also_read_whole_stays_one() -> None:
    captured = captured_step(Gated(whole=True))
    graph, found = narrowed(captured)
    assert found["products"] == 0
    assert count(graph, aten.mm.default) == count(captured.graph, aten.mm.default)


def test_short_products_stay_as_they_are() -> None:
    captured = captured_step(Gated())
    _, found = narrowed(captured)
    assert found == {"products": 0, "sums": 0, "totals": 0, "tables": 0}


def test_layers_are_not_folded_for_a_tpu() -> None:
    captured = captured_step(Gated())
    captured.context.strategies.update(resolve(None))
    assert not [each for each in folded(captured, "tpu").graph.nodes if each.op == "call_module"]
    assert "tpu" not in resolve(None)["fold_layers"].targets  # type: ignore[attr-defined]
