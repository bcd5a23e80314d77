"""Stage 5, lower with XLA: a captured ATen graph as a JAX function, through torchax, and what XLA is told of it.

`xla.py` loads this when a step is compiled: a warm start, which finds its program on disk, never imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import torch
import torchax
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions

from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.lower.bags import BAGS
from twinstep.worker.compile.lower.layout import add_rows
from twinstep.worker.compile.lower.ring_on import RingOn
from twinstep.worker.compile.lower.tpu_graph import narrow
from twinstep.worker.compile.lower.tpu_layers import fuse_layers
from twinstep.worker.compile.lower.tpu_mlps import fuse_mlps
from twinstep.worker.compile.lower.xla_attention import target_platform
from twinstep.worker.compile.lower.xla_ops import JaxInterpreter
from twinstep.worker.compile.lower.xla_ring import route
from twinstep.worker.compile.partition import folded
from twinstep.worker.compile.strategies import FusedAttention, Rematerialise

_DECOMPOSED_TOO = (
    torch.ops.aten._native_batch_norm_legit_functional,
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.native_batch_norm_backward,
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return core ATen, which torchax knows, and what it lowers wrongly (batch norm's running statistics) or lacks."""
    return {**core_aten_decompositions(), **get_decompositions(_DECOMPOSED_TOO), **BAGS}


def as_jax(
    captured: Captured, hidden: Mapping[int, int] = MappingProxyType({}), ring: RingOn | None = None
) -> Callable[..., Any]:
    """Return the graph as a JAX function; the random key goes in and comes out, or masks would repeat.

    Args:
        captured: the step.
        hidden: by slot how many rows at a tensor's end the step must not see.
        ring: devices that tables are passed around.
    """
    env = torchax.default_env()

    def step(
        state: list[jax.Array],
        rates: list[jax.Array],
        batch: list[jax.Array],
        constants: list[jax.Array],
        key: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        state = [array[: len(array) - hidden[slot]] if slot in hidden else array for slot, array in enumerate(state)]
        graph = folded(captured, target_platform())
        fused = captured.context.strategy(FusedAttention)
        if target_platform() == "tpu" and fused is not None:
            if fused.whole_layers:
                fuse_layers(graph, captured.num_state)
                fuse_mlps(graph, captured.num_state)
            narrow(graph)
        if ring is not None:
            route(graph, captured, ring)
        with env.override_property(prng=key):
            results = list(JaxInterpreter(graph).run(*state, *rates, *batch, *constants))
            next_key = env.prng_key
        new = [add_rows(array, hidden.get(slot, 0)) for slot, array in enumerate(results[: captured.num_state])]
        return new, results[captured.num_state :], next_key

    return step


def compiler_options(captured: Captured) -> dict[str, Any]:
    """Return options of XLA's that the step's strategies want."""
    if captured.context.strategy(Rematerialise) is not None and jax.default_backend() == "cpu":
        # On CPU, XLA drops barriers before it looks for common subexpressions, and orders ops for concurrency: what is
        # to be computed late would be computed once, or early. (A TPU keeps barriers.)
        return {
            "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
            "xla_disable_hlo_passes": "cse",
        }
    return {}


def result_dtypes(captured: Captured) -> list[torch.dtype]:
    """Return the dtypes of a step's results, without the new state."""
    results: Any = captured.graph.graph.output_node().args[0]
    return [node.meta["val"].dtype for node in results[captured.num_state :]]


def attention_widths(graph: fx.GraphModule) -> list[list[int]]:
    """Return the query and value widths of the attention ops of a graph and those within it."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
    found = {
        (node.args[0].meta["val"].shape[3], node.args[2].meta["val"].shape[3])
        for each in graphs
        for node in each.nodes
        if node.target is torch.ops.twinstep.hstu_attention.default
    }
    return [list(widths) for widths in sorted(found)]
