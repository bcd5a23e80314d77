"""What a TPU program's schedule runs beside its SparseCores: read from the compiled text, which is the schedule.

Pure. `call-start` … `call-done` of a call on the thread `sparsecore` bracket its span in the entry computation;
TensorCore instructions between the two carry the compiler's estimate of their cycles. Calls that only prepare others do
not count.

How long a call itself takes the text does not say. Whoever asks gives the least: what the called computation reads and
writes at HBM's rate. So much of a call's span as TensorCore work stands beside it is covered, and no more than all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_START = re.compile(r"^\s+(%[\w.\-]+) = .* call-start\(.*async_execution_thread=\"sparsecore\".*\bto_apply=(%[\w.\-]+)")
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
    sparse_cycles: int = 0
    """The least cycles that all SparseCore calls take, of the TensorCore's clock; 0: nobody said."""
    covered: int = 0
    """Of them, those beside which TensorCore work is scheduled."""

    @property
    def share_of_calls(self) -> float:
        """Share of SparseCore calls that have TensorCore work beside them."""
        return self.beside / self.calls if self.calls else 0.0

    @property
    def share_of_cycles(self) -> float:
        """Share of TensorCore cycles beside SparseCore calls."""
        return self.cycles_beside / self.cycles if self.cycles else 0.0

    @property
    def share_of_span(self) -> float:
        """Share of the SparseCore calls' span that has TensorCore work scheduled beside it."""
        return self.covered / self.sparse_cycles if self.sparse_cycles else 0.0


def overlap(text: str, least: Callable[[str], float] = lambda called: 0.0) -> Overlap:
    """Return what a compiled program's entry computation schedules beside its SparseCore calls.

    Args:
        text: the compiled program.
        least: the name of a computation that SparseCores run → the least cycles of the TensorCore's clock it takes.
    """
    _, _, entry = text.partition("\nENTRY ")
    under_way: dict[str, int] = {}
    called: dict[str, str] = {}
    done: list[int] = []
    cycles = beside = sparse = covered = 0
    for line in entry.splitlines():
        if started := _START.match(line):
            under_way[started[1]], called[started[1]] = 0, started[2]
        elif (ended := _DONE.search(line)) and ended[1] in under_way:
            done.append(under_way.pop(ended[1]))
            span = round(least(called[ended[1]]))
            sparse, covered = sparse + span, covered + min(span, done[-1])
        elif found := _CYCLES.search(line):
            cycles += int(found[1])
            if under_way:
                beside += int(found[1])
            under_way = {name: held + int(found[1]) for name, held in under_way.items()}
        if line.startswith("}"):
            break
    return Overlap(
        calls=len(done),
        beside=sum(each > 0 for each in done),
        cycles=cycles,
        cycles_beside=beside,
        sparse_cycles=sparse,
        covered=covered,
    )
