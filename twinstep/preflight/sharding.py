"""The plan of embedding tables: each replicated, split by rows or columns, or stacked on SparseCores, and why.

`plan_tables` is pure and deterministic. Each way of holding a table has its bytes on a device and its cost in a step,
from sizes, how often rows are asked for, and the chip's rates. Each table first takes its cheapest way; while they do
not fit together, the change that costs least time a byte is made. That is the greedy answer to a multiple-choice
knapsack over the ways on the lower convex hull (Sinha and Zoltners 1979), so more memory never makes a plan slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from twinstep.preflight.chips import ChipFacts
from twinstep.preflight.frequency import different_rows, hottest_share
from twinstep.preflight.words import gib, seconds

Way = Literal["replicated", "row", "column", "sparsecore"]
FLOAT = 4
LEAST_COLUMNS = 8  # floats of a row that a part of a column-wise table has at the least: 32 bytes, one HBM access
ROW_ALIGN = 8  # rows of a SparseCore's shard, and floats of its rows; jax-tpu-embedding's padding
BESIDE = 0.25  # share of a SparseCore's exchange that is taken to delay the step: the rest runs beside dense work
LATENCY_S = 5e-6  # of one collective, besides its bytes: a rule of thumb


@dataclass(frozen=True, kw_only=True, slots=True)
class TableUse:
    """One table, and what a step asks of it."""

    name: str
    rows: int
    width: int
    """Floats of a row."""
    ids: int
    """Ids of a whole batch, over all devices."""
    slots: float
    """Numbers that the optimizer keeps for each number of the table; row-wise Adagrad one for each row: 1 / width."""
    quiet: bool = True
    """Whether a step updates the rows that it looked up, and no others."""
    zipf: float = 1.05
    """Exponent of the popularity of its rows; 0: all alike."""
    different: float | None = None
    """Different rows that one device asks for in a step, from statistics; None: from `zipf`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The devices that tables are spread over."""

    devices: int
    facts: ChipFacts
    budget: int
    """Bytes of each device that tables may have."""
    sparse_cores: int = 0
    """Of a device; 0: it has none that tables can use."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to hold a table."""

    way: Way
    bytes: int
    """On each device, with what the optimizer keeps."""
    seconds: float
    """That a step waits for it, by the roofline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How one table is held."""

    table: TableUse
    way: Way
    bytes: int
    seconds: float
    stack: str
    """Tables of one stack share a SparseCore lookup; empty elsewhere."""
    why: str
    options: tuple[Option, ...]
    """All ways there are, fewest seconds first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """How all tables are held."""

    choices: tuple[Choice, ...]
    """By table name."""
    bytes: int
    """On each device."""
    seconds: float
    budget: int
    fits: bool

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def plan_tables(tables: Sequence[TableUse], room: Room, *, ways: Sequence[Way] | None = None) -> TablePlan:
    """Return how tables are held.

    Args:
        tables: in any order; names differ.
        ways: those that may be taken; None: all that the devices have.
    """
    ordered = sorted(tables, key=lambda table: table.name)
    every = {table.name: options_of(table, room, ways) for table in ordered}
    hulls = {name: _hull(options) for name, options in every.items()}
    at = {table.name: 0 for table in ordered}
    total = sum(hull[0].bytes for hull in hulls.values())
    for _, name in sorted((_price(hull, step), name) for name, hull in hulls.items() for step in range(1, len(hull))):
        if total <= room.budget:
            break
        step = at[name] + 1
        total += hulls[name][step].bytes - hulls[name][step - 1].bytes
        at[name] = step
    choices = tuple(_choice(table, hulls[table.name][at[table.name]], every[table.name], room) for table in ordered)
    return TablePlan(
        choices=choices,
        bytes=total,
        seconds=sum(each.seconds for each in choices),
        budget=room.budget,
        fits=total <= room.budget,
    )


def options_of(table: TableUse, room: Room, ways: Sequence[Way] | None = None) -> tuple[Option, ...]:
    """Return each way to hold a table on these devices, fewest seconds first; one at the least."""
    found = [Option("replicated", _bytes(table, table.rows, table.width), _replicated(table, room))]
    if room.devices > 1:
        rows = -(-table.rows // room.devices)
        found.append(Option("row", _bytes(table, rows, table.width), _exchanged(table, room, by_rows=True)))
        if table.width % room.devices == 0 and table.width // room.devices >= LEAST_COLUMNS:
            columns = table.width // room.devices
            found.append(Option("column", _bytes(table, table.rows, columns), _exchanged(table, room, by_rows=False)))
    if room.sparse_cores and table.quiet:
        count = room.sparse_cores * room.devices
        rows = room.sparse_cores * _up(-(-table.rows // count), ROW_ALIGN)
        cost = BESIDE * _exchanged(table, room, by_rows=True) if room.devices > 1 else 0.0
        found.append(Option("sparsecore", _bytes(table, rows, _up(table.width, ROW_ALIGN)), cost))
    allowed = [each for each in found if ways is None or each.way in ways] or found[:1]
    return tuple(sorted(allowed, key=lambda each: (each.seconds, each.bytes, each.way)))


def _bytes(table: TableUse, rows: int, columns: int) -> int:
    per_row = table.slots * table.width < 2 and table.slots * table.width > 0
    kept = 1 if per_row else round(table.slots * columns)
    return rows * (columns + kept) * FLOAT


def _replicated(table: TableUse, room: Room) -> float:
    """Return the seconds of a table on every device: gradients go to all, and all make every update."""
    gradient = table.ids * table.width * FLOAT
    whole = table.rows * table.width * FLOAT
    away = (room.devices - 1) / room.devices
    rows = min(float(table.ids), different_rows(table.ids, table.rows, table.zipf))
    sparse = table.quiet and gradient < 2 * whole
    sent = (gradient if sparse else 2 * whole) * away
    touched = rows * table.width * FLOAT * 2 if sparse else whole * (3 + 2 * table.slots)
    latency = LATENCY_S if room.devices > 1 else 0.0
    return sent / room.facts.ici_bytes_per_s + touched / room.facts.hbm_bytes_per_s + latency


def _exchanged(table: TableUse, room: Room, *, by_rows: bool) -> float:
    """Return the seconds of a split table: rows come to who asks for them, gradients go back.

    Of rows split by rows a device serves those it has, the hottest of them to everybody; of columns all devices serve
    alike, and see the ids of the whole batch.
    """
    asked = -(-table.ids // room.devices)
    mine = different_rows(asked, table.rows, table.zipf) if table.different is None else table.different
    mine = min(mine, float(asked))
    away = (room.devices - 1) / room.devices
    vectors = 2 * mine * table.width * FLOAT
    if by_rows:
        hot = min(hottest_share(table.rows, table.zipf) * asked, 1.0) * room.devices * table.width * FLOAT * 2
        sent = vectors + mine * FLOAT + hot
        served = 2 * (vectors + hot)
    else:
        sent = 2 * asked * table.width * FLOAT + table.ids * FLOAT
        served = 2 * table.ids * (table.width // room.devices) * FLOAT * 2
    every = 0.0 if table.quiet else table.rows * table.width * FLOAT * (3 + 2 * table.slots) / room.devices
    return sent * away / room.facts.ici_bytes_per_s + (served + every) / room.facts.hbm_bytes_per_s + 3 * LATENCY_S


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _hull(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options on the lower convex hull of bytes and seconds, fewest seconds first."""
    kept: list[Option] = []
    for each in options:
        if kept and each.bytes >= kept[-1].bytes:
            continue
        while len(kept) > 1 and _slope(kept[-2], each) <= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(each)
    return tuple(kept)


