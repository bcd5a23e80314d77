"""Where a run's time went: stretches of states out of its events, compiling apart from training. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.platform.dashboard.views import EventLine, RunLine
from twinstep.spec.states import FINAL, RunState

STRETCHES = ("pending", "queued", "starting", "compiling", "running", "restarting")
"""What a run spends time on, in the order in which a legend names it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time."""

    what: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def stretches(run: RunLine, events: Sequence[EventLine], *, now: float) -> list[Stretch]:
    """Return what a run spent its time on, in order and without a gap; zero for what a clock that was set back says.

    Args:
        events: of this run, oldest first; others are passed over.
    """
    end = run.ended if run.ended is not None else now
    state, since, found = RunState.PENDING.value, run.created, list[Stretch]()
    compiles: list[tuple[float, float]] = []
    for event in events:
        if event.run_id != run.id:
            continue
        to, seconds = event.data.get("to"), event.data.get("seconds")
        if event.name == "state_changed" and isinstance(to, str):
            at = min(max(event.time, since), end)
            if at > since:
                found.append(Stretch(state, since, at))
            state, since = to, at
        elif event.name in ("compiled", "recompiled") and isinstance(seconds, int | float) and seconds > 0:
            compiles.append((event.time - seconds, event.time))
    if state not in FINAL and end > since:
        found.append(Stretch(state, since, end))
    return _with_compiling(found, compiles)


def _with_compiling(found: Sequence[Stretch], compiles: Sequence[tuple[float, float]]) -> list[Stretch]:
    """Cut compiling out of the stretches in which a worker was there; its clock may be off, so nothing grows by it."""
    result: list[Stretch] = []
    for stretch in found:
        if stretch.what not in ("starting", "running"):
            result.append(stretch)
            continue
        at = stretch.start
        for start, end in sorted(compiles):
            begin, stop = max(start, at), min(end, stretch.end)
            if stop <= begin:
                continue
            if begin > at:
                result.append(Stretch(stretch.what, at, begin))
            result.append(Stretch("compiling", begin, stop))
            at = stop
        if stretch.end > at:
            result.append(Stretch(stretch.what, at, stretch.end))
    return result


def totals(found: Sequence[Stretch]) -> dict[str, float]:
    """Return the seconds of each kind of stretch there is, in the order of `STRETCHES`."""
    seconds: dict[str, float] = {}
    for stretch in found:
        seconds[stretch.what] = seconds.get(stretch.what, 0.0) + stretch.seconds
    return {what: seconds[what] for what in STRETCHES if what in seconds}
