"""Lookups by index: what may fail while a step runs, and therefore what must not be written before it.

An id that names no row is found in the middle of a program. Every other check is made before a step starts, so a
step that fails leaves the state as it was if nothing is written before the last lookup: `written_too_soon` names
the state for which the graph's own dependences do not see to that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twinstep.spec.errors import DataError

aten = torch.ops.aten

REMEDY = "map ids into the table's rows, or make the table larger; the state is as it was before the step"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup whose indices are a leaf of the batch as it is, all of it."""

    op: str
    leaf: int
    """Position among the batch's leaves."""
    low: int
    """Least index allowed: negative where the op counts from the end."""
    rows: int
    """Indices must be below it."""

    def check(self, path: str, ids: Tensor) -> None:
        """Raise DataError if an index names no row."""
        if not ids.numel():
            return
        least, most = (int(each) for each in torch.aminmax(ids))
        if least < self.low or most >= self.rows:
            raise DataError(
                f"batch leaf {path} holds {least}…{most}, and {self.op} looks up rows {self.low}…{self.rows - 1}",
                remedy=REMEDY,
            )


def lookups(graph: fx.GraphModule, first_leaf: int, num_leaves: int) -> tuple[Lookup, ...]:
    """Return the lookups of a captured graph whose indices are placeholders from `first_leaf` on."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    leaves = {node: index for index, node in enumerate(placeholders[first_leaf : first_leaf + num_leaves])}
    found = {
        Lookup(_name(node), leaves[source], low, rows): None
        for node in graph.graph.nodes
        for index, low, rows in _indices(node)
        if (source := _source(index)) in leaves
    }
    return tuple(found)


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
        for index, _, rows in _indices(node):
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


_OUT_OF_BOUNDS = re.compile(r"out of (bounds|range)|index_out_of", re.IGNORECASE)


def explain(error: Exception, found: Sequence[Lookup], paths: Sequence[str], leaves: Sequence[Tensor]) -> None:
    """Raise DataError for an error of a program that a lookup failed; return where it is about something else."""
    if not isinstance(error, RuntimeError | IndexError) or not _OUT_OF_BOUNDS.search(str(error)):
        return
    for lookup in found:
        lookup.check(paths[lookup.leaf], leaves[lookup.leaf])
    line = str(error).strip().splitlines()[0][:200]
    raise DataError(
        f"the step looks up a row that is not there: {line}",
        remedy=REMEDY,
    ) from error


def _indices(node: fx.Node) -> list[tuple[fx.Node, int, int]]:
    """Return the index tensors of a node with the least index allowed and the number of rows."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    packet, args = node.target.overloadpacket, node.args
    if packet is aten.embedding:
        return [(args[1], 0, _shape(args[0])[0])]  # type: ignore[list-item]
    if packet is aten.embedding_dense_backward:
        return [(args[1], 0, args[2])]  # type: ignore[list-item]
    if packet is torch.ops.twinstep.unique_rows:
        return []  # passes over what is no row
    if packet in (aten.index, aten.index_put):
        shape = _shape(args[0])
        indices: Any = args[1]
        dims = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        return [(each, -shape[dim], shape[dim]) for dim, each in dims if each.meta["val"].dtype is not torch.bool]
    if packet in _BY_DIM:
        shape = _shape(args[0])
        low = -shape[args[1]] if packet is aten.index_add and shape else 0  # type: ignore[index]
        return [(args[2], low, shape[args[1]] if shape else 1)]  # type: ignore[list-item, index]
    return []


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

_SAME_VALUES = {
    aten.view,
    aten.reshape,
    aten._unsafe_view,
    aten.unsqueeze,
    aten.squeeze,
    aten.permute,
    aten.transpose,
    aten.t,
    aten.expand,
    aten.clone,
    aten.alias,
    aten.detach,
    aten._to_copy,
    torch.ops.prims.convert_element_type,
}
"""Ops whose result holds all values of their first argument and no others."""


def _source(index: fx.Node) -> fx.Node:
    while (
        index.op == "call_function"
        and isinstance(index.target, torch._ops.OpOverload)
        and index.target.overloadpacket in _SAME_VALUES
        and not index.meta["val"].dtype.is_floating_point
    ):
        index = index.args[0]  # type: ignore[assignment]
    return index


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")
