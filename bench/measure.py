"""Interleaved runs, their medians and spread, and the surroundings that every result carries.

All benchmarks measure through `interleave`, so that a slow phase of the machine meets every side of a comparison.
Nothing here imports torch or jax, starts a process or prints.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIN_RUNS = 7  # counted runs under which a median and a quartile say little
DIGITS = 4  # significant digits of a result: more would be noise
DISTRIBUTIONS = ("twinstep", "torch", "torchax", "jax", "numpy")

Say = Callable[[str], None]


def interleave(
    actions: Mapping[str, Callable[[], float]],
    *,
    runs: int,
    warmup: int = 1,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, list[float]]:
    """Run all actions in turn, A B A B …, and return the numbers that each one gave in the counted rounds.

    Args:
        actions: by name; each does one run and returns what it measured, mostly seconds.
        runs: counted rounds.
        warmup: rounds before them, whose numbers are dropped.
        on_round: called before each round with its number from 1, warm-up included, and how many there are.
    """
    assert runs >= 1
    assert warmup >= 0
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(warmup + runs):
        if on_round is not None:
            on_round(number + 1, warmup + runs)
        for name, action in actions.items():
            value = action()
            if number >= warmup:
                samples[name].append(value)
    return samples


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Return median, least, most, quartiles, their distance (IQR) and the number of values.

    Quartiles interpolate between the two nearest values, as numpy's default does.
    """
    assert values, "nothing was measured"
    ordered = sorted(values)
    low, high = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "q1": low,
        "q3": high,
        "iqr": high - low,
        "n": len(ordered),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def seeds_spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation (0 for one value), least, most and the values themselves."""
    assert values, "nothing was measured"
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the ratio of the medians."""
    return statistics.median(above) / statistics.median(below)


def ratio_spread(above: Sequence[float], below: Sequence[float]) -> dict[str, float | int]:
    """Return the spread of the ratios within a round: a slow phase of the machine slows both of its sides."""
    return spread([first / second for first, second in zip(above, below, strict=True)])


def result(name: str, body: Mapping[str, Any], *, runs: int) -> dict[str, Any]:
    """Return a benchmark's result: what it measured and its surroundings, rounded, ready for JSON.

    It names no machine: a processor model and versions are what a number depends on.
    """
    return {
        "bench": name,
        **rounded(body),
        "versions": versions(),
        "cpu": cpu_model(),
        "threads": threads(),
        "runs": runs,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def rounded(value: Any) -> Any:
    """Return `value` with every float in it cut to a few significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def versions() -> dict[str, str]:
    """Return the versions that a number depends on, by name; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model name; the architecture where the system names none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def threads() -> int:
    """Return the threads a worker computes with: as many as it may run on, as a job does by default."""
    return len(os.sched_getaffinity(0))


def as_line(found: Mapping[str, Any]) -> str:
    """Return a result as one JSON line, its keys in order of the alphabet."""
    return json.dumps(found, sort_keys=True, allow_nan=False)


def as_page(found: Mapping[str, Any]) -> str:
    """Return a result as a file holds it: indented, its keys in order of the alphabet."""
    return json.dumps(found, sort_keys=True, allow_nan=False, indent=2) + "\n"