def _slope(fast: Option, small: Option) -> float:
    """Return the seconds that a byte costs which is spared by taking `small` for `fast`."""
    return (small.seconds - fast.seconds) / (fast.bytes - small.bytes)


def _price(hull: Sequence[Option], step: int) -> float:
    return _slope(hull[step - 1], hull[step])


def _choice(table: TableUse, taken: Option, options: tuple[Option, ...], room: Room) -> Choice:
    stack = f"width {_up(table.width, ROW_ALIGN)}" if taken.way == "sparsecore" else ""
    return Choice(
        table=table,
        way=taken.way,
        bytes=taken.bytes,
        seconds=taken.seconds,
        stack=stack,
        why=_why(table, taken, options, room),
        options=options,
    )


def _why(table: TableUse, taken: Option, options: Sequence[Option], room: Room) -> str:
    """Return the reason for a choice, with the numbers it rests on."""
    if len(options) == 1:
        return f"the only way here; {gib(taken.bytes)} a device"
    fastest = options[0]
    if taken != fastest:
        return (
            f"{fastest.way} would take {gib(fastest.bytes)} of the {gib(room.budget)} that tables have; this takes "
            f"{gib(taken.bytes)} for {seconds(taken.seconds - fastest.seconds)} more a step"
        )
    other = options[1]
    asked = -(-table.ids // room.devices)
    mine = different_rows(asked, table.rows, table.zipf) if table.different is None else table.different
    reasons: dict[Way, str] = {
        "replicated": f"small ({gib(taken.bytes)}): sending gradients costs less than fetching rows",
        "row": f"a device asks for {mine:,.0f} different rows of {table.rows:,} a step: fetching them costs least",
        "column": f"hot rows: every device serves its columns to all, {taken.bytes / max(other.bytes, 1):.1%} of "
        f"the bytes of {other.way}",
        "sparsecore": f"rows go to and fro on SparseCores, beside the dense work; {mine:,.0f} different a device",
    }
    faster = f"; {seconds(taken.seconds)} a step, {other.way} {seconds(other.seconds)}"
    return reasons[taken.way] + faster
