"""The ring as Pallas kernels for TPUs: a row is one DMA, and on the way to whoever asked slots travel by remote DMA.

The other form of `shift.py`'s two functions, with the same numbers. Slots ascend by position, so those of one chip's
rows stand side by side, and a chip touches no others. Tables stay in HBM as [R, 1, D], D a multiple of 128, so that a
row is a tile's own; one number a row is held [R / 128, 1, 128], and in VMEM while a kernel runs. Rows of bfloat16 are
words: `words.py`.

# Shapes as in `legs.py` and `rows.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from twinstep.worker.embedding.ring.device.legs import LANES, Leg, Road, between, copy, legs_of, own_slots
from twinstep.worker.embedding.ring.device.rows import Load, Ring, Values, along
from twinstep.worker.embedding.ring.device.shift import Rule
from twinstep.worker.embedding.ring.device.words import from_words, to_words

GROUP = 8  # rows that are updated at once
LINES_LIMIT = 24 << 20  # bytes of VMEM for what is one number a row
DTYPES = ("float32", "bfloat16")
BARRIER = 11  # its number, which kernels of other kinds must not share


def why_not(dim: int, dtype: str, per_row: Sequence[bool] = (), rows: int = 0) -> str | None:
    """Return why the kernels cannot take a table, or None.

    Args:
        dim: D.
        dtype: of the stored rows.
        per_row: of each slot of the optimizer, whether it is one number a row.
        rows: R.
    """
    if dtype not in DTYPES:
        return f"its rows are {dtype}; they take {' and '.join(DTYPES)}"
    if dim > 16 * LANES:
        return f"it has {dim} columns, and rows of more than {16 * LANES} do not fit beside each other in VMEM"
    lines = sum(per_row) * -(-rows // LANES) * LANES * 4
    if lines > LINES_LIMIT:
        return f"{rows} rows on a chip have {lines} bytes of numbers of one a row, VMEM takes {LINES_LIMIT}"
    return None


def stored_shape(rows: int, chips: int, dim: int, *, per_row: bool, dtype: str = "float32") -> tuple[int, int, int]:
    """Return the shape over all chips of a part of a table with R rows on each, as floats: words have half as many.

    Args:
        rows: R.
        chips: N.
        dim: D.
        per_row: whether it is one number a row.
        dtype: of the table's rows, which is not that of its other parts.
    """
    if per_row:
        return chips * -(-rows // LANES), 1, LANES
    lanes = LANES * (2 if dtype == "bfloat16" else 1)
    return chips * rows, 1, -(-dim // lanes) * lanes


def _hbm(count: int) -> list[pl.BlockSpec]:
    return [pl.BlockSpec(memory_space=pl.ANY)] * count


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ways(legs: Sequence[Leg]) -> list[Any]:
    """Return the scratch of all kernels: headers, the one that is read, and semaphores of each leg."""
    return [
        [pltpu.VMEM((2, 1, leg.header), jnp.int32) for leg in legs],
        pltpu.SMEM((1, max(leg.header for leg in legs)), jnp.int32),
        pltpu.SemaphoreType.DMA((len(legs), 2)),  # headers sent, by the place they stood in
        pltpu.SemaphoreType.DMA((len(legs), 2)),  # headers arrived
        pltpu.SemaphoreType.DMA((len(legs), 2)),  # slots sent
        pltpu.SemaphoreType.DMA((len(legs), 2)),  # slots arrived
        pltpu.SemaphoreType.DMA((len(legs),)),  # slots are where they are wanted
        pltpu.SemaphoreType.REGULAR((len(legs),)),  # the next chip's other place is free
        pltpu.SemaphoreType.DMA(()),  # copies within the chip
    ]


class _Travel:
    """Legs on the road: what both kernels do alike."""

    def __init__(self, legs: Sequence[Leg], ring: Ring, ways: Sequence[Any], places: Sequence[Any]) -> None:
        self.legs, self.road, self.places = legs, Road(ring), places
        self.headers, self.read = ways[:2]
        (self._header_sent, self._header_there, self._sent, self._there, self._home, self._free, self.local) = ways[2:]

    def begin(self, headers: Sequence[Any]) -> None:
        for number, header in enumerate(headers):
            copy(header, self.headers[number].at[0], self.local)
        self.road.meet()

    def _copies(self, number: int, place: Any) -> list[Any]:
        """Return the copies of a leg from a place here to the other one on the next chip."""
        other = 1 - place
        header, slots = self.headers[number], self.places[number]
        moving = [
            (header, self._header_sent.at[number, place], self._header_there.at[number, other]),
            (slots, self._sent.at[number, place], self._there.at[number, other]),
        ]
        return [self.road.send(each.at[place], each.at[other], sent, there) for each, sent, there in moving]

    def send(self, number: int, place: Any) -> None:
        for each in self._copies(number, place):
            each.start()

    def wait_sent(self, number: int, place: Any) -> None:
        for each in self._copies(number, place):
            each.wait_send()

    def wait_arrived(self, number: int, place: Any) -> None:
        for each in self._copies(number, 1 - place):
            each.wait_recv()

    def wait_free(self, number: int) -> None:
        pl.semaphore_wait(self._free.at[number], 1)

    def tell_free(self, number: int) -> None:
        self.road.free(self._free.at[number])

    def home(self, number: int, place: Any, target: Any) -> Any:
        """Return the last copy of a leg's slots, to where they are wanted on the next chip."""
        return self.road.send(
            self.places[number].at[place], target, self._sent.at[number, place], self._home.at[number]
        )

    def own(self, number: int, place: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Read a leg's header; return what `own_slots` does."""
        leg = self.legs[number]
        copy(self.headers[number].at[place], self.read.at[:, pl.ds(0, leg.header)], self.local)
        return own_slots(leg, self.read, self.road.me)


def look_up(
    tables: Sequence[jax.Array], rows: Sequence[jax.Array], ring: Ring, *, interpret: Any = False
) -> list[jax.Array]:
    """`shift.look_up` of tables [R, 1, D]."""
    legs = legs_of([each.shape[0] for each in rows], [each.shape[0] for each in tables], ring.chips)
    wide = [(leg.count, 1, tables[leg.table].shape[2]) for leg in legs]
    dtypes = [tables[leg.table].dtype for leg in legs]
    call = pl.pallas_call(
        functools.partial(_look_up, legs=legs, ring=ring, num_tables=len(tables)),
        in_specs=_hbm(len(legs) + len(tables)),
        out_specs=_hbm(2 * len(legs)),
        out_shape=[
            *map(_shape, wide, dtypes),
            *(_shape((2, *shape), dtype) for shape, dtype in zip(wide, dtypes, strict=True)),
        ],
        scratch_shapes=_ways(legs),
        compiler_params=pltpu.CompilerParams(collective_id=BARRIER if ring.chips > 1 else None, has_side_effects=True),
        interpret=interpret,
        name="ring_look_up",
    )
    found = call(*(leg.header_of(rows[leg.table]) for leg in legs), *tables)[: len(legs)]
    out = []
    for number, positions in enumerate(rows):
        parts = [each for leg, each in zip(legs, found, strict=True) if leg.table == number]
        whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        # Slots left over went round without being written.
        out.append(jnp.where(along(positions < ring.chips * tables[number].shape[0], whole), whole, 0))
    return out


def _look_up(*refs: Any, legs: Sequence[Leg], ring: Ring, num_tables: int) -> None:
    count = len(legs)
    headers, refs = refs[:count], refs[count:]
    tables, refs = refs[:num_tables], refs[num_tables:]
    found, places, ways = refs[:count], refs[count : 2 * count], refs[2 * count :]
    travel, chips = _Travel(legs, ring, ways, places), ring.chips
    travel.begin(headers)

    def gather(number: int, place: Any, target: Any) -> None:
        start, stop, row = travel.own(number, place)
        table = tables[legs[number].table]

        def moving(i: Any, at: Any) -> Any:
            return pltpu.make_async_copy(table.at[pl.ds(at, 1)], target.at[pl.ds(i, 1)], travel.local)

        between(start, stop, lambda i: moving(i, row(i)).start())
        between(start, stop, lambda i: moving(i, 0).wait())

    if chips == 1:
        for number in range(count):
            gather(number, 0, found[number])
        return

    def hop(k: Any) -> None:
        place = lax.rem(k, 2)
        for number in range(count):

            @pl.when(k > 0)
            def _(number: int = number) -> None:
                travel.wait_sent(number, 1 - place)

                @pl.when(k < chips - 1)
                def _() -> None:
                    travel.tell_free(number)

                travel.wait_arrived(number, place)

            gather(number, place, places[number].at[place])

            @pl.when((k > 0) & (k < chips - 1))
            def _(number: int = number) -> None:
                travel.wait_free(number)

            @pl.when(k < chips - 1)
            def _(number: int = number) -> None:
                travel.send(number, place)

            @pl.when(k == chips - 1)
            def _(number: int = number) -> None:
                travel.home(number, place, found[number]).start()

    between(0, chips, hop)
    for number in range(count):
        last = travel.home(number, (chips - 1) % 2, found[number])
        last.wait_send()
        last.wait_recv()


def bring_home(
    states: Sequence[Values],
    loads: Sequence[Load],
    sums: Sequence[Values],
    rules: Sequence[Rule],
    numbers: Sequence[Values],
    ring: Ring,
    *,
    per_row: Sequence[Sequence[bool]],
    words: bool = False,
    interpret: Any = False,
) -> list[Values]:
    """`shift.bring_home` of states [R, 1, D], or [R / 128, 1, 128] where they are one number a row; one sum a table.

    Here `ppermute` hands slots on, while a kernel updates the rows of those that are there: XLA copies what a kernel
    with remote DMA writes in place, and that would be the table.

    Args:
        per_row: of each state of each table, whether it is one number a row; the first, the table itself, is not.
        words: whether tables' rows are words of two bfloat16; rules are given floats.
    """
    legs = legs_of([each.rows.shape[0] for each in loads], [each[0].shape[0] for each in states], ring.chips)
    headers = [leg.header_of(*loads[leg.table]) for leg in legs]
    parts = [
        lax.slice_in_dim(sums[leg.table][0], leg.first, leg.first + leg.count).reshape(leg.count, 1, -1) for leg in legs
    ]
    scalars = [jnp.asarray(each, jnp.float32).reshape(1) for each in jax.tree.leaves(list(numbers))]
    packed = jnp.concatenate([*scalars, jnp.zeros(1, jnp.float32)])
    flat = [each for state in states for each in state]
    update = _Update(legs, ring, per_row, rules, [len(each) for each in numbers], words)
    first = 2 * len(legs) + 1
    call = pl.pallas_call(
        update.run,
        in_specs=[*_hbm(2 * len(legs)), pl.BlockSpec(memory_space=pltpu.SMEM), *_hbm(len(flat))],
        out_specs=_hbm(len(flat)),
        out_shape=[_shape(each.shape, each.dtype) for each in flat],
        scratch_shapes=update.scratch(flat, parts),
        input_output_aliases={first + number: number for number in range(len(flat))},
        interpret=interpret,
        name="ring_update",
    )

    def hop(_: Any, carried: Any) -> Any:
        flat, moving = carried
        return list(call(*moving[0], *moving[1], packed, *flat)), ring.hand_on(moving)

    new, _ = lax.fori_loop(0, ring.chips, hop, (flat, (headers, parts)))
    out, start = [], 0
    for state in states:
        out.append(tuple(new[start : start + len(state)]))
        start += len(state)
    return out


class _Update:
    """The kernel that makes the optimizer's step for each row of this chip that stands in a slot."""

    def __init__(
        self,
        legs: Sequence[Leg],
        ring: Ring,
        per_row: Sequence[Sequence[bool]],
        rules: Sequence[Rule],
        counts: Sequence[int],
        words: bool,
    ) -> None:
        self._legs, self._ring, self._rules, self._counts, self._words = legs, ring, rules, counts, words
        self._by_row = [each for flags in per_row for each in flags]
        starts = [sum(map(len, per_row[:table])) for table in range(len(per_row))]
        self._mine = [range(at, at + len(flags)) for at, flags in zip(starts, per_row, strict=True)]
        """Numbers of each table's states among all."""

    def scratch(self, states: Sequence[jax.Array], parts: Sequence[jax.Array]) -> list[Any]:
        """Return room for a group of rows of each state and sum, and for states of one number a row whole."""
        rows, lines = [], []
        for state, by_row in zip(states, self._by_row, strict=True):
            rows.append(pltpu.VMEM((GROUP, 1, state.shape[2]), state.dtype))
            lines.append(pltpu.VMEM(state.shape if by_row else (1, 1, LANES), state.dtype))
        sums = [pltpu.VMEM((GROUP, *part.shape[1:]), part.dtype) for part in parts]
        header = pltpu.SMEM((1, max(leg.header for leg in self._legs)), jnp.int32)
        return [header, pltpu.SemaphoreType.DMA(()), rows, lines, sums]

    def run(self, *refs: Any) -> None:
        """Be the kernel."""
        count, num_states = len(self._legs), len(self._by_row)
        headers, self._slots, self._numbers = refs[:count], refs[count : 2 * count], refs[2 * count]
        refs = refs[2 * count + 1 + num_states :]  # what comes in is what goes out
        self._states, (read, self._local, self._rows, self._lines, self._sums) = refs[:num_states], refs[num_states:]
        me = self._ring.me()
        for number, leg in enumerate(self._legs):
            copy(headers[number], read.at[:, pl.ds(0, leg.header)], self._local)
            self._work(number, *own_slots(leg, read, me))

    def _work(self, number: int, start: Any, stop: Any, row: Callable[[Any], Any]) -> None:
        """Update this chip's rows among a leg's slots, in groups."""
        by_row = [each for each in self._mine[self._legs[number].table] if self._by_row[each]]

        @pl.when(stop > start)
        def _() -> None:
            for each in by_row:
                copy(self._states[each], self._lines[each], self._local)
            groups = pl.cdiv(stop - start, GROUP)
            between(0, groups, lambda index: self._group(number, start + index * GROUP, stop, row))
            for each in by_row:
                copy(self._lines[each], self._states[each], self._local)

    def _group(self, number: int, start: Any, stop: Any, row: Callable[[Any], Any]) -> None:
        mine = self._mine[self._legs[number].table]
        wide = [each for each in mine if not self._by_row[each]]
        narrow = [each for each in mine if self._by_row[each]]
        slots, local = self._slots[number], self._local

        def moving(source: Any, i: Any, target: Any, j: Any) -> Any:
            return pltpu.make_async_copy(source.at[pl.ds(i, 1)], target.at[pl.ds(j, 1)], local)

        def read(j: int, at: Any) -> list[Any]:
            rows = [moving(self._states[s], at, self._rows[s], j) for s in wide]
            return [moving(slots, start + j, self._sums[number], j), *rows]

        def write(j: int, at: Any) -> list[Any]:
            return [moving(self._rows[s], j, self._states[s], at) for s in wide]

        def each_row(do: Callable[[int], None]) -> None:
            for j in range(GROUP):
                there = (start + j < stop) & (row(jnp.minimum(start + j, stop - 1)) >= 0)
                pl.when(there)(functools.partial(do, j))

        each_row(lambda j: _start(read(j, row(start + j))))
        each_row(lambda j: self._take(narrow, j, row(start + j)))
        each_row(lambda j: _wait(read(j, 0)))
        self._step(number, mine)
        each_row(lambda j: _start(write(j, row(start + j))))
        each_row(lambda j: self._put(narrow, j, row(start + j)))
        each_row(lambda j: _wait(write(j, 0)))

    def _take(self, narrow: Sequence[int], j: int, row: Any) -> None:
        """Bring one number of a row to all lanes of its place in the group."""
        for s in narrow:
            line = self._lines[s][row // LANES]
            number = jnp.sum(jnp.where(_lane() == row % LANES, line, 0.0), axis=-1, keepdims=True)
            self._rows[s][j] = jnp.broadcast_to(number, (1, LANES))

    def _put(self, narrow: Sequence[int], j: int, row: Any) -> None:
        for s in narrow:
            line = self._lines[s][row // LANES]
            self._lines[s][row // LANES] = jnp.where(_lane() == row % LANES, self._rows[s][j], line)

    def _step(self, number: int, mine: Sequence[int]) -> None:
        table = self._legs[number].table
        at = sum(self._counts[:table])
        numbers = tuple(self._numbers[at + each] for each in range(self._counts[table]))
        state = [self._rows[s][:, :, :1] if self._by_row[s] else self._rows[s][...] for s in mine]
        if self._words:
            state[0] = from_words(state[0])
        new = list(self._rules[table]((self._sums[number][...],), tuple(state), numbers))
        if self._words:
            new[0] = to_words(new[0])
        for s, value in zip(mine, new, strict=True):
            self._rows[s][...] = jnp.broadcast_to(value, self._rows[s].shape).astype(self._rows[s].dtype)


def _start(copies: Sequence[Any]) -> None:
    for each in copies:
        each.start()


def _wait(copies: Sequence[Any]) -> None:
    for each in copies:
        each.wait()


def _lane() -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
