"""What the ranks of a run under Ray tell each other: who ended, how, in which order, and whether all are to stop.

`Board` is plain Python; `ray_job.py` makes an actor of it, beside the driver. `outcome` turns what it holds into the
driver's exit code. Nothing here imports Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from twinstep.spec.words import EXIT_FAILED, EXIT_PREEMPTED, follows
from twinstep.worker.train.stop import EXIT_STOPPED

LEFT = (EXIT_PREEMPTED, EXIT_STOPPED)
"""Exit codes of a rank that was told to stop and did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one rank's process ended."""

    rank: int
    code: int
    """Exit code; 128 + n after signal n."""
    words: str
    """Its last words on standard error."""

    @property
    def failed(self) -> bool:
        """Whether it ended neither well nor because it was told to."""
        return self.code != 0 and self.code not in LEFT


class Board:
    """Kept in one place for all ranks, so that one order of ends holds."""

    def __init__(self) -> None:
        self._ends: list[Ended] = []
        self._stop = False
        self._nodes: dict[int, str] = {}
        self._step: int | None = None

    def stand(self, rank: int, node: str) -> None:
        """Write down by id the node that a rank runs on."""
        self._nodes[rank] = node

    def nodes(self) -> set[str]:
        """Return the ids of the nodes that ranks run on."""
        return set(self._nodes.values())

    def on(self, nodes: Collection[str]) -> set[int]:
        """Return the ranks that run on these nodes."""
        return {rank for rank, node in self._nodes.items() if node in nodes}

    def done(self, step: int) -> None:
        """Write down how many steps are done."""
        self._step = step

    def step(self) -> int | None:
        """Return how many steps were done when last that was heard of; None: it never was."""
        return self._step

    def ask(self) -> None:
        """Let all ranks stop, as SIGTERM does."""
        self._stop = True

    def end(self, ended: Ended) -> None:
        """Write down a rank's end. One that left or failed takes the others along: they would wait for it in vain."""
        self._ends.append(ended)
        if ended.code != 0:
            self._stop = True

    def orders(self) -> tuple[bool, bool]:
        """Return whether ranks are to stop, and whether one failed, so that the others cannot end well."""
        return self._stop, any(each.failed for each in self._ends)

    def ends(self) -> list[Ended]:
        """Return the ends in the order in which they came."""
        return list(self._ends)


def outcome(
    ends: Sequence[Ended], processes: int, *, ray_said: str = "", gone: Collection[int] = ()
) -> tuple[int, str]:
    """Return the exit code of a run and, where it failed, why.

    Args:
        ends: in the order in which they came; the first failure is the cause, and what follows, its consequence. A rank
            that says it lost another one is no cause, and one that SIGABRT ended is one only where no other rank failed
            by itself: a peer that is gone may end ranks before it is heard of.
        ray_said: what Ray Train raised; empty: nothing.
        gone: ranks whose nodes were taken away, maybe before they could say how they ended.
    """
    failed = [each for each in ends if each.failed]
    first = min(failed, key=lambda each: follows(each.code), default=None)  # of equals the first
    if first is not None:
        said = first.words.strip() or "it said nothing"
        return first.code, f"rank {first.rank} of {processes} failed first, with exit code {first.code}: {said}"
    missing = sorted(set(range(processes)) - {each.rank for each in ends})
    if missing and gone and set(missing) <= set(gone):
        return EXIT_PREEMPTED, ""
    if missing:
        ranks = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
        said = ray_said.strip() or "Ray said nothing"
        return EXIT_FAILED, f"rank {ranks} of {processes} ended without a word: {said}"
    if any(each.code == EXIT_STOPPED for each in ends):
        return EXIT_STOPPED, ""
    if any(each.code == EXIT_PREEMPTED for each in ends):
        return EXIT_PREEMPTED, ""
    if ray_said:
        return EXIT_FAILED, f"all {processes} ranks ended well, but Ray Train failed: {ray_said}"
    return 0, ""
