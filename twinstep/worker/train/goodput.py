"""Where a run's time went: useful steps, and what the rest was; over all attempts that go on from one another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twinstep.spec.accelerator import CpuSpec, GpuSpec
from twinstep.spec.job import JobSpec
from twinstep.spec.report import TIME_PARTS
from twinstep.spec.topology import slice_shape

STEP = "step"


class Goodput:
    """Seconds by part. `other` is what the clock says beyond what the parts add up to."""

    def __init__(self, *, chips: int, clock: Callable[[], float] = time.monotonic, begun: float | None = None) -> None:
        """`begun` is when this process's part began, by `clock`; now where it is not given."""
        self._clock = clock
        self._begun = clock() if begun is None else begun
        self._chips = chips
        self._seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self._carried = 0.0

    def add(self, part: str, seconds: float) -> None:
        """Count seconds for a part."""
        self._seconds[part] += max(0.0, seconds)

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the block's seconds for a part."""
        started = self._clock()
        try:
            yield
        finally:
            self.add(part, self._clock() - started)

    def move(self, seconds: float, *, to: str) -> None:
        """Say that step seconds counted as useful were none."""
        self._seconds[STEP] -= seconds
        self._seconds[to] += seconds

    def carry(self, before: Mapping[str, float], *, gap: float) -> None:
        """Go on from what a checkpoint says; `gap`: seconds from it to this attempt's start, 0 where it was stopped."""
        for part, seconds in before.items():
            if part in self._seconds:
                self._seconds[part] += seconds
                self._carried += seconds
        self._seconds["restart"] += max(0.0, gap)
        self._carried += max(0.0, gap)

    @property
    def wall(self) -> float:
        """Seconds of all attempts, and between them."""
        return self._carried + self._clock() - self._begun

    def seconds(self) -> dict[str, float]:
        """Return seconds by part; they add up to `wall`."""
        found = dict(self._seconds)
        found["other"] += max(0.0, self.wall - sum(found.values()))
        return found

    @property
    def share(self) -> float:
        """Useful step time over wall time, 0…1."""
        return self._seconds[STEP] / max(self.wall, 1e-9)

    def account(self) -> dict[str, Any]:
        """Return what a progress record says of it."""
        seconds = {part: round(each, 3) for part, each in self.seconds().items() if each}
        return {"goodput": self.share, "chip_hours": self.chip_hours, "time_s": seconds}

    @property
    def chip_hours(self) -> float:
        """Chips (devices on a CPU) × hours of wall time."""
        return self._chips * self.wall / 3600


def chips_of(spec: JobSpec) -> int:
    """Return how many chips, GPUs, or devices of a CPU, a run of `spec` holds."""
    accelerator = spec.accelerator
    if isinstance(accelerator, CpuSpec):
        return accelerator.devices
    if isinstance(accelerator, GpuSpec):
        return accelerator.count
    return slice_shape(
        accelerator.generation,
        accelerator.topology,
        chips_per_host=accelerator.chips_per_host,
        slices=accelerator.slices,
    ).chips
