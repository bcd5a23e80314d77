"""Sparse embedding: a table's gradient and update for the rows that a batch names, never for all of them.

The gradient of a lookup is zero but in the rows that its ids name. Where the optimizer provably leaves a row with a
zero gradient as it is (`row_values.py`, `quiet.py`), the whole chain from gradient to new state is computed again on
[ids, …] instead of [rows, …]: ids are made unique, their gradients added up, rows of table and state gathered, the very
same ops applied, and the rows written back. Norms of the gradient (clipping) are sums over the same rows.

A table whose optimizer moves unused rows (momentum, Adam, weight decay), or whose gradient is read otherwise, stays
dense; `context.notes` says why.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.emit import Emitter, sort_nodes
from twinstep.worker.compile.passes.quiet import rule_for
from twinstep.worker.compile.passes.row_values import SHAPED, Lookup, RowValues, filled_with, find, spans
from twinstep.worker.compile.strategies import RingEmbedding, SparseEmbedding
from twinstep.worker.ops.rows import SUM_ROWS, UNIQUE_ROWS, WRITE_ROWS

aten = torch.ops.aten
NOTES = "sparse_embedding"


def sparse_embedding(graph: fx.GraphModule, context: PassContext) -> int:
    """Rewrite every group of tables that allows it; return how many tables and state tensors are written by rows."""
    wanted = context.strategy(SparseEmbedding)
    if wanted is None:
        return 0
    graph.graph.eliminate_dead_code()
    found = find(graph)
    notes: dict[str, str] = context.notes.setdefault(NOTES, {})
    changed = 0
    for group in _groups(graph, found):
        title = _title(graph, group, context)
        if title is None:
            continue
        reason = _why_dense(group, found, context, graph) or _too_few_rows(group, wanted, context)
        if reason is None:
            changed += _Rewrite(graph, found, group).run(len(context.slots))
            notes[title] = f"sparse: {group.num_ids} ids a step, {group.num_rows} rows"
        else:
            notes[title] = f"dense: {reason}"
    sort_nodes(graph.graph)
    graph.graph.eliminate_dead_code()
    return changed


def _title(graph: fx.GraphModule, group: Group, context: PassContext) -> str | None:
    """Return the names of a group's state, or of parameters of its shape; None: it is no table's gradient."""
    slots = group.slots(len(context.slots))
    if not slots:
        shapes = {node.meta["val"].shape for node in group.nodes}
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        slots = [
            slot
            for slot, (node, each) in enumerate(zip(placeholders, context.slots, strict=False))
            if each.role == "parameter" and node.meta["val"].shape in shapes
        ]
    return ", ".join(context.slots[slot].path for slot in slots) or None


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that meet, and all that is made of them."""

    lookups: tuple[Lookup, ...]
    """Of all of the group's gradients, each once."""
    nodes: tuple[fx.Node, ...]
    """Row values made of them, in the graph's order."""
    reductions: tuple[fx.Node, ...]
    num_rows: int
    results: tuple[fx.Node, ...]
    """The graph's results."""

    @property
    def num_ids(self) -> int:
        """Ids looked up in a step, repetitions counted."""
        return sum(each.count for each in self.lookups)

    def slots(self, count: int) -> list[int]:
        """Return the slots of state whose new value is one of `nodes`."""
        members = set(self.nodes)
        return [slot for slot, result in enumerate(self.results[:count]) if result in members]


