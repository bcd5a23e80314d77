"""How passes add nodes: with what the new node gives, and its stage, known at once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from twinstep.worker.compile.stages import stage

aten = torch.ops.aten


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Add `target(*args, **kwargs)` at the graph's point of insertion, in the stage of `like`.

    What it gives is found by running it on fake values, of which one argument must know its own.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta["stage"] = stage(like)
    if target is operator.getitem:
        node.meta["val"] = args[0].meta["val"][args[1]]
        return node
    given = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
    mode = next(mode for each in node.all_input_nodes if (mode := getattr(each.meta["val"], "fake_mode", None)))
    assert isinstance(mode, FakeTensorMode)  # noqa: S101
    with mode:
        node.meta["val"] = target(*given[0], **given[1])
    return node


def cast(graph: fx.Graph, value: fx.Node, dtype: torch.dtype, *, backend: str, like: fx.Node) -> fx.Node:
    """Add a conversion of `value` to `dtype`, as the backend knows it."""
    if backend == "inductor":
        return call(graph, torch.ops.prims.convert_element_type.default, value, dtype, like=like)
    return call(graph, aten._to_copy.default, value, like=like, dtype=dtype)


def after(graph: fx.Graph, node: fx.Node) -> Any:
    """Return the point of insertion right after `node`; after a placeholder, that is after all of them."""
    if node.op != "placeholder":
        return graph.inserting_before(node.next)  # several nodes in a row stand in the order they are added
    return graph.inserting_before(next(each for each in graph.nodes if each.op != "placeholder"))
