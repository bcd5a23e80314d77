"""Which values of a functional graph are computed row by row of a table, and from whose gradient.

A value is row-local if its row r (dimension 0) depends on rows r of its inputs alone. State tensors are; so is a
lookup's gradient, zero but in the rows that its ids name; so is what elementwise ops, and reductions over other
dimensions, make of them. `quiet.py` knows what becomes of the rows that no id names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from twinstep.worker.compile.passes.quiet import UNKNOWN, WHOLE, Quiet, of_number, rule_for

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one lookup's backward adds to a table's gradient: a row of `values` to each row that `ids` name."""

    ids: fx.Node
    values: fx.Node
    shape: tuple[int, ...]
    """What `values` broadcast to: the ids' shape, then a row's."""
    mask: fx.Node | None = None
    """As many bools as ids; where False, nothing is added."""
    wraps: bool = False
    """Whether an id of −1 names the last row, as in Python."""
    skips: int | None = None
    """An id that adds nothing: padding_idx."""

    @property
    def count(self) -> int:
        """How many ids."""
        return int(self.ids.meta["val"].numel())


GRADIENT = Quiet(zero=True, non_negative=True, finite=True)


@dataclass(frozen=True, slots=True)
class RowValue:
    """A value that is computed row by row."""

    num_rows: int
    quiet: Quiet
    sources: frozenset[fx.Node] = frozenset()
    """Nodes that scatter the gradients it is made of; none: it is made of placeholders."""
    lookups: tuple[Lookup, ...] | None = None
    """If it is nothing but the sum of lookups' gradients: these."""


@dataclass(slots=True)
class RowValues:
    """What `find` found in a graph."""

    rows: dict[fx.Node, RowValue] = field(default_factory=dict)
    reductions: dict[fx.Node, RowValue] = field(default_factory=dict)
    """Reductions over all rows, to which quiet rows add nothing, and the row value that each reduces."""


def find(graph: fx.GraphModule) -> RowValues:
    """Return the row-local values of a functional graph."""
    found = RowValues()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        if node.op == "placeholder" and value.dim():
            found.rows[node] = RowValue(value.shape[0], Quiet(same=node, finite=True))
        elif node.op == "call_function":
            _visit(node, found)
    return found


def _visit(node: fx.Node, found: RowValues) -> None:
    value = _scattered(node, found) or _elementwise(node, found) or _of_one(node, found)
    if value is None:
        return
    same = value.quiet.same
    if same is not None and same.meta["val"].dtype != node.meta["val"].dtype:
        value = replace(value, quiet=replace(value.quiet, same=None))
    found.rows[node] = value


def row_inputs(node: fx.Node, found: RowValues) -> list[fx.Node]:
    """Return those of a node's inputs that are row-local."""
    return [each for each in node.all_input_nodes if each in found.rows]


# What scatters gradients.


def _scattered(node: fx.Node, found: RowValues) -> RowValue | None:
    """Return the row value of a node that adds lookups' gradients to zeros, or to such a sum."""
    if node.target is aten.add.Tensor:
        return _merged(node, found)
    args: Any = node.args
    if node.target is aten.embedding_dense_backward.default:
        gradient, ids, _, padding, by_frequency = args
        lookup = Lookup(ids, gradient, tuple(gradient.meta["val"].shape), skips=padding if padding >= 0 else None)
        return None if by_frequency else _source(node, (), lookup)
    lookup_or_none = _lookup_of(node)
    if lookup_or_none is None or not lookup_or_none.count:
        return None
    base = args[0]
    before = _lookups_of(base, found)
    if before is None or base.meta["val"].shape != node.meta["val"].shape:
        return None
    return _source(node, before, lookup_or_none, found.rows[base].sources if before else frozenset())


def _source(
    node: fx.Node, before: tuple[Lookup, ...], lookup: Lookup, sources: frozenset[fx.Node] = frozenset()
) -> RowValue:
    return RowValue(node.meta["val"].shape[0], GRADIENT, sources | {node}, (*before, lookup))


def _lookup_of(node: fx.Node) -> Lookup | None:
    """Return what a scattering node adds to its first argument."""
    args: Any = node.args
    if node.target is aten.index_put.default and len(args) > 3 and args[3] is True:
        ids = _only_ids(args[1])
        return None if ids is None else Lookup(ids, args[2], _shape(ids, node), wraps=True)
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        ids = _only_ids(args[2])
        if ids is None or args[1].meta["val"].numel() != ids.meta["val"].numel():
            return None
        return Lookup(ids, args[3], _shape(ids, node), mask=args[1], wraps=True)
    if node.target is aten.index_add.default and args[1] == 0 and node.kwargs.get("alpha", 1) == 1:
        return Lookup(args[2], args[3], tuple(args[3].meta["val"].shape))
    if node.target is aten.scatter_add.default and args[1] == 0:
        ids = _spread_ids(args[2], args[3])
        return None if ids is None else Lookup(ids, args[3], tuple(args[3].meta["val"].shape))
    return None


def _shape(ids: fx.Node, table: fx.Node) -> tuple[int, ...]:
    return (*ids.meta["val"].shape, *table.meta["val"].shape[1:])


def _only_ids(indices: Sequence[fx.Node | None]) -> fx.Node | None:
    """Return the one index tensor, if it is of integers."""
    if len(indices) != 1 or indices[0] is None or indices[0].meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    return indices[0]


def _spread_ids(index: fx.Node, values: fx.Node) -> fx.Node | None:
    """Return the ids [n, 1] that `index` [n, D] repeats over all columns, if it does that."""
    if index.target is not aten.expand.default or index.meta["val"].shape != values.meta["val"].shape:
        return None
    narrow: Any = index.args[0]
    shape = narrow.meta["val"].shape
    rest_is_one = all(size == 1 for size in shape[1:])
    return narrow if len(shape) == index.meta["val"].dim() and rest_is_one else None


