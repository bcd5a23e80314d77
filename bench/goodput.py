"""`goodput`: useful step time over wall time of a ten-minute run whose worker is killed once, half way.

The run is one of `twinstep train` under a supervisor, as the control plane starts it, with a checkpoint every hundred
steps. Its compile cache is warm, as that of a job that has run before: a short run comes first and fills it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import need_cxx
from bench.jobs import SPEC, Job, job_spec
from bench.measure import Say, result


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any] = field(default_factory=lambda: SPEC)
    backend: str = "inductor"
    seconds: float = 600.0
    """About how long the killed run trains."""
    warm_steps: int = 300
    """Of the run before, which also says how long a step takes."""
    every: int = 100
    """Steps between checkpoints."""


FULL = Size()


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, or a run failed.
    """
    if size.backend == "inductor":
        need_cxx()
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-", dir=os.environ.get("TMPDIR")) as folder:
        return result("goodput", _measured(size, Path(folder), say=say), runs=1)


def _measured(size: Size, folder: Path, *, say: Say) -> dict[str, Any]:
    say(f"{size.warm_steps} steps to fill the compile cache")
    before = Job(_spec(size, folder, steps=size.warm_steps, place="warm-place"), folder / "warm")
    before.end()
    steps = max(20, int(size.seconds * 1e3 / _step_ms(before)))
    say(f"{steps} steps, killed half way")
    job = Job(_spec(size, folder, steps=steps, place="place"), folder / "run", restarts=1)
    while job.step() < steps // 2 and job.runs():
        time.sleep(0.05)
    if job.runs():
        job.kill_worker()
    summary = job.end()
    lost = [each["data"] for each in job.records() if each["kind"] == "event" and each["name"] == "resumed"]
    return {
        "share": summary["time_s"]["step"] / summary["wall_s"],
        "told": summary["goodput"],
        "wall_s": summary["wall_s"],
        "steps": steps,
        "lost_steps": lost[-1]["lost_steps"],
        "time_s": summary["time_s"],
        "backend": size.backend,
        "spec": size.spec,
    }


def _spec(size: Size, folder: Path, *, steps: int, place: str) -> dict[str, Any]:
    spec = job_spec(size.spec, size.backend, folder, steps=steps, every=size.every)
    spec["checkpoint"]["path"] = str(folder / place)
    return spec


def _step_ms(job: Job) -> float:
    """Return the median milliseconds of a run's steps, with what they waited for batches."""
    told = [each["values"] for each in job.records() if each["kind"] == "metric" and "step_ms" in each["values"]]
    return float(statistics.median(values["step_ms"] + values["data_wait_ms"] for values in told))


def table(found: Mapping[str, Any]) -> Table:
    """Return what was found, for people."""
    made = Table("what", "value", "wanted")
    made.add_row("goodput, one kill", f"{found['share']:.1%} of {found['wall_s']:.0f} s", "≥ 95%")
    for part, seconds in sorted(found["time_s"].items(), key=lambda each: -each[1]):
        made.add_row(part, f"{seconds:.1f} s", "")
    made.add_row("steps done again", f"{found['lost_steps']} of {found['steps']}", "")
    return made
