"""Losses that are not to be: what counts as one, and how often a run may meet one. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 50  # losses whose median a spike is measured by
AT_LEAST = 20  # losses before anything is a spike: the first ones fall fast
MOST = 10  # batches that may be dropped within SPAN steps
SPAN = 100


def remedy_of(step: int) -> str:
    """Say what may help a run whose loss was at fault in this step, the first of all being 1."""
    if step == 1:  # nothing was updated yet
        return "look in the forward for a division by 0, a logarithm or an id that names no row of its table"
    return "lower optimizers.dense.lr, set train.clip_norm, or set train.on_nan: skip"


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

    def too_many(self, step: int, *, since: int | None = None) -> bool:
        """Note that batches are dropped; say whether there were too many lately.

        Args:
            step: of the newest of them.
            since: all after this step are dropped, for a rollback; None: that of `step` alone.
        """
        while self._dropped and self._dropped[0] <= step - SPAN:
            self._dropped.popleft()
        first_of_all = not self._dropped  # one rollback alone may drop as many as there are since the copy
        done = self._dropped[-1] if self._dropped and since is not None else 0  # by a rollback to the same copy
        self._dropped.extend(range(max(step - 1 if since is None else since, done) + 1, step + 1))
        return len(self._dropped) > MOST and not first_of_all

    def state(self) -> list[float]:
        """Return the losses that spikes are measured by, for a checkpoint."""
        return list(self._losses)

    def restore(self, losses: list[float]) -> None:
        """Go on from `state`."""
        self._losses = deque(losses, maxlen=WINDOW)
