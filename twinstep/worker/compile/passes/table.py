"""The declared tables of passes, in the order they run, and the one loop that runs and verifies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from twinstep.worker.compile.passes.communication import average_gradients
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.copies import drop_copies, drop_dead, drop_writes
from twinstep.worker.compile.passes.fused_attention import NAME as FUSED_ATTENTION
from twinstep.worker.compile.passes.fused_attention import note_attention
from twinstep.worker.compile.passes.mixed_precision import narrow_products
from twinstep.worker.compile.passes.products import tall_products
from twinstep.worker.compile.passes.quantize import round_parameters
from twinstep.worker.compile.passes.rematerialise import rematerialise
from twinstep.worker.compile.passes.scalars import drop_profiler_nodes, split_alpha, unread_scalars
from twinstep.worker.compile.passes.sparse_embedding import sparse_embedding
from twinstep.worker.compile.passes.sums import split_tall_sums
from twinstep.worker.compile.passes.verify import Before, check
from twinstep.worker.compile.strategies import Communication, SparseEmbedding


@dataclass(frozen=True, slots=True)
class Pass:
    """One row of the table."""

    name: str
    run: Callable[[fx.GraphModule, PassContext], int]
    """Changes the graph in place; returns how many nodes it changed."""
    keeps_bits: bool
    """Whether the graph's results stay equal bit for bit."""
    why: str
    strategy: str | None = None
    """Name of the strategy that must be asked for; None: it always runs."""
    backends: tuple[str, ...] = ("inductor", "xla")


FIRST_TRACE_PASSES = (
    Pass("drop_profiler_nodes", drop_profiler_nodes, keeps_bits=True, why="marks of step() have no lowering"),
    Pass("unread_scalars", unread_scalars, keeps_bits=False, why="a learning rate must stay an input, not a number"),
    Pass("split_alpha", split_alpha, keeps_bits=False, why="Inductor loses the factor beside a matrix product"),
)
"""On the graph that still mutates, before functionalization."""

PASSES = (
    Pass("drop_writes", drop_writes, keeps_bits=True, why="decomposed batch norm writes to its running statistics"),
    Pass("drop_copies", drop_copies, keeps_bits=True, why="Inductor would drop some after it looked at aliases"),
    Pass(
        "communication",
        average_gradients,
        keeps_bits=False,
        why="ranks of a process group train one model",
        strategy=Communication.name,
        backends=("inductor",),
    ),
    Pass("quantize", round_parameters, keeps_bits=False, why="reads of a rounded parameter", strategy="quantize"),
    Pass(
        "mixed_precision",
        narrow_products,
        keeps_bits=False,
        why="matrix products are faster, and what they keep for the backward pass half as large, in bfloat16",
        strategy="mixed_precision",
    ),
    Pass(
        "sparse_embedding",
        sparse_embedding,
        keeps_bits=False,
        why="a table's update costs its used rows, not all of them",
        strategy=SparseEmbedding.name,
    ),
    Pass(
        "rematerialise",
        rematerialise,
        keeps_bits=True,
        why="what lives from forward to backward must fit the budget",
        strategy="rematerialise",
    ),
    Pass("drop_dead", drop_dead, keeps_bits=True, why="what nobody reads need not be compiled"),
    Pass(
        "split_tall_sums",
        split_tall_sums,
        keeps_bits=False,
        why="sums over all tokens wait for memory at every row",
        backends=("inductor",),
    ),
    Pass(
        "tall_products",
        tall_products,
        keeps_bits=False,
        why="oneDNN has wider instructions than MKL for other makers' processors",
        backends=("inductor",),
    ),
    Pass(
        "fused_attention",
        note_attention,
        keeps_bits=True,
        why="traced whole: says what it spares",
        strategy=FUSED_ATTENTION,
    ),
)
"""On the functional graph."""


def run_passes(
    graph: fx.GraphModule, passes: tuple[Pass, ...], context: PassContext, *, functional: bool = True
) -> dict[str, int]:
    """Run in order those of `passes` that backend and strategies ask for; return how many nodes each changed.

    Args:
        functional: whether `graph` mutates nothing, as after functionalization.

    Raises:
        CompileError: what a pass left breaks a rule of `verify.py`; the message names the pass.
    """
    changed = {}
    for each in passes:
        if context.backend not in each.backends or (each.strategy and each.strategy not in context.strategies):
            continue
        if each.name in context.without:
            continue
        before = Before.of(graph)
        changed[each.name] = each.run(graph, context)
        check(graph, before, each.name, functional=functional)
        graph.recompile()
    return changed
