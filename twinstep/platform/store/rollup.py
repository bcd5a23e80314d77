"""A metric of any length in few buckets: each keeps the lowest, the highest and the mean of its steps, and what was
undefined. Pure.

A bucket is `width` steps wide, a power of two, and begins at a multiple of it: buckets stay where they are while a run
grows, and two of them are one of twice the width. So nothing that was looked at before is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEPT = 4096
"""Buckets of one metric that stay in memory, at most: about a MiB."""


@dataclass(slots=True)
class Bucket:
    """What some neighbouring steps come to."""

    first: int
    """First step with a point."""
    last: int
    time: float
    """Of the last point, Unix seconds."""
    low: float | None
    high: float | None
    total: float
    """Sum of the values that are defined."""
    count: int
    """Points whose value is defined."""
    undefined: int
    """Points whose value is null: NaN, infinite, or an AUC of one class."""

    @property
    def mean(self) -> float | None:
        """The mean of what is defined; None where nothing is."""
        return self.total / self.count if self.count else None

    def add(self, other: Bucket) -> None:
        """Take in another bucket's points."""
        if other.last >= self.last:
            self.last, self.time = other.last, other.time
        self.first = min(self.first, other.first)
        if other.low is not None and (self.low is None or other.low < self.low):
            self.low = other.low
        if other.high is not None and (self.high is None or other.high > self.high):
            self.high = other.high
        self.total += other.total
        self.count += other.count
        self.undefined += other.undefined

    def copy(self) -> Bucket:
        """Return another bucket of the same points."""
        return Bucket(
            self.first, self.last, self.time, self.low, self.high, self.total, self.count, self.undefined
        )  # fmt: skip


def point(step: int, time: float, value: float | None) -> Bucket:
    """Return the bucket of one point."""
    if value is None:
        return Bucket(step, step, time, None, None, 0.0, 0, 1)
    return Bucket(step, step, time, value, value, value, 1, 0)


def width_for(first: int, last: int, most: int) -> int:
    """Return the least width with which the steps from `first` to `last` lie in at most `most` buckets."""
    width = 1
    while last // width - first // width + 1 > most:
        width *= 2
    return width


def joined(buckets: Iterable[Bucket], width: int) -> list[Bucket]:
    """Return buckets of `width` steps made of narrower ones, in order."""
    found: dict[int, Bucket] = {}
    for bucket in buckets:
        place = bucket.first // width
        if place in found:
            found[place].add(bucket)
        else:
            found[place] = bucket.copy()
    return [found[place] for place in sorted(found)]


class Rollup:
    """One metric of one run, at most `kept` buckets of it; points may come in any order, each once."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self.kept, self.width = kept, 1
        self._buckets: dict[int, Bucket] = {}
        self._sorted = True

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Take in points, as buckets no wider than this rollup's."""
        for bucket in buckets:
            place = bucket.first // self.width
            if place in self._buckets:
                self._buckets[place].add(bucket)
            else:
                self._buckets[place] = bucket.copy()
                self._sorted = False
            while len(self._buckets) > self.kept:
                self.widen(2 * self.width)

    def widen(self, width: int) -> None:
        """Make the buckets `width` steps wide."""
        self._buckets = {bucket.first // width: bucket for bucket in joined(self._buckets.values(), width)}
        self.width, self._sorted = width, True

    def buckets(self) -> list[Bucket]:
        """Return the buckets in order; not to be changed."""
        if not self._sorted:
            self._buckets = dict(sorted(self._buckets.items()))
            self._sorted = True
        return list(self._buckets.values())
