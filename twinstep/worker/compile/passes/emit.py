"""Write nodes into a graph with what every node of a captured graph carries: the fake value of its result."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode


class Emitter:
    """Calls ops into a graph, at its insertion point."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph.graph
        values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        mode = detect_fake_mode(values)
        assert mode is not None, "a captured graph holds fake values"  # noqa: S101
        self._mode = mode

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write one call and return its node."""
        node = self._graph.call_function(target, args, kwargs)

        def value(each: fx.Node) -> Any:
            return each.meta["val"]

        with self._mode, torch.no_grad():
            node.meta["val"] = target(*fx.node.map_arg(args, value), **fx.node.map_arg(kwargs, value))
        return node


def sort_nodes(graph: fx.Graph) -> None:
    """Move each node that stands before one of its inputs to just behind them; the others keep their order."""
    waiting: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    placed: set[fx.Node] = set()
    output = graph.output_node()
    pending = [node for node in reversed(graph.nodes) if node is not output]
    while pending:
        node = pending.pop()
        missing = [each for each in node.all_input_nodes if each not in placed]
        if missing:
            waiting[missing[-1]].append(node)
            continue
        placed.add(node)
        output.prepend(node)
        pending.extend(reversed(waiting.pop(node, ())))
    assert not waiting, "a graph has no cycles"  # noqa: S101
