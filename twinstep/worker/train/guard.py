"""Losses that are not to be: what counts as one, and how often a run may meet one. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 50  # losses whose median a spike is measured by
AT_LEAST = 20  # losses before anything is a spike: the first ones fall fast
MOST = 10  # batches that may be dropped within SPAN steps
SPAN = 100


class LossGuard:
    """Judges each loss against those before it."""

    def __init__(self, *, spike: float | None) -> None:
        self._spike = spike
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._dropped: deque[int] = deque()

    def fault(self, loss: float) -> str | None:
        """Return what is wrong with a loss, in words, or None; a sound one counts for those to come."""
        if not math.isfinite(loss):
            return f"is {loss}"
        if self._spike is not None and len(self._losses) >= AT_LEAST:
            median = statistics.median(self._losses)
            if loss > self._spike * median:
                return f"is {loss:.4g}, more than {self._spike:g} × the median {median:.4g} of the last ones"
        self._losses.append(loss)
        return None

    def too_many(self, step: int) -> bool:
        """Note that the batch of a step is dropped; say whether there were too many lately."""
        self._dropped.append(step)
        while self._dropped and self._dropped[0] <= step - SPAN:
            self._dropped.popleft()
        return len(self._dropped) > MOST

    def state(self) -> list[float]:
        """Return the losses that spikes are measured by, for a checkpoint."""
        return list(self._losses)

    def restore(self, losses: list[float]) -> None:
        """Go on from `state`."""
        self._losses = deque(losses, maxlen=WINDOW)
