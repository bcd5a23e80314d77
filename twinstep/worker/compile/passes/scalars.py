"""Passes on the first trace, which still mutates: numbers that optimizers read out of tensors become tensors again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from twinstep.worker.compile.passes.context import PassContext

aten = torch.ops.aten


def drop_profiler_nodes(graph: fx.GraphModule, _: PassContext) -> int:
    """Remove the profiler marks that `optimizer.step()` records."""
    marks = [node for node in graph.graph.nodes if str(node.target).startswith("profiler.")]
    for node in reversed(marks):
        if not node.users:
            graph.graph.erase_node(node)
    return len(marks)


def unread_scalars(graph: fx.GraphModule, _: PassContext) -> int:
    """Turn `op(x, …, scalar=t.item())` into tensor arithmetic with the 0-d tensor `t`.

    Adagrad, SGD and row-wise optimizers read a learning rate that is a tensor back into Python, since the ops they
    use take numbers only: `x.addcdiv_(a, b, value=s)`, `x.add_(a, alpha=s)`, `x.mul_(s)`.
    """
    changed = 0
    read_by_ops = {node for node in graph.graph.nodes if _is_read(node) and node.users}
    for node in list(graph.graph.nodes):
        if _is_read(node):
            # What is read is the value at this moment; the tensor may be written to before the number is used.
            with graph.graph.inserting_before(node):
                node.args = (graph.graph.call_function(aten.clone.default, (node.args[0],)),)
        if node.op != "call_function" or node.target not in _UNREAD:
            continue
        with graph.graph.inserting_before(node):
            if _UNREAD[node.target](graph.graph, node):
                changed += 1
    for node in read_by_ops:  # one that no op used was read by Python (an `if`, a print): it must be seen and refused
        if not node.users:
            graph.graph.erase_node(node)
    return changed


def _is_read(node: fx.Node) -> bool:
    return node.target is aten._local_scalar_dense.default


def _read_from(value: Any) -> fx.Node | None:
    """Return the tensor node that `value`, an argument, was read from by `.item()`, if it was."""
    if isinstance(value, fx.Node) and value.target is aten._local_scalar_dense.default:
        source = value.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _with_pair(graph: fx.Graph, node: fx.Node) -> bool:
    """`x + (value·a)/b` or `x + (value·a)·b`, in the order in which eager computes them."""
    scale = _read_from(node.kwargs.get("value", node.args[3] if len(node.args) > 3 else None))
    if scale is None:
        return False
    join, in_place = _PAIRS[node.target]
    scaled = graph.call_function(aten.mul.Tensor, (node.args[1], scale))
    other = graph.call_function(join, (scaled, node.args[2]))
    _as_sum(node, aten.add_.Tensor if in_place else aten.add.Tensor, other)
    return True


_PAIRS: dict[Any, tuple[Any, bool]] = {
    aten.addcdiv.default: (aten.div.Tensor, False),
    aten.addcdiv_.default: (aten.div.Tensor, True),
    aten.addcmul.default: (aten.mul.Tensor, False),
    aten.addcmul_.default: (aten.mul.Tensor, True),
}


def _with_scaled(graph: fx.Graph, node: fx.Node) -> bool:
    scale = _read_from(node.kwargs.get("alpha"))
    if scale is None:
        return False
    _as_sum(node, node.target, graph.call_function(aten.mul.Tensor, (node.args[1], scale)))
    return True


def _with_factor(graph: fx.Graph, node: fx.Node) -> bool:
    scale = _read_from(node.args[1])
    if scale is None:
        return False
    node.args = (node.args[0], scale)
    node.target = _OF_TENSORS.get(node.target, node.target)
    return True


_OF_TENSORS: dict[Any, Any] = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul_.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div_.Scalar: aten.div_.Tensor,
}


def _as_sum(node: fx.Node, target: Any, other: fx.Node) -> None:
    node.target = target
    node.args = (node.args[0], other)
    node.kwargs = {}


_UNREAD: dict[Any, Callable[[fx.Graph, fx.Node], bool]] = {
    **dict.fromkeys(_PAIRS, _with_pair),
    aten.add.Tensor: _with_scaled,
    aten.add_.Tensor: _with_scaled,
    aten.sub.Tensor: _with_scaled,
    aten.sub_.Tensor: _with_scaled,
    aten.mul.Tensor: _with_factor,
    aten.mul_.Tensor: _with_factor,
    aten.mul.Scalar: _with_factor,
    aten.mul_.Scalar: _with_factor,
    aten.div.Tensor: _with_factor,
    aten.div_.Tensor: _with_factor,
    aten.div.Scalar: _with_factor,
    aten.div_.Scalar: _with_factor,
}


def split_alpha(graph: fx.GraphModule, _: PassContext) -> int:
    """Write `a + alpha·b` as a product and a sum.

    Inductor of torch 2.13 fuses the sum with a matrix product before it and forgets alpha: weight decay would act as 1.
    """
    changed = 0
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _WITH_ALPHA and node.kwargs.get("alpha", 1) != 1:
            scaled_at = _WITH_ALPHA[node.target]
            with graph.graph.inserting_before(node):
                scaled = graph.graph.call_function(aten.mul.Tensor, (node.args[scaled_at], node.kwargs["alpha"]))
            scaled.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
            node.args = tuple(scaled if index == scaled_at else each for index, each in enumerate(node.args))
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}
            changed += 1
    return changed


_WITH_ALPHA = {aten.add.Tensor: 1, aten.sub.Tensor: 1, aten.add_.Tensor: 1, aten.sub_.Tensor: 1}
