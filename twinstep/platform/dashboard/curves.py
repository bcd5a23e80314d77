"""From a metric's buckets to what a chart draws: points over step, time or examples, gaps left open. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from twinstep.platform.store.records import MetricSeries

Axis = Literal["step", "time", "examples"]
AXES: dict[str, str] = {"step": "Step", "time": "Minutes since start", "examples": "Training examples"}
GAP = 5
"""A stretch without points so many times the usual one is a gap: no line is drawn over it."""
Point = list[float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart."""

    points: list[Point] = field(default_factory=list)
    """[x, mean]; a mean of None breaks the line."""
    low: list[Point] = field(default_factory=list)
    """[x, lowest]; empty where every point is drawn as it is."""
    span: list[Point] = field(default_factory=list)
    """[x, highest − lowest]."""
    undefined: list[float] = field(default_factory=list)
    """Where values were NaN or infinite."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """The first and the last x; None where there is nothing."""
        drawn = [point[0] for point in self.points if point[0] is not None]
        return (drawn[0], drawn[-1]) if drawn else None


@dataclass(frozen=True, slots=True)
class Scale:
    """How steps of one run lie along an axis."""

    axis: Axis = "step"
    started: float = 0.0
    """Unix seconds of its first start."""
    examples_per_step: float = 1.0

    def places(self, series: MetricSeries) -> list[float]:
        """Return x of each bucket."""
        if self.axis == "time":
            return [max(0.0, time - self.started) / 60 for time in series.times]
        if self.axis == "examples":
            return [step * self.examples_per_step for step in series.steps]
        return [float(step) for step in series.steps]

    def step_at(self, x: float, known: MetricSeries) -> int:
        """Return the step at x; over time it is looked for among the buckets of a series that is known."""
        if self.axis == "step":
            return max(0, int(x))
        if self.axis == "examples":
            return max(0, int(x / self.examples_per_step))
        places = self.places(known)
        return known.steps[min(bisect_left(places, x), len(places) - 1)] if places else 0


def curve(series: MetricSeries, scale: Scale, *, smoothing: float = 0.0) -> Curve:
    """Return the line of a series; `smoothing` is the weight of what came before, from 0 to less than 1."""
    places = scale.places(series)
    steps = list(zip(series.steps, series.first_steps[1:], strict=False))
    usual = median(after - before for before, after in steps) if steps else 0
    gaps = {index for index, (before, after) in enumerate(steps) if after - before > max(GAP * usual, series.width)}
    means = smoothed(series.means, smoothing)
    points: list[Point] = []
    for index, (x, mean) in enumerate(zip(places, means, strict=True)):
        points.append([x, mean])
        if index in gaps:
            points.append([x, None])
    undefined = [x for x, count in zip(places, series.undefined, strict=True) if count]
    if all(low == high for low, high in zip(series.lows, series.highs, strict=True)):
        return Curve(points=points, undefined=undefined)
    edges = zip(places, series.lows, series.highs, strict=True)
    found = [(x, low, high) for x, low, high in edges if low is not None and high is not None]
    return Curve(
        points=points,
        low=[[x, low] for x, low, _ in found],
        span=[[x, high - low] for x, low, high in found],
        undefined=undefined,
    )


def smoothed(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return the exponential mean of values, without the pull towards zero at its beginning; None stays None."""
    if weight <= 0:
        return list(values)
    found: list[float | None] = []
    mean, seen = 0.0, 0.0
    for value in values:
        if value is None:
            found.append(None)
            continue
        mean, seen = weight * mean + (1 - weight) * value, weight * seen + (1 - weight)
        found.append(mean / seen)
    return found
