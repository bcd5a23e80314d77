"""Layers that one TPU kernel computes give the numbers of the graph they were; others stay as they are.

Here the kernels run in Pallas' interpreter; the last test hands them to the TPU compiler.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.lower import pallas_layers, tpu_layers, xla_trace
from twinstep.worker.compile.partition import copy_graph
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import resolve
from twinstep.worker.ops.hstu_attention import (
    OPERATOR,
    OPERATOR_BACKWARD,
    AttentionRows,
    AttentionRule,
    attention_rows,
    hstu_attention,
)

B, S, D, HEADS = 3, 24, 16, 2
LENGTHS, TARGETS = [13, 0, 7], [2, 3, 0]


class Layer(nn.Module):
    """One STU layer by hand; `gate` is what is done to u, `order` whether tokens are sorted before attention."""

    def __init__(self, gate: str, *, shuffle: bool) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.weight = nn.Parameter(torch.randn(D, 4 * D) * 0.3)
        self.bias = nn.Parameter(torch.randn(4 * D) * 0.1)
        self.out = nn.Parameter(torch.randn(3 * D, D) * 0.2)
        self.gate, self.shuffle = gate, shuffle

    def forward(self, x_MD: Tensor, rows: AttentionRows, n: Tensor) -> Tensor:
        u, v, q, k = torch.split(self.norm(x_MD) @ self.weight + self.bias, D, dim=1)
        u = {"silu": F.silu, "tanh": torch.tanh, "cos": torch.cos}[self.gate](u)
        if self.shuffle:
            q = q.flip(0)
        heads = (B, S, HEADS, D // HEADS)
        a = hstu_attention(q.reshape(heads), k.reshape(heads), v.reshape(heads), rows, n, alpha=0.4).reshape(-1, D)
        return x_MD + torch.cat((u, a, u * self.out_norm(a)), dim=1) @ self.out


class Stack(nn.Module):
    """Layers between a table and a linear head."""

    def __init__(self, *, layers: int = 2, gate: str = "silu", shuffle: bool = False, rule: AttentionRule) -> None:
        super().__init__()
        self.table, self.head, self.rule = nn.Embedding(50, D), nn.Linear(D, 1), rule
        self.layers = nn.ModuleList(Layer(gate, shuffle=shuffle) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids.reshape(-1))
        rows = attention_rows(torch.tensor(LENGTHS), torch.tensor(TARGETS), num_slots=S, rule=self.rule)
        for layer in self.layers:
            x = layer(x, rows, torch.tensor(5.0))
        return self.head(x)  # type: ignore[no-any-return]


def captured_step(model: nn.Module, *strategies: str, gradients: bool = False) -> Captured:
    def step(model: nn.Module, optimizer: Any, ids: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        return (
            (loss, [each.grad.clone() for each in model.parameters() if each.grad is not None]) if gradients else loss
        )

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # new state then shows gradients as they are
    ids = torch.randint(50, (B, S), generator=torch.Generator().manual_seed(1))
    state = TrainState(model, optimizer)
    wanted = resolve(strategies or ("fused_attention",))
    return capture(step, state, optimizer, ids, xla_trace.decompositions(), backend="xla", strategies=wanted)


def fused(captured: Captured) -> tuple[fx.GraphModule, int]:
    graph = fx.GraphModule(captured.graph, copy_graph(captured.graph.graph))
    found = tpu_layers.fuse_layers(graph, captured.num_state)
    graph.graph.lint()
    graph.recompile()
    return graph, found


def count(graph: fx.GraphModule, target: Any) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=target))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(pallas_layers.on_one_device, interpret=True)
    monkeypatch.setattr(pallas_layers, "on_one_device", run)


@pytest.mark.parametrize(
    "rule", [AttentionRule(3), AttentionRule(3, contextual_len=2, window=4), AttentionRule(3, target_aware=False)]
)
def test_a_layer_in_one_kernel_gives_the_numbers_of_its_ops(rule: AttentionRule, same_numbers: Any) -> None:
    torch.manual_seed(0)
    layers = 2 if rule == AttentionRule(3) else 1
    captured = captured_step(Stack(layers=layers, rule=rule))
    graph, found = fused(captured)
    assert found == layers
    assert count(graph, OPERATOR) == count(graph, OPERATOR_BACKWARD) == 0
    assert count(graph, torch.ops.aten.sigmoid.default) == 0
    same_numbers(graph, captured)


def test_layers_of_a_step_that_gives_gradients_out_are_kernels_too(same_numbers: Any) -> None:
    """As each step on SparseCores does, whose engine is given those of its activations."""
    torch.manual_seed(0)
    captured = captured_step(Stack(rule=AttentionRule(3)), gradients=True)
    graph, found = fused(captured)
    assert found == 2
    same_numbers(graph, captured)


def test_rows_are_walked_through_in_chunks(monkeypatch: pytest.MonkeyPatch, same_numbers: Any) -> None:
    monkeypatch.setattr(pallas_layers, "LARGEST_CHUNK", 8)
    torch.manual_seed(0)
    captured = captured_step(Stack(layers=1, gate="tanh", rule=AttentionRule(3)))
    graph, found = fused(captured)
    assert found == 1
    same_numbers(graph, captured)


def test_products_in_bfloat16_stay_so_in_a_kernel(same_numbers: Any) -> None:
    torch.manual_seed(0)
    captured = captured_step(Stack(layers=1, rule=AttentionRule(3)), "fused_attention", "mixed_precision")
    graph, found = fused(captured)
    assert found == 1
    same_numbers(graph, captured, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("options", [{"gate": "cos"}, {"shuffle": True}], ids=["another op", "tokens change places"])
def test_layers_of_another_kind_stay_as_they_are(options: Any) -> None:
    captured = captured_step(Stack(rule=AttentionRule(3), **options))
    graph, found = fused(captured)
    assert found == 0
    assert [node.target for node in graph.graph.nodes] == [node.target for node in captured.graph.graph.nodes]


def test_a_layer_that_vmem_does_not_hold_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_step(Stack(rule=AttentionRule(3)))
    monkeypatch.setattr(tpu_layers, "VMEM_BYTES", 1 << 20)
    assert fused(captured)[1] == 0


@given(slots=st.integers(1, 4096))
@settings(max_examples=200, deadline=None)
def test_chunks_fill_a_row_and_fit_into_tiles(slots: int) -> None:
    size = pallas_layers.chunk_size(slots)
    if size is not None:
        assert slots % size == 0
        assert size == slots or size % pallas_layers.SUBLANES == 0
        assert size <= pallas_layers.LARGEST_CHUNK


_COMPILE = """
import test_tpu_layers as own
own.B, own.S, own.D, own.HEADS = 8, 40, 256, 2
own.LENGTHS, own.TARGETS = [37] * 8, [3] * 8

def step(model, optimizer, ids):
    optimizer.zero_grad()
    loss = model(ids).square().mean()
    loss.backward()
    optimizer.step()
    return loss

for topology in topologies:
    for strategies in (None, ["fused_attention", "mixed_precision"]):
        model = own.Stack(layers=1, rule=own.AttentionRule(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = twinstep.compile_ahead(step, model, optimizer, torch.zeros(8, 40, dtype=torch.int64),
                                       topology=topology, strategies=strategies, batch_size=8, effort="quick")
        kinds = {each.kind for each in found.report.traffic}
        assert {"kernel fused_layer", "kernel fused_layer_backward"} <= kinds, (topology, strategies, kinds)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_tpu_compiler_takes_the_kernels_for_each_generation(compiles_for_each_generation: Any) -> None:
    compiles_for_each_generation(_COMPILE)
