"""Stage 5, partition: what is cut out of a captured step before a backend lowers it.

All works on a copy: `Captured.graph` stays plain ATen, which every other pass and every view of the graph reads.
"""

from __future__ import annotations

from torch import fx

from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.fold_layers import fold_layers
from twinstep.worker.compile.strategies import FoldLayers


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy with the nodes' meta."""
    new = fx.Graph()
    result = new.graph_copy(graph, {})
    new.output(result)
    return new


def folded(captured: Captured, target: str) -> fx.GraphModule:
    """Return a copy of the graph whose repeated layers are one region each, where that was asked for `target`."""
    graph = fx.GraphModule(captured.graph, copy_graph(captured.graph.graph))
    fold(graph, captured.context, target)
    return graph


def fold(graph: fx.GraphModule, context: PassContext, target: str) -> None:
    """Fold the repeated layers of `graph`, a copy of its own, where that was asked for `target`.

    Args:
        graph: changed in place.
        context: what was asked for; gets a note of what was found.
        target: inductor, or XLA's platform (cpu, gpu, tpu).
    """
    strategy = context.strategy(FoldLayers)
    if strategy is not None and target in strategy.targets:
        context.notes[FoldLayers.name] = fold_layers(graph, strategy)
