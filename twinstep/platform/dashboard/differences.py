"""What differs between jobs: fields of their specs, and what came of them, the best marked. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinstep.platform.store.records import MetricSeries
from twinstep.spec.words import DASH, duration, number

MISSING = DASH


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Return the leaves of a spec by path, `data.batch_size`, as they would be written."""
    if isinstance(value, Mapping) and value:
        return {
            name: leaf for key, each in value.items() for name, leaf in flat(each, f"{path}.{key}".lstrip(".")).items()
        }
    return {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def differing(specs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the fields in which specs differ, each with its value in every one; names of jobs are left out."""
    flats = [flat(spec) for spec in specs]
    paths = dict.fromkeys(path for each in flats for path in each)
    rows = [(path, [each.get(path, MISSING) for each in flats]) for path in paths if path != "name"]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One figure of what came of jobs."""

    name: str
    values: tuple[str, ...]
    best: frozenset[int]
    """Which of them are the best; empty where none is better than another."""


_FIGURES = (
    ("Held-out AUC", "auc", max, number),
    ("Held-out NE", "ne", min, number),
    ("Final loss", "final_loss", min, number),
    ("examples/s", "examples_per_s", max, lambda value: number(value, 1)),
    ("Compile", "compile_s", min, duration),
    ("Training", "train_s", None, duration),
    ("Steps", "steps", None, number),
    ("Parameters", "parameters", None, number),
)


def outcomes(summaries: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Return the figures that at least one job has; a job that has not ended may give those it has so far."""
    found: list[Outcome] = []
    for name, key, better, shown in _FIGURES:
        values = [summary.get(key) for summary in summaries]
        known = {index: value for index, value in enumerate(values) if isinstance(value, int | float)}
        if not known:
            continue
        top = better(known.values()) if better is not None else None
        best = frozenset(index for index, value in known.items() if value == top)
        found.append(
            Outcome(name, tuple(shown(value) for value in values), best if len(best) < len(known) else frozenset())
        )
    return found


def as_csv(rows: Iterable[tuple[str, MetricSeries]]) -> bytes:
    """Return series of jobs as a table, a row per bucket; a text that a spreadsheet would run is quoted as one."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(("job", "metric", "first_step", "last_step", "time", "mean", "low", "high", "undefined"))
    for job, series in rows:
        columns = (series.first_steps, series.steps, series.times, series.means, series.lows, series.highs)
        for row in zip(*columns, series.undefined, strict=True):
            writer.writerow((_harmless(job), _harmless(series.name), *row))
    return out.getvalue().encode()


def _harmless(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
