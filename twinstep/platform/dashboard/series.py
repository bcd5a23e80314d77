"""Bounded series for charts: a run of any length is drawn with at most `limit` points, each the mean of its bucket.

Pure. Points are added once, in order; a full series merges its neighbours and doubles its bucket, so adding stays
O(1) on average and nothing is read twice.
"""

from __future__ import annotations

import math

MAX_POINTS = 1000


class Series:
    """One line of a chart: (step, value) points, averaged over `stride` raw points each."""

    def __init__(self, *, limit: int = MAX_POINTS) -> None:
        self.limit = limit + limit % 2  # merging in pairs needs an even number
        self.stride = 1
        self.raw_count = 0
        self._points: list[list[float]] = []
        self._step = 0.0
        self._sum = 0.0
        self._count = 0

    def add(self, step: int, value: float | None) -> bool:
        """Take one raw point and say whether it counted: None and what is not finite do not."""
        if value is None or isinstance(value, bool) or not math.isfinite(value):
            return False
        self.raw_count += 1
        self._step, self._sum, self._count = step, self._sum + value, self._count + 1
        if self._count == self.stride:
            self._points.append([self._step, self._sum / self._count])
            self._sum, self._count = 0.0, 0
            if len(self._points) == self.limit:
                self._merge()
        return True

    def points(self) -> list[list[float]]:
        """Return at most `limit` points as [step, value]; the last stands for a bucket that may still be open."""
        tail = [[self._step, self._sum / self._count]] if self._count else []
        return self._points + tail

    @property
    def last(self) -> float | None:
        """The newest point's value, None while there is none."""
        if self._count:
            return self._sum / self._count
        return self._points[-1][1] if self._points else None

    def _merge(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        # Buckets hold equally many raw points here, so the mean of two means is the mean of both.
        self._points = [[right[0], (left[1] + right[1]) / 2] for left, right in pairs]
        self.stride *= 2
