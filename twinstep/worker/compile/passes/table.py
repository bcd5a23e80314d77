"""The declared tables of passes, in the order they run, and the one loop that runs and verifies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.copies import drop_copies, drop_dead
from twinstep.worker.compile.passes.scalars import drop_profiler_nodes, split_alpha, unread_scalars


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
    Pass("drop_copies", drop_copies, keeps_bits=True, why="Inductor would drop some after it looked at aliases"),
    Pass("drop_dead", drop_dead, keeps_bits=True, why="what nobody reads need not be compiled"),
)
"""On the functional graph."""


def run_passes(graph: fx.GraphModule, passes: tuple[Pass, ...], context: PassContext) -> dict[str, int]:
    """Run in order those of `passes` that backend and strategies ask for; return how many nodes each changed.

    Raises:
        CompileError: a pass left a graph that is malformed; the message names the pass.
    """
    changed = {}
    for each in passes:
        if context.backend not in each.backends or (each.strategy and each.strategy not in context.strategies):
            continue
        changed[each.name] = each.run(graph, context)
        try:
            graph.graph.lint()
        except RuntimeError as error:
            raise CompileError(
                f"the graph is malformed after pass {each.name!r}: {error}",
                remedy="this is a bug of the pass; set compile.backend: eager meanwhile",
            ) from error
        graph.recompile()
    return changed
