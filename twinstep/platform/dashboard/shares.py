"""What a time went to, part by part, as a worker counted it: all of a run, or the steps that it traced. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinstep.platform.dashboard import words
from twinstep.spec.report import PROFILE_PARTS, TIME_PARTS
from twinstep.spec.words import DASH, duration, number

MAX_STEP = 2**63 - 1  # as the store's column has it
LONGEST_S = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """A stacked bar: parts and their seconds, the largest whole and what is said of it."""

    parts: tuple[tuple[str, float], ...] = ()
    """Name and seconds, in the order in which they are drawn."""
    says: str = ""
    """The figure beside the heading."""
    facts: tuple[tuple[str, str], ...] = ()
    """Name and figure of what else is known."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(seconds for _, seconds in self.parts)


def _parts(found: Mapping[str, Any], names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return those of `names` that a worker gives a number of seconds for, which no database and no peer checks."""
    given = {name: found.get(name) for name in names}
    # Bounded before it is made a float: whole numbers may be larger than any.
    return tuple(
        (name, float(each)) for name, each in given.items() if isinstance(each, int | float) and 0 < each <= LONGEST_S
    )


def goodput(account: Mapping[str, Any]) -> Shares:
    """Return where a run's time went, of a progress report or a summary."""
    share, rate = account.get("goodput"), account.get("tokens_per_s")
    return Shares(
        parts=_parts(account.get("time_s") or {}, TIME_PARTS),
        says=DASH if share is None else f"{share:.1%}",
        facts=(("chip-hours", number(account.get("chip_hours"))), ("tokens/s", words.rate(rate))),
    )


def profile(data: Mapping[str, Any]) -> Shares:
    """Return what the steps of a trace spent their time on, of the event `profiled`."""
    seconds, first, last = data.get("time_s"), data.get("first"), data.get("last")
    parts = _parts(seconds if isinstance(seconds, Mapping) else {}, PROFILE_PARTS)
    if not parts or not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last <= MAX_STEP):
        return Shares()
    each = sum(took for _, took in parts) / (last - first + 1)
    facts = (("a step", duration(each)), ("trace", str(data.get("directory", ""))[:200]))
    return Shares(parts=parts, says=f"steps {first:,} to {last:,}", facts=facts)
