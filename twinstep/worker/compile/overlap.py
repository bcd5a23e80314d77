"""What a TPU program's schedule runs beside its SparseCores: read from the compiled text, which is the schedule.

Pure. `call-start` … `call-done` of a call on the thread `sparsecore` bracket its span in the entry computation;
TensorCore instructions between the two carry the compiler's estimate of their cycles. Calls that only prepare others do
not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_START = re.compile(r"^\s+(%[\w.\-]+) = .* call-start\(.*async_execution_thread=\"sparsecore\"")
_DONE = re.compile(r" call-done\((%[\w.\-]+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """TensorCore work beside SparseCore calls, in one step."""

    calls: int
    """Calls to SparseCores in the entry computation."""
    beside: int
    """Of them, those with TensorCore work between start and done."""
    cycles: int
    """The compiler's estimate of all TensorCore cycles of the entry computation."""
    cycles_beside: int
    """Of them, those under way while a SparseCore call is."""

    @property
    def share_of_calls(self) -> float:
        """Share of SparseCore calls that have TensorCore work beside them."""
        return self.beside / self.calls if self.calls else 0.0

    @property
    def share_of_cycles(self) -> float:
        """Share of TensorCore cycles beside SparseCore calls."""
        return self.cycles_beside / self.cycles if self.cycles else 0.0


def overlap(text: str) -> Overlap:
    """Return what a compiled program's entry computation schedules beside its SparseCore calls."""
    _, _, entry = text.partition("\nENTRY ")
    under_way: dict[str, int] = {}
    done: list[int] = []
    cycles = beside = 0
    for line in entry.splitlines():
        if started := _START.match(line):
            under_way[started[1]] = 0
        elif (ended := _DONE.search(line)) and ended[1] in under_way:
            done.append(under_way.pop(ended[1]))
        elif found := _CYCLES.search(line):
            cycles += int(found[1])
            if under_way:
                beside += int(found[1])
            under_way = {name: held + int(found[1]) for name, held in under_way.items()}
        if line.startswith("}"):
            break
    return Overlap(calls=len(done), beside=sum(each > 0 for each in done), cycles=cycles, cycles_beside=beside)
