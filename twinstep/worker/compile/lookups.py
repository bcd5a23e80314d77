"""Lookups by index: what may fail while a step runs, and therefore what must not be written before it.

An id that names no row is found in the middle of a program. Every other check is made before a step starts, so a
step that fails leaves the state as it was if nothing is written before the last lookup: `written_too_soon` names
the state for which the graph's own dependences do not see to that. `guards.py` checks ids before a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def written_too_soon(graph: fx.GraphModule, num_state: int) -> tuple[int, ...]:
    """Return the slots of state whose new value can be known before all lookups of the graph were made.

    One lookup is made once, however many ops use the same indices for the same number of rows. A new value that
    depends on all of them, as nearly every parameter's does through the loss, is written after them.
    """
    bits: dict[Any, int] = {}
    seen: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        mask = 0
        for source in node.all_input_nodes:
            mask |= seen[source]
        for index, _, rows in indices(node):
            mask |= 1 << bits.setdefault((index, rows), len(bits))
        seen[node] = mask
    every = (1 << len(bits)) - 1
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    new_state: Any = graph.graph.output_node().args[0]
    return tuple(
        slot
        for slot, (new, old) in enumerate(zip(new_state[:num_state], placeholders, strict=False))
        if new is not old and seen[new] != every
    )


def indices(node: fx.Node) -> list[tuple[fx.Node, int, int]]:
    """Return the index tensors of a node with the least index allowed and the number of rows, as eager PyTorch has it.

    An op that the user wrote may stand here as another one, which counts negative indices from the end where the
    user's refuses them (`index_select` as `index`): `node.meta["by"]` says what was written.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    packet, args = node.target.overloadpacket, node.args
    if packet in (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only):
        return [(args[1], 0, _shape(args[0])[0])]  # type: ignore[list-item]
    if packet is aten.embedding_dense_backward:
        return [(args[1], 0, args[2])]  # type: ignore[list-item]
    if packet is torch.ops.twinstep.unique_rows:
        return []  # passes over what is no row
    if packet in (aten.index, aten.index_put):
        shape = _shape(args[0])
        given: Any = args[1]
        dims = [(dim, index) for dim, index in enumerate(given) if index is not None]
        from_end = written(node) not in FROM_START
        return [
            (each, -shape[dim] if from_end else 0, shape[dim])
            for dim, each in dims
            if each.meta["val"].dtype is not torch.bool
        ]
    if packet is aten.eq and written(node) == "one_hot":
        return [(args[0], 0, node.meta["val"].shape[-1])]  # type: ignore[list-item]
    if packet in _BY_DIM:
        shape = _shape(args[0])
        rows = shape[args[1]] if shape else 1  # type: ignore[index]
        return [(args[2], -rows if packet is aten.index_fill else 0, rows)]  # type: ignore[list-item]
    return []


def written(node: fx.Node) -> str:
    """Return the name of the op that the step wrote for a node, `index_add`; empty where a pass made the node."""
    return str(node.meta.get("by", "")).removesuffix("_")


FROM_START = {
    "embedding",
    "embedding_dense_backward",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "gather",
    "index_select",
    "index_add",
    "index_copy",
    "index_reduce",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "nll_loss_backward",
    "nll_loss2d_backward",
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "one_hot",
}
"""Ops that a step may write whose ids count from the start only."""
FROM_END = {"index", "index_put", "_index_put_impl", "index_fill", "take", "put"}
"""Ops that a step may write whose negative ids count from the end."""

_BY_DIM = {
    aten.gather,
    aten.index_select,
    aten.index_add,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.index_copy,
    aten.index_fill,
}
"""Ops that take (tensor, dim, index, …)."""


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape
