"""MLPs over tokens that one TPU kernel each way computes give the numbers of the graph they were; others stay.

Here the kernels run in Pallas' interpreter; the last test hands them to the TPU compiler.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.lower import pallas_layers, tpu_mlps, xla_trace
from twinstep.worker.compile.partition import copy_graph
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import resolve

M, E, D = 4096, 6, 16
SOME = 96  # tokens where the interpreter runs
TURN = torch.ops.aten.permute.default


class Gate(nn.Module):
    """SiLU's gate of a norm; `cos` is an op that no kernel has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(D), kind

    def forward(self, x: Tensor) -> Tensor:
        gate = self.norm(x)
        return x * (torch.cos(gate) if self.kind == "cos" else torch.sigmoid(gate))


class Branches(nn.Module):
    """Two MLPs, one over rows of a table, added up; then what is no MLP: sums over the tokens before each."""

    def __init__(self, kind: str = "silu", *, scale: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, E), nn.Linear(D, 1)
        self.first, self.second = (
            nn.Sequential(nn.Linear(size, D), Gate(kind), nn.Linear(D, D), nn.LayerNorm(D)) for size in (E, 3)
        )
        self.scale = scale

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        both = self.first(self.table(ids)) + self.second(x.abs())
        if self.scale:
            both = both * x[:, :1].square().mean()
        return self.head(both.cumsum(0))  # type: ignore[no-any-return]


def captured_step(model: nn.Module, *strategies: str, tokens: int = SOME) -> Captured:
    def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # new state then shows gradients as they are
    source = torch.Generator().manual_seed(1)
    ids, x = torch.randint(40, (tokens,), generator=source), torch.randn(tokens, 3, generator=source)
    state = TrainState(model, optimizer)
    wanted = resolve(strategies or ("fused_attention",))
    return capture(step, state, optimizer, (ids, x), xla_trace.decompositions(), backend="xla", strategies=wanted)


def fused(captured: Captured) -> tuple[fx.GraphModule, int]:
    graph = fx.GraphModule(captured.graph, copy_graph(captured.graph.graph))
    found = tpu_mlps.fuse_mlps(graph, captured.num_state)
    graph.graph.lint()
    graph.recompile()
    return graph, found


@pytest.fixture(autouse=True)
def small_and_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(pallas_layers.on_one_device, interpret=True)
    monkeypatch.setattr(pallas_layers, "on_one_device", run)
    monkeypatch.setattr(tpu_mlps, "MIN_TOKENS", SOME)


def kernels(graph: fx.GraphModule) -> list[pallas_layers.Layer]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, pallas_layers.Layer)]


@pytest.mark.parametrize("largest", [512, 32])
def test_an_mlp_in_one_kernel_gives_the_numbers_of_its_ops(
    largest: int, monkeypatch: pytest.MonkeyPatch, same_numbers: Any
) -> None:
    monkeypatch.setattr(tpu_mlps, "LARGEST", largest)
    torch.manual_seed(0)
    captured = captured_step(Branches())
    graph, found = fused(captured)
    assert found >= 1
    forward, backward = kernels(graph)[:2]
    assert len(forward.results) == 1
    assert not forward.sums
    assert len(backward.sums) >= 12  # of each of 12 parameters
    assert forward.slots == min(SOME, largest)
    same_numbers(graph, captured)


class Turned(nn.Module):
    """An MLP whose results are read by columns, as logits by task are: their gradient comes the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, E)
        self.first, self.head = nn.Sequential(nn.Linear(E, D), Gate("silu"), nn.Linear(D, D)), nn.Linear(D, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.head(self.first(self.table(ids))).t()[0:1] * x[:, 0].cumsum(0)  # type: ignore[no-any-return]


def test_a_gradient_that_comes_the_other_way_round_is_one_of_tokens(same_numbers: Any) -> None:
    torch.manual_seed(0)
    captured = captured_step(Turned())
    graph, found = fused(captured)
    assert found >= 1
    (turned,) = (each for layer in kernels(graph) for each in layer.tokens if each.target is TURN)
    assert any(node.target is torch.ops.aten.mm.default and node.args[0] is turned for node in kernels(graph)[1].nodes)
    same_numbers(graph, captured)


def test_products_in_bfloat16_stay_so_in_a_kernel(same_numbers: Any) -> None:
    torch.manual_seed(0)
    captured = captured_step(Branches(), "fused_attention", "mixed_precision")
    graph, found = fused(captured)
    assert found >= 1
    same_numbers(graph, captured, rtol=0.05, atol=0.02)


def test_what_a_kernel_cannot_compute_stays_as_it_is(same_numbers: Any) -> None:
    captured = captured_step(Branches("cos"))
    graph, _ = fused(captured)
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    same_numbers(graph, captured)


def test_numbers_of_all_tokens_are_waited_for(same_numbers: Any) -> None:
    torch.manual_seed(0)
    captured = captured_step(Branches(scale=True))
    graph, _ = fused(captured)
    same_numbers(graph, captured)


def test_an_mlp_that_vmem_does_not_hold_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_mlps, "VMEM_BYTES", 1 << 18)
    assert fused(captured_step(Branches()))[1] == 0


def test_few_tokens_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_mlps, "MIN_TOKENS", SOME + 1)
    captured = captured_step(Branches())
    graph, found = fused(captured)
    assert found == 0
    assert not kernels(graph)


@given(tokens=st.integers(1, 1 << 20))
@settings(max_examples=200, deadline=None)
def test_chunks_fill_all_tokens_and_tiles(tokens: int) -> None:
    size = tpu_mlps.chunk_of(tokens)
    if size is not None:
        assert tokens % size == 0
        assert size % 8 == 0
        assert tpu_mlps.SMALLEST <= size <= tpu_mlps.LARGEST


_COMPILE = """
import test_tpu_mlps as own
own.D, own.E = 256, 64

def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(*batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss

for topology in topologies:
    for strategies in (None, ["fused_attention", "mixed_precision"]):
        model = own.Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.zeros(own.M, dtype=torch.int64), torch.zeros(own.M, 3)
        found = twinstep.compile_ahead(step, model, optimizer, batch, topology=topology, strategies=strategies,
                                       batch_size=own.M, effort="quick")
        kinds = {each.kind for each in found.report.traffic}
        assert {"kernel fused_mlp", "kernel fused_mlp_backward"} <= kinds, (topology, strategies, kinds)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_tpu_compiler_takes_the_kernels_for_each_generation(compiles_for_each_generation: Any) -> None:
    compiles_for_each_generation(_COMPILE)
