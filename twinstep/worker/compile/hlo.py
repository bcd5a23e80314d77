"""What a compiled XLA program's text tells: which collectives it runs, and its loops with how often they turn. Pure.

`lower/tpu.py` asks, for an AotReport. XLA's own cost analysis counts the body of a loop once however often it turns,
and says nothing of collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
BETWEEN_SLICES = "between-slices"
"""What XLA makes of a collective's part over the data-centre network: hosts send for their devices."""
_BY_HOSTS = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"\b(?:calls|to_apply|async_computation|true_computation|false_computation)=(%[\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LIMIT = re.compile(r"(%[\w.\-]+) = s32\[\][^ ]* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All collectives of one kind that a step runs."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute, ragged-all-to-all or between-slices."""
    count: int
    """How many run in one step."""
    bytes: int
    """Bytes of their results on one device, added up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One while loop."""

    body: str
    condition: str
    trips: int | None
    """How often it turns; None where the text does not tell."""


@dataclass(slots=True)
class Computation:
    """One computation of the program, as far as it is looked at."""

    lines: list[str] = field(default_factory=list)
    collectives: list[tuple[str, int]] = field(default_factory=list)
    """Kind and bytes of each collective that stands in it."""
    loops: list[Loop] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    """Computations that it runs once: those of fusions and of asynchronous calls."""


@dataclass(frozen=True, slots=True)
class HloText:
    """A compiled program, parsed."""

    entry: str
    computations: dict[str, Computation]

    def runs(self) -> Counter[str]:
        """Return how often each computation runs in one step; a loop of unknown length counts as one turn."""
        found: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            found[name] += times
            computation = self.computations.get(name)
            if computation is None:
                return
            for loop in computation.loops:
                visit(loop.body, times * (loop.trips or 1))
            for called in computation.called:
                visit(called, times)

        visit(self.entry, 1)
        return found

    def loops(self) -> list[Loop]:
        """Return all loops."""
        return [loop for computation in self.computations.values() for loop in computation.loops]

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the step's collectives come to, by kind."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for name, times in self.runs().items():
            for kind, size in self.computations[name].collectives if name in self.computations else ():
                counts[kind] += times
                sizes[kind] += times * size
        return tuple(Collective(kind=kind, count=counts[kind], bytes=sizes[kind]) for kind in sorted(counts))


def parse_hlo(text: str) -> HloText:
    """Read a compiled program's text, as `compiled.as_text()` gives it.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in text.splitlines():
        if line and not line[0].isspace():
            if head := _COMPUTATION.match(line):
                current = computations[head[2]] = Computation()
                entry = head[2] if head[1] else entry
            continue
        current.lines.append(line)
    if not entry:
        raise ValueError("the text has no entry computation")
    for computation in computations.values():
        for line in computation.lines:
            _read(line, computation, computations)
    return HloText(entry, computations)


def _read(line: str, computation: Computation, computations: dict[str, Computation]) -> None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return
    shape, op = found[1], found[2]
    kind = op.removesuffix("-start")
    if kind in COLLECTIVES:
        computation.collectives.append((kind, _result_bytes(shape, started=op.endswith("-start"), kind=kind)))
    elif op == "send" and _BY_HOSTS in line:
        computation.collectives.append((BETWEEN_SLICES, array_bytes(*_ARRAY.findall(shape)[0])))
    elif op == "while":
        called = dict(re.findall(r"\b(body|condition)=(%[\w.\-]+)", line))
        trips = _trips(line, computations.get(called["condition"], Computation()))
        computation.loops.append(Loop(body=called["body"], condition=called["condition"], trips=trips))
    elif op not in ("async-update", "async-done", "call-done"):  # they name the computation that their start ran
        computation.called += _CALLED.findall(line)
        if branches := _BRANCHES.search(line):
            computation.called += re.findall(r"%[\w.\-]+", branches[1])


def _result_bytes(shape: str, *, started: bool, kind: str) -> int:
    """Return the bytes of a collective's result; the tuple of a start holds its operands too, and context."""
    arrays = _ARRAY.findall(shape)
    if started and kind != "all-reduce":
        arrays = arrays[1:2] if kind == "collective-permute" else arrays[len(arrays) // 2 :]
    return sum(array_bytes(dtype, dims) for dtype, dims in arrays)


def array_bytes(dtype: str, dims: str) -> int:
    """Return the bytes of `f32[8,128]`, without what a layout pads."""
    size = _BYTES[dtype]
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def _trips(line: str, condition: Computation) -> int | None:
    """Return how often a loop turns: as XLA noted, else as a counter from 0 that the condition holds under a number."""
    if noted := _TRIPS.search(line):
        return int(noted[1])
    text = "\n".join(condition.lines)
    limits = dict(_LIMIT.findall(text))
    root = re.search(r"ROOT .* compare\((%[\w.\-]+), (%[\w.\-]+)\), direction=LT", text)
    return int(limits[root[2]]) if root and root[2] in limits else None


def with_entry(text: str, computation: str) -> str:
    """Return a program whose entry is another computation of `text`, for XLA's cost analysis of that one alone."""
    _, _, rest = text.partition("\n")
    rest = re.sub(r"^ENTRY ", "", rest, flags=re.MULTILINE)
    rest = re.sub(rf"^{re.escape(computation)} ", f"ENTRY {computation} ", rest, flags=re.MULTILINE)
    return "HloModule part, is_scheduled=true\n" + rest
