"""What passes reckon with: bytes that a value holds, work that an op does, and what is live in the order of a graph."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from twinstep.worker.ops.barrier import BARRIER
from twinstep.worker.ops.rows import WRITE_ROWS

aten = torch.ops.aten

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "hstu_attention", "_scaled_dot_product_flash_attention"}
_REDUCTIONS = {
    "sum",
    "mean",
    "var",
    "var_mean",
    "amax",
    "amin",
    "argmax",
    "native_layer_norm",
    "_softmax",
    "_log_softmax",
}


def num_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value; 0 of one that is no tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def is_product(node: fx.Node) -> bool:
    """Say whether a node is a matrix product, or an op made of some."""
    return _packet(node) in _PRODUCTS


def is_random(node: fx.Node) -> bool:
    """Say whether a node draws random numbers: a second run would draw others."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_view(node: fx.Node) -> bool:
    """Say whether a node's value lies in its argument's memory, or picks one of an op's several results."""
    if node.target is operator.getitem:
        return True
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def flops(node: fx.Node) -> int:
    """Return about how many floating-point operations a node takes: 2·m·n·k for a product, one an element else."""
    if is_view(node) or node.op != "call_function":
        return 0
    values = [each.meta.get("val") for each in node.all_input_nodes]
    sizes = [value.numel() for value in values if isinstance(value, Tensor)]
    if _packet(node) in ("mm", "bmm", "addmm", "baddbmm"):
        left: Any = node.args[-2]
        return int(2 * left.meta["val"].numel() * node.meta["val"].shape[-1])
    if is_product(node):
        return 2 * math.prod(sorted(sizes)[-2:])  # no less than any of them takes
    out = sum(
        each.numel() for each in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)
    )
    return int(max([out, *sizes])) if _packet(node) in _REDUCTIONS else int(out)


def peak(graph: fx.Graph) -> tuple[int, list[fx.Node]]:
    """Return the most bytes of values, inputs apart, that are live at once if nodes ran in their order, unfused.

    With them, the values that are live there, largest first.
    """
    nodes = list(graph.nodes)
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        for each in node.all_input_nodes:
            last[owner(each)] = index
    ends: dict[int, list[fx.Node]] = {}
    live: dict[fx.Node, int] = {}
    now, most, there = 0, 0, []
    for index, node in enumerate(nodes):
        # Rows are written where the table lies, which is state.
        if node.op == "call_function" and owner(node) is node and node.target is not WRITE_ROWS:
            live[node] = num_bytes(node)
            now += live[node]
            ends.setdefault(last.get(node, index), []).append(node)
        if now > most:
            most, there = now, list(live)
        for each in ends.pop(index, ()):
            now -= live.pop(each)
    return most, sorted(there, key=num_bytes, reverse=True)


def owner(node: fx.Node) -> fx.Node:
    """Return the node whose memory a value lies in: of a view, what it is a view of."""
    while is_view(node):
        source: Any = node.args[0] if node.target is operator.getitem else node.all_input_nodes[0]
        if node.target is operator.getitem and source.target is BARRIER:
            source = source.args[0][node.args[1]]
        elif node.target is operator.getitem and not is_view(source):
            break  # one of several results, with memory of its own
        node = source
    return node


def _packet(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
