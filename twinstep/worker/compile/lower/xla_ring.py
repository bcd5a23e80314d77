"""Lookups and row updates of tables that are split by rows, around a ring of devices: what `RingEmbedding` asks for.

`xla_trace.as_jax` calls `route` on a copy of the graph. A lookup by an embedding's ids, and the chain that the pass
`sparse_embedding` wrote (rows named, gradients added up, rows of table and state read, the optimizer's own nodes, rows
written), become calls of `embedding/ring/device` under `shard_map`: the optimizer's nodes run on the device that owns a
row. Left to GSPMD, each device would gather all devices' ids, and rows of all of them.

# Shapes: n ids of a chain over all devices, L of them on one, V rows, D columns, R rows of a device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.lower.ring_on import RingOn
from twinstep.worker.compile.lower.xla_ops import JaxInterpreter
from twinstep.worker.compile.partition import copy_graph
from twinstep.worker.compile.passes.emit import sort_nodes
from twinstep.worker.compile.passes.row_values import SHAPED, Lookup, find
from twinstep.worker.compile.strategies import RingEmbedding
from twinstep.worker.embedding.ring.device import kernel, shift
from twinstep.worker.embedding.ring.device.rows import Named, Values, add_up, load, named, spread, totals
from twinstep.worker.embedding.ring.plan import Shards
from twinstep.worker.ops.rows import SUM_ROWS, UNIQUE_ROWS, WRITE_ROWS

aten = torch.ops.aten
FULL, SUBLANES = (aten.full.default, aten.zeros.default), 8  # rows of a tile


def route(graph: fx.GraphModule, captured: Captured, on: RingOn) -> None:
    """Rewrite lookups and row updates of split tables, in place; `captured.context.notes` says what became of each."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    tables = {node: slot for slot, node in enumerate(placeholders[: captured.num_state]) if slot in on.by_rows}
    looked_up = _route_lookups(graph.graph, tables, on)
    found = [_Chain.of(node, tables) for node in graph.graph.find_nodes(op="call_function", target=UNIQUE_ROWS)]
    chains = [each for each in found if isinstance(each, _Chain)]
    _route_updates(graph, chains, tables, on)
    _route_gradients(graph, [node for node in tables if captured.example[tables[node]].dim() == 2], on)
    written = {table for chain in chains for table in chain.states}
    notes = {
        captured.context.slots[tables[table]].path: "looked up"
        + (
            " and updated around the ring"
            if table in written
            else " around the ring, all rows updated on their devices"
        )
        for table in looked_up
    }
    captured.context.notes[RingEmbedding.name] = notes
    sort_nodes(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()


# Lookups.


def _route_lookups(graph: fx.Graph, tables: dict[fx.Node, int], on: RingOn) -> list[fx.Node]:
    """Rewrite lookups, those that wait for no other one in one pass around the ring; return the tables."""
    waves: list[list[fx.Node]] = []
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((depth[each] for each in node.all_input_nodes), default=0)
        if node.target is aten.embedding.default and node.args[0] in tables:
            if before == len(waves):
                waves.append([])
            waves[before].append(node)
            before += 1
        depth[node] = before
    found = list(dict.fromkeys(each.args[0] for wave in waves for each in wave))
    for wave in waves:
        _route_wave(graph, wave, tables, on)
    return found  # type: ignore[return-value]


def _route_wave(graph: fx.Graph, wave: Sequence[fx.Node], slots: Mapping[fx.Node, int], on: RingOn) -> None:
    order = list(dict.fromkeys(each.args[0] for each in wave))
    rows = [each.meta["val"].shape[0] for each in order]  # type: ignore[union-attr]
    number = [order.index(each.args[0]) for each in wave]
    by_kernel = [slots[each] in on.one_line for each in order]  # type: ignore[index]

    def look_up(tables: Sequence[jax.Array], ids: Sequence[jax.Array]) -> list[jax.Array]:
        return _look_up(on, tables, ids, rows, number, by_kernel)

    with graph.inserting_before(wave[-1]):
        found = graph.call_function(look_up, (order, [each.args[1] for each in wave]))
        for place, node in enumerate(wave):
            part = graph.call_function(operator.getitem, (found, place))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            graph.erase_node(node)


def _look_up(
    on: RingOn,
    tables: Sequence[jax.Array],
    ids: Sequence[jax.Array],
    rows: Sequence[int],
    number: Sequence[int],
    by_kernel: Sequence[bool],
) -> list[jax.Array]:
    """Return the rows of each list of ids, [*ids.shape, D]; zeros where an id names none.

    Args:
        on: devices.
        tables: each once.
        ids: any integers of any shape.
        rows: V of each table; what it has beyond is padding.
        number: the table of each list of ids.
        by_kernel: whether the Pallas kernel looks up in a table, else plain JAX; so too where rows fill no whole tiles.
    """
    shards = [Shards(count, on.ring.chips, "block") for count in rows]
    own = [[place for place, each in enumerate(number) if each == table] for table in range(len(tables))]

    def local(tables: list[jax.Array], ids: list[jax.Array]) -> list[jax.Array]:
        asked = []
        for table, each in enumerate(shards):
            joined = jnp.concatenate([ids[place] for place in own[table]])
            asked.append(named(each.positions(joined, jnp), each.stored))
        found = _around(on, tables, [each.rows for each in asked], by_kernel)
        out: list[Any] = [None] * len(ids)
        for table, rows_asked in enumerate(asked):
            by_id, start = spread(found[table], rows_asked), 0
            for place in own[table]:
                out[place] = by_id[start : start + len(ids[place])]
                start += len(ids[place])
        return out

    flat = [_divided(each.reshape(-1), on.ring.chips, -1) for each in ids]
    out = on.on_each(local, (list(tables), flat))
    return [found[: each.size].reshape(*each.shape, -1) for found, each in zip(out, ids, strict=True)]


def _around(on: RingOn, tables: list[jax.Array], rows: list[jax.Array], by_kernel: Sequence[bool]) -> list[jax.Array]:
    """Return the rows [L, D] of each table that this chip names: by the kernel, or where it cannot by plain JAX.

    The kernel moves over HBM what it reads, and slots once a hop; plain JAX reads as many rows a hop as there are slots
    and writes all slots anew: with 2,048 slots of 64 columns 22,000 cycles a hop beside its gather, says libtpu (v5p).
    """
    found: dict[int, jax.Array] = {}
    can = [is_able and table.shape[0] % SUBLANES == 0 for table, is_able in zip(tables, by_kernel, strict=True)]
    lines = [place for place, is_able in enumerate(can) if is_able]
    if lines:
        named_so = [tables[place].reshape(tables[place].shape[0], 1, -1) for place in lines]  # the same bytes: no copy
        got = kernel.look_up(named_so, [rows[place] for place in lines], on.ring, interpret=on.interpret)
        found |= {place: each.reshape(each.shape[0], -1) for place, each in zip(lines, got, strict=True)}
    others = [place for place in range(len(tables)) if place not in found]
    if others:
        got = shift.look_up([tables[place] for place in others], [rows[place] for place in others], on.ring)
        found |= dict(zip(others, got, strict=True))
    return [found[place] for place in range(len(tables))]


def _divided(values: jax.Array, chips: int, fill: int) -> jax.Array:
    """Return values with as many more at the end that the devices divide them."""
    short = -values.shape[0] % chips
    return jnp.pad(values, ((0, short), *((0, 0),) * (values.ndim - 1)), constant_values=fill) if short else values


# Updates.


@dataclass(frozen=True, slots=True)
class _Chain:
    """Row updates of tables and state that share their rows."""

    num_rows: int
    ids: tuple[fx.Node, ...]
    """Parts, end to end."""
    sums: dict[fx.Node, tuple[fx.Node, ...]]
    """Nodes that add gradients up by row → the parts that they add up."""
    reads: dict[fx.Node, fx.Node]
    """Nodes that read the rows of a state → that state."""
    writes: dict[fx.Node, fx.Node]
    """States → what writes their new rows."""
    scalars: tuple[fx.Node, ...]
    """What the optimizer's nodes take beside rows."""
    step: _Step

    @property
    def states(self) -> list[fx.Node]:
        """All states that are read or written, each once."""
        return list(dict.fromkeys([*self.writes, *self.reads.values()]))

    @classmethod
    def of(cls, unique: fx.Node, tables: dict[fx.Node, int]) -> _Chain | str:
        """Return the chain that begins with finding rows, or why it cannot go around the ring."""
        parts: dict[Any, fx.Node] = {user.args[1]: user for user in unique.users}
        rows, order, offsets = (parts.get(place) for place in range(3))
        if rows is None or order is None or offsets is None:
            return "rows are named and not read"
        writes = {user.args[0]: user for user in rows.users if user.target is WRITE_ROWS}
        tests = [user for user in rows.users if user.target is aten.lt.Scalar]
        readable = [user for user in rows.users if user.target is aten.where.self]
        reads = {user: user.args[0] for each in readable for user in each.users}
        sums = [user for user in order.users if user.target is SUM_ROWS]
        closed = (
            len(writes) + len(tests) + len(readable) == len(rows.users)
            and all(user in readable for each in tests for user in each.users)
            and all(read.target is aten.index.Tensor for read in reads)
            and all(each in tables for each in (*writes, *reads.values()))
            and set(order.users) | set(offsets.users) == set(sums)
        )
        if not closed:
            return "its rows are read by more than its update"
        ids, first = _parts(unique.args[0]), {each: _parts(each.args[0]) for each in sums}
        counts = [each.meta["val"].shape[0] for each in ids]
        if any([part.meta["val"].shape[0] for part in each] != counts for each in first.values()):
            ids, first = (unique.args[0],), {each: (each.args[0],) for each in sums}  # type: ignore[assignment, misc]
        starts = {*sums, *reads}
        total = unique.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
        inner, scalars = _between(starts, [each.args[2] for each in writes.values()], total)  # type: ignore[misc]
        allowed = {*inner, *writes.values()}
        if any(user not in allowed for each in (*inner, *starts) for user in each.users):
            return "its update reads the gradients of all rows together"
        if any(each.meta["val"].shape[:1] == (total,) for each in scalars):
            return "its update takes values of other rows"
        step = _Step.of(first, reads, writes, inner, scalars, total)  # type: ignore[arg-type]
        return cls(unique.args[1], ids, first, reads, writes, scalars, step)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Step:
    """The optimizer's nodes as a graph of their own, which outlives those of the step."""

    graph: fx.Graph
    """Takes sums, rows that are read, scalars; gives new rows of the states that are written, in the chain's order."""
    total: int
    """n, where shapes say how many rows there are."""
    reads: tuple[int, ...]
    """The state of each read, by number."""
    written: tuple[bool, ...]
    """Of each state."""

    @classmethod
    def of(
        cls,
        sums: Iterable[fx.Node],
        reads: Mapping[fx.Node, fx.Node],
        writes: Mapping[fx.Node, fx.Node],
        inner: Sequence[fx.Node],
        scalars: Sequence[fx.Node],
        total: int,
    ) -> _Step:
        """Copy the optimizer's nodes out of a step's graph."""
        states = list(dict.fromkeys([*writes, *reads.values()]))
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for each in (*sums, *reads, *scalars):
            new[each] = graph.placeholder(each.name)
            new[each].meta.update(each.meta)
        for node in inner:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[write.args[2]] for write in writes.values()))  # type: ignore[index]
        places = tuple(states.index(each) for each in reads.values())
        return cls(graph, total, places, tuple(each in writes for each in states))

    def rule(self, count: int) -> shift.Rule:
        """Return the nodes as a function of `count` rows."""
        graph = copy_graph(self.graph)
        for node in graph.nodes:
            if node.target in FULL or getattr(node.target, "overloadpacket", None) in SHAPED:
                place = 0 if node.target in FULL else 1
                shape: Any = node.args[place]
                if shape and shape[0] == self.total:
                    node.update_arg(place, [count, *shape[1:]])
        module = fx.GraphModule({}, graph)

        def rule(sums: Values, state: Values, numbers: Values) -> Values:
            results = iter(JaxInterpreter(module).run(*sums, *(state[place] for place in self.reads), *numbers))
            return tuple(next(results) if is_new else old for is_new, old in zip(self.written, state, strict=True))

        return rule


