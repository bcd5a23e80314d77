"""What the loop sees of its loader between two reports: how fast it packs, how far ahead it is, how long one waited."""

from __future__ import annotations

from twinstep.worker.data.batch import BatchStats


class LoaderMeter:
    """Sums over the batches since the last report.

    Args:
        packers: threads or processes that pack at a time.
    """

    def __init__(self, packers: int = 1) -> None:
        self._packers = packers
        self._clear()

    def _clear(self) -> None:
        self._batches = self._examples = self._ready = 0
        self._waited = self._packed = 0.0

    def add(self, stats: BatchStats, *, waited: float, ready: int) -> None:
        """Count a batch.

        Args:
            waited: seconds that the loop waited for it.
            ready: batches that lay ready when it was asked for.
        """
        self._batches += 1
        self._examples += stats.examples
        self._packed += stats.pack_s
        self._waited += waited
        self._ready += ready

    def report(self) -> dict[str, float]:
        """Return the means since the last report by metric, and begin anew; nothing where no batch was counted.

        `loader_examples_per_s` is what all packers together would give if nothing held them up: examples over the
        seconds that packing took, which a queue that is full does not lengthen.
        """
        if not self._batches:
            return {}
        found = {
            "data_wait_ms": 1e3 * self._waited / self._batches,
            "batches_ready": self._ready / self._batches,
            "loader_examples_per_s": self._packers * self._examples / max(self._packed, 1e-9),
        }
        self._clear()
        return found
