"""What a list of jobs is narrowed to, as its address says it: `/?state=running&q=lr%3D0.01`. Pure.

The names are those of `GET /v1/jobs`. A value that is none (an old link, a typing error) is left out: a page that
opens shows something.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlencode

from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.spec.states import RunState

ACCELERATORS = ("cpu", "tpu", "gpu")
BACKENDS = ("inductor", "xla", "eager")
ATTEMPTS = (2, 3)
SIZES = (25, 50, 100)
MAX_TEXT = 200

SORTS = {
    JobSort.NEWEST: "Newest first",
    JobSort.OLDEST: "Oldest first",
    JobSort.NAME: "Name A–Z",
    JobSort.NAME_BACKWARDS: "Name Z–A",
}


@dataclass(frozen=True, kw_only=True)
class ListChoice:
    """What a page of the list shows."""

    only: JobFilter = field(default_factory=JobFilter)
    sort: JobSort = JobSort.NEWEST
    size: int = SIZES[0]
    """Rows of a page."""

    @property
    def narrowed(self) -> bool:
        """Whether some jobs are left out."""
        return self.only != JobFilter()


def from_query(pairs: Iterable[tuple[str, str]]) -> ListChoice:
    """Return what an address asks for."""
    given: dict[str, list[str]] = {}
    for name, value in pairs:
        given.setdefault(name, []).append(value)

    def listed(name: str, allowed: Iterable[str]) -> tuple[str, ...]:
        return tuple(value for value in allowed if value in given.get(name, ()))

    def one(name: str, allowed: Iterable[str], default: str) -> str:
        return next(iter(listed(name, allowed)), default)

    return ListChoice(
        only=JobFilter(
            states=tuple(RunState(value) for value in listed("state", [state.value for state in RunState])),
            accelerators=listed("accelerator", ACCELERATORS),
            backends=listed("backend", BACKENDS),
            min_attempt=int(one("min_attempt", [str(number) for number in ATTEMPTS], "1")),
            text=" ".join(given.get("q", []))[:MAX_TEXT],
        ),
        sort=JobSort(one("sort", [sort.value for sort in JobSort], JobSort.NEWEST)),
        size=int(one("size", [str(size) for size in SIZES], str(SIZES[0]))),
    )


def to_query(wanted: ListChoice) -> str:
    """Return the address's query; empty where nothing is asked for."""
    only = wanted.only
    pairs: list[tuple[str, str]] = [("state", state.value) for state in only.states]
    pairs += [("accelerator", value) for value in only.accelerators]
    pairs += [("backend", value) for value in only.backends]
    if only.min_attempt > 1:
        pairs.append(("min_attempt", str(only.min_attempt)))
    if only.text.strip():
        pairs.append(("q", only.text))
    if wanted.sort is not JobSort.NEWEST:
        pairs.append(("sort", wanted.sort.value))
    if wanted.size != SIZES[0]:
        pairs.append(("size", str(wanted.size)))
    return urlencode(pairs)