def _parts(values: Any) -> tuple[fx.Node, ...]:
    """Return what a node joins along its first dimension, or the node alone."""
    if values.target is aten.cat.default and (len(values.args) == 1 or values.args[1] == 0):
        return tuple(values.args[0])
    return (values,)


def _between(
    starts: set[fx.Node], ends: Sequence[fx.Node], total: int
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Return the nodes that lead from `starts` to `ends`, in the graph's order, and what they take beside."""
    after = set(starts)
    graph = ends[0].graph
    for node in graph.nodes:
        if any(each in after for each in node.all_input_nodes):
            after.add(node)
    inner: set[fx.Node] = set()
    beside: dict[fx.Node, None] = {}
    queue = list(ends)
    while queue:
        node = queue.pop()
        if node in inner or node in starts:
            continue
        shape: Any = node.args[0] if node.target in FULL else ()
        if node in after or (shape and shape[0] == total):
            inner.add(node)
            queue += node.all_input_nodes
        else:
            beside[node] = None
    return tuple(node for node in graph.nodes if node in inner), tuple(beside)


def _route_updates(graph: fx.GraphModule, chains: Sequence[_Chain], slots: Mapping[fx.Node, int], on: RingOn) -> None:
    """Rewrite all chains, in one pass around the ring."""
    if not chains:
        return
    lined = [
        all(slots[each] in on.lined for each in chain.states if each.meta["val"].shape[-1] > 1) for chain in chains
    ]

    def update(
        states: Sequence[Sequence[jax.Array]],
        ids: Sequence[Sequence[jax.Array]],
        values: Sequence[Sequence[Sequence[jax.Array]]],
        scalars: Sequence[Sequence[jax.Array]],
    ) -> list[jax.Array]:
        new = _update(on, chains, states, ids, values, scalars, lined)
        return [part for state in new for part in state]

    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        found = graph.graph.call_function(
            update,
            (
                [chain.states for chain in chains],
                [chain.ids for chain in chains],
                [[*chain.sums.values()] for chain in chains],
                [chain.scalars for chain in chains],
            ),
        )
        place = 0
        for chain in chains:
            for table in chain.states:
                if table in chain.writes:
                    part = graph.graph.call_function(operator.getitem, (found, place))
                    part.meta.update(chain.writes[table].meta)
                    chain.writes[table].replace_all_uses_with(part)
                place += 1


def _update(
    on: RingOn,
    chains: Sequence[_Chain],
    states: Sequence[Sequence[jax.Array]],
    ids: Sequence[Sequence[jax.Array]],
    values: Sequence[Sequence[Sequence[jax.Array]]],
    scalars: Sequence[Sequence[jax.Array]],
    lined: Sequence[bool],
) -> list[Values]:
    """Return the new states of all chains; `lined`: whether rows of one lie in lines."""
    shards = [Shards(chain.num_rows, on.ring.chips, "block") for chain in chains]

    def local(states: Any, ids: Any, values: Any, scalars: Any) -> list[Values]:
        asked: list[Named] = []
        sums: list[Values] = []
        for each, parts, adding in zip(shards, ids, values, strict=True):
            found = named(each.positions(jnp.concatenate(parts), jnp), each.stored)
            asked.append(found)
            sums.append(tuple(add_up(jnp.concatenate(every), found) for every in adding))
        loads, sums = totals([each.rows for each in asked], sums, [each.stored for each in shards], on.ring)
        rules = [chain.step.rule(len(each.rows)) for chain, each in zip(chains, asked, strict=True)]
        kept = [tuple(each) for each in states]
        return shift.bring_home(kept, loads, sums, rules, list(scalars), on.ring, lined=lined, interpret=on.interpret)

    def divided(tree: Any, fill: int) -> Any:
        return jax.tree.map(lambda each: _divided(each, on.ring.chips, fill), tree)

    lists = [[*map(list, each)] for each in (states, ids, scalars)]
    adding = [[list(every) for every in each] for each in values]
    new: list[Values] = on.on_each(
        local, (lists[0], divided(lists[1], -1), divided(adding, 0), [tuple(each) for each in lists[2]]), whole=3
    )
    return new


# Gradients of tables whose optimizer updates all rows.


def _route_gradients(graph: fx.GraphModule, tables: Sequence[fx.Node], on: RingOn) -> None:
    """Rewrite what adds lookups' gradients up to a gradient of all rows: each device has those of its own rows."""
    shapes = {table.meta["val"].shape for table in tables if table.meta["val"].shape[0] % on.ring.chips == 0}
    rows = find(graph).rows
    for node, value in rows.items():
        if not value.lookups or node.meta["val"].shape not in shapes:
            continue
        if any(user in rows and rows[user].lookups for user in node.users):
            continue  # one that is part of a larger sum
        with graph.graph.inserting_before(node):
            lookups = value.lookups
            given = [[each.ids, each.values, each.mask] for each in lookups]
            part = graph.graph.call_function(_gradient_of(lookups, value.num_rows, on), (given,))
            part.meta.update(node.meta)
        node.replace_all_uses_with(part)


def _gradient_of(lookups: Sequence[Lookup], num_rows: int, on: RingOn) -> Callable[..., jax.Array]:
    """Return what makes the gradient [V, D] of lookups' ids, values and masks."""
    shards = Shards(num_rows, on.ring.chips, "block")

    def local(ids: list[jax.Array], values: list[jax.Array]) -> jax.Array:
        found = named(shards.positions(jnp.concatenate(ids), jnp), shards.stored)
        sums = add_up(jnp.concatenate(values), found)
        zeros = jnp.zeros((shards.per_chip, sums.shape[1]), jnp.float32)
        new = shift.bring_home([(zeros,)], [load(found)], [(sums,)], [_add], [()], on.ring)
        return new[0][0]

    def gradient(given: Sequence[Sequence[Any]]) -> jax.Array:
        flat_ids, flat_values = [], []
        for lookup, (ids, values, mask) in zip(lookups, given, strict=True):
            ids = ids.reshape(-1)
            if lookup.wraps:
                ids = jnp.where(ids < 0, ids + num_rows, ids)
            if lookup.skips is not None:
                ids = jnp.where(ids == lookup.skips, -1, ids)
            if mask is not None:
                ids = jnp.where(mask.reshape(-1), ids, -1)
            flat_ids.append(_divided(ids, on.ring.chips, -1))
            wide = jnp.broadcast_to(values, lookup.shape).reshape(lookup.count, -1)
            flat_values.append(_divided(wide, on.ring.chips, 0))
        found: jax.Array = on.on_each(local, (flat_ids, flat_values))
        return found

    return gradient


def _add(sums: Values, state: Values, _: Values) -> Values:
    return (state[0] + sums[0],)