def _groups(graph: fx.GraphModule, found: RowValues) -> list[Group]:
    """Return groups of scattered gradients: two belong together if a value is made of both."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    for value in found.rows.values():
        sources = sorted(value.sources, key=lambda each: each.name)
        for other in sources[1:]:
            parent[root(other)] = root(sources[0])
    members: dict[fx.Node, list[fx.Node]] = {}
    reductions: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        for values, into in ((found.rows, members), (found.reductions, reductions)):
            if node in values and values[node].sources:
                into.setdefault(root(min(values[node].sources, key=lambda each: each.name)), []).append(node)
    results: Any = graph.graph.output_node().args[0]
    groups = []
    for key, nodes in members.items():
        lookups = dict.fromkeys(each for node in nodes for each in found.rows[node].lookups or ())
        num_rows = found.rows[nodes[0]].num_rows
        groups.append(Group(tuple(lookups), tuple(nodes), tuple(reductions.get(key, ())), num_rows, tuple(results)))
    return groups


def _why_dense(group: Group, found: RowValues, context: PassContext, graph: fx.GraphModule) -> str | None:
    """Return what keeps a group's tables from being updated by rows; None: nothing does."""
    members, reductions = set(group.nodes), set(group.reductions)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if any(found.rows[node].num_rows != group.num_rows for node in group.nodes):
        return "its gradient meets one of a table with another number of rows"
    if len({lookup.ids.meta["val"].dtype for lookup in group.lookups}) > 1:
        return "its ids are of two dtypes"
    for node in group.nodes:
        for user in node.users:
            if user not in members and user not in reductions and user.op != "output":
                return f"{user.target} reads all rows of its gradient or of the updated table ({node.name})"
        for place, result in enumerate(group.results):
            if result is not node:
                continue
            if place >= len(context.slots):
                return "the step returns its gradient or the updated table"
            if found.rows[node].quiet.same is not placeholders[place]:
                slot = context.slots[place].path
                return f"rows that no id names change too: momentum, weight decay or a running mean, seen in {slot}"
    return None


def _too_few_rows(group: Group, wanted: SparseEmbedding, context: PassContext) -> str | None:
    ring = context.strategy(RingEmbedding)
    if ring is not None and any(ring.names(context.slots[slot].name) for slot in group.slots(len(context.slots))):
        return None  # all rows at once are on no device
    if group.num_rows > group.num_ids * wanted.min_rows_per_id:
        return None
    return f"{group.num_ids} ids a step for {group.num_rows} rows: all rows at once are cheaper"