def _lookups_of(node: fx.Node, found: RowValues) -> tuple[Lookup, ...] | None:
    """Return the lookups whose gradients `node` is the sum of: none if it is zeros, None if it is something else."""
    if node in found.rows and found.rows[node].lookups is not None:
        return found.rows[node].lookups
    return () if filled_with(node) == 0 else None


def _merged(node: fx.Node, found: RowValues) -> RowValue | None:
    """Return the sum of two sums of lookups' gradients as one."""
    parts = [each for each in node.args if isinstance(each, fx.Node) and each in found.rows]
    if len(parts) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = (found.rows[each] for each in parts)
    shapes = {(each.meta["val"].dtype, each.meta["val"].shape) for each in parts}
    if left.lookups is None or right.lookups is None or left.sources & right.sources or len(shapes) > 1:
        return None
    return RowValue(left.num_rows, GRADIENT, left.sources | right.sources, (*left.lookups, *right.lookups))


def filled_with(node: Any) -> float | None:
    """Return the number that a node fills a tensor with, if it does that."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in (aten.zeros, aten.new_zeros, aten.zeros_like):
        return 0
    place = {aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}.get(packet)
    value = None if place is None or len(node.args) <= place else node.args[place]
    return value if isinstance(value, int | float) else None


# What is made of row values.


def _elementwise(node: fx.Node, found: RowValues) -> RowValue | None:
    rule = rule_for(node.target)
    inputs = row_inputs(node, found)
    if rule is None or not inputs or any(isinstance(each, fx.Node) for each in node.kwargs.values()):
        return None
    result = node.meta["val"]
    sizes = {found.rows[each].num_rows for each in inputs if spans(each, result)}
    if len(sizes) != 1 or not result.dim() or result.shape[0] not in sizes:
        return None
    facts = [_facts(each, result, found) for each in node.args]
    if any(each is None for each in facts):
        return None
    spanning = [found.rows[each] for each in inputs if spans(each, result)]
    sources = frozenset[fx.Node]().union(*(each.sources for each in spanning))
    return RowValue(result.shape[0], rule([each for each in facts if each is not None], node), sources)


def spans(node: fx.Node, result: Tensor) -> bool:
    """Say whether dimension 0 of an input is dimension 0 of an elementwise op's result, not broadcast."""
    value = node.meta["val"]
    return bool(value.dim() == result.dim() and value.shape[0] == result.shape[0])


def _facts(argument: Any, result: Tensor, found: RowValues) -> Quiet | None:
    """Return what is known of an argument's quiet rows; None if it has rows of its own that are not row-local."""
    if isinstance(argument, int | float):
        return of_number(argument)
    if not isinstance(argument, fx.Node):
        return UNKNOWN
    number = filled_with(argument)
    if number is not None:
        return of_number(number)
    value = argument.meta.get("val")
    if not isinstance(value, Tensor):
        return WHOLE
    if not spans(argument, result):
        return WHOLE if argument not in found.rows or not found.rows[argument].sources else None
    return found.rows[argument].quiet if argument in found.rows else None


SHAPED = (aten.view, aten.reshape, aten.expand)
"""Ops whose argument 1 is a shape, the rows' number in it."""
_KEEP_ROWS = (aten.unsqueeze, aten.squeeze, aten.slice, *SHAPED)
_REDUCE = (aten.sum, aten.mean, aten.any, aten.all, aten.amax, aten.amin, aten.linalg_vector_norm)


def _of_one(node: fx.Node, found: RowValues) -> RowValue | None:
    """Return the row value of a view or a reduction of one row value; note reductions over all rows."""
    packet = getattr(node.target, "overloadpacket", None)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in found.rows:
        return None
    of = found.rows[source]
    result = node.meta["val"]
    if packet in _KEEP_ROWS:
        dims = _dims(node, 1) if packet not in SHAPED else (1,)
        if 0 in dims or not result.dim() or result.shape[0] != of.num_rows:
            return None
        return replace(of, quiet=replace(of.quiet, same=None), lookups=None)
    if packet not in _REDUCE or (packet is aten.linalg_vector_norm and _order(node) < 0):
        return None
    dims = _dims(node, 2 if packet is aten.linalg_vector_norm else 1)
    quiet = _reduced(packet, of.quiet)
    if 0 not in dims:
        return RowValue(of.num_rows, quiet, of.sources)
    if of.sources and (quiet.zero or quiet.truth is (packet is aten.all)) and packet is not aten.mean:
        found.reductions[node] = of
    return None


def _dims(node: fx.Node, place: int) -> tuple[int, ...]:
    """Return the dimensions that a node names, from 0; all of them if it names none."""
    source: Any = node.args[0]
    rank = max(source.meta["val"].dim(), 1) + (node.target is aten.unsqueeze.default)
    given: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    if given is None or given == []:
        return tuple(range(rank))
    dims = given if isinstance(given, list | tuple) else [given]
    return tuple(each + rank if each < 0 else each for each in dims)


def _order(node: fx.Node) -> float:
    order: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    return float(order)


def _reduced(packet: Any, quiet: Quiet) -> Quiet:
    if packet is aten.any or packet is aten.all:
        return Quiet(truth=quiet.truth)
    if packet is aten.linalg_vector_norm:
        return Quiet(zero=quiet.zero, non_negative=True, finite=quiet.finite)
    return Quiet(zero=quiet.zero, non_negative=quiet.non_negative, positive=quiet.positive, finite=quiet.finite)