class _Rewrite:
    """Writes one group's chain anew, on the rows that ids name.

    New nodes go before the graph's output; `sort_nodes` brings them to their places.
    """

    def __init__(self, graph: fx.GraphModule, found: RowValues, group: Group) -> None:
        self._graph = graph.graph
        self._found = found
        self._group = group
        self._emit = Emitter(graph)
        self._on_rows: dict[fx.Node, fx.Node] = {}
        """Values of all rows → the same of the rows in use, [ids, …]."""

    def run(self, num_slots: int) -> int:
        """Rewrite; return how many state tensors are now written by rows."""
        output = self._graph.output_node()
        with self._graph.inserting_before(output):
            self._find_rows()
            for node in self._group.reductions:
                node.replace_all_uses_with(self._reduced(node))
            results: Any = list(output.args[0])  # type: ignore[arg-type]
            placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
            slots = self._group.slots(num_slots)
            for slot in slots:
                values = self._of_rows(results[slot])
                results[slot] = self._emit.call(WRITE_ROWS, placeholders[slot], self._rows, values)
        output.args = (tuple(results),)
        return len(slots)

    def _find_rows(self) -> None:
        call, group = self._emit.call, self._group
        found = call(UNIQUE_ROWS, self._joined([*map(self._ids, group.lookups)]), group.num_rows)
        self._rows, self._order, self._offsets = (call(operator.getitem, found, place) for place in range(3))
        # Slots left over read the last row, and nobody reads what they make of it.
        value = self._rows.meta["val"]
        last = call(aten.full.default, [group.num_ids], group.num_rows - 1, dtype=value.dtype, device=value.device)
        self._readable = call(aten.where.self, call(aten.lt.Scalar, self._rows, group.num_rows), self._rows, last)

    def _ids(self, lookup: Lookup) -> fx.Node:
        """Return a lookup's ids, [n]; −1 where it adds nothing."""
        call = self._emit.call
        ids = self._flat(lookup.ids, [lookup.count])
        if lookup.wraps:
            wrapped = call(aten.add.Tensor, ids, self._group.num_rows)
            ids = call(aten.where.self, call(aten.lt.Scalar, ids, 0), wrapped, ids)
        added = None
        if lookup.mask is not None:
            added = self._flat(lookup.mask, [lookup.count])
        elif lookup.skips is not None:
            added = call(aten.ne.Scalar, ids, lookup.skips)
        if added is None:
            return ids
        value = ids.meta["val"]
        nowhere = call(aten.full.default, [lookup.count], -1, dtype=value.dtype, device=value.device)
        return call(aten.where.self, added, ids, nowhere)

    def _values(self, lookup: Lookup) -> fx.Node:
        """Return what a lookup adds, [n, D]."""
        node = lookup.values
        if tuple(node.meta["val"].shape) != lookup.shape:
            node = self._emit.call(aten.expand.default, node, list(lookup.shape))
        return self._flat(node, [lookup.count, math.prod(lookup.shape) // lookup.count])

    def _flat(self, node: fx.Node, shape: list[int]) -> fx.Node:
        return node if list(node.meta["val"].shape) == shape else self._emit.call(aten.reshape.default, node, shape)

    def _joined(self, parts: Sequence[fx.Node]) -> fx.Node:
        return parts[0] if len(parts) == 1 else self._emit.call(aten.cat.default, list(parts))

    def _of_rows(self, node: fx.Node) -> fx.Node:
        """Return a row value of the rows in use."""
        if node not in self._on_rows:
            self._on_rows[node] = self._made(node)
        return self._on_rows[node]

    def _made(self, node: fx.Node) -> fx.Node:
        call = self._emit.call
        if node.op == "placeholder":
            return call(aten.index.Tensor, node, [self._readable])
        shape = [self._group.num_ids, *node.meta["val"].shape[1:]]
        lookups = self._found.rows[node].lookups
        if lookups is not None:
            return self._flat(self._summed(lookups), shape)
        if node.target.overloadpacket in SHAPED:  # type: ignore[union-attr]
            return call(node.target, self._of_rows(node.args[0]), shape)  # type: ignore[arg-type]
        return call(node.target, *self._arguments(node), **node.kwargs)

    def _arguments(self, node: fx.Node) -> list[Any]:
        """Return a node's arguments, those of all rows cut down to the rows in use."""
        if rule_for(node.target) is None:  # not elementwise: a view or a reduction, of its first argument
            source: Any = node.args[0]
            return [self._of_rows(source), *node.args[1:]]
        result = node.meta["val"]
        return [self._argument(each, result) if isinstance(each, fx.Node) else each for each in node.args]

    def _argument(self, node: fx.Node, result: torch.Tensor) -> fx.Node:
        if not spans(node, result):
            return node
        number, value = filled_with(node), node.meta["val"]
        if number is None:
            return self._of_rows(node)
        shape = [self._group.num_ids, *value.shape[1:]]
        return self._emit.call(aten.full.default, shape, number, dtype=value.dtype, device=value.device)

    def _summed(self, lookups: Sequence[Lookup]) -> fx.Node:
        """Return the sum of some of the group's lookups' gradients, [ids, D]."""
        like = lookups[0].values.meta["val"]
        width = math.prod(lookups[0].shape) // lookups[0].count
        parts = [
            self._values(each)
            if each in lookups
            else self._emit.call(aten.full.default, [each.count, width], 0, dtype=like.dtype, device=like.device)
            for each in self._group.lookups
        ]
        return self._emit.call(SUM_ROWS, self._joined(parts), self._order, self._offsets)

    def _reduced(self, node: fx.Node) -> fx.Node:
        """Return a reduction over all rows, from the rows in use: the others would add nothing."""
        source: Any = node.args[0]
        found = self._emit.call(node.target, self._of_rows(source), *node.args[1:], **node.kwargs)
        if node.target is aten.amax.default:  # there is a row that no id names, a zero
            return self._emit.call(aten.relu.default, found)
        if node.target is aten.amin.default:
            negated = self._emit.call(aten.neg.default, found)
            return self._emit.call(aten.neg.default, self._emit.call(aten.relu.default, negated))
        return found
