"""`loader`: batches packed per second over batches a step takes per second, on one core, at the size of `bench step`.

Packing and stepping take turns in one child process that may use one core; the step is the compiled one, the faster the
step the harder the claim. Prefetching, which hides packing behind the step, is left out.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import Child, need_cxx
from bench.measure import Say, interleave, ratio, ratio_spread, result, spread
from bench.step import SPEC


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    backend: str = "inductor"
    runs: int = 15
    """Counted rounds."""
    batches: int = 3
    """Batches of one turn."""
    warmup: int = 2


FULL = Size(spec=SPEC)


class Sides:
    """A loader and a step of one job, on one core."""

    def __init__(self, *, spec: dict[str, Any], backend: str, cache_dir: str) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from bench.subject import Subject
        from twinstep.worker.data.loader import Loader

        subject = Subject(spec)
        self._loader = Loader(subject.dataset, subject.spec.data, seed=subject.spec.train.seed)
        self._step = subject.compiler(backend, cache_dir=Path(cache_dir))
        self._batches = subject.batches(8)
        self._packed = self._stepped = 0

    def pack(self, count: int) -> float:
        """Pack `count` batches that were not packed before; return the seconds of one."""
        begun = time.perf_counter()
        for _ in range(count):
            self._loader.train_batch(self._packed)
            self._packed += 1
        return (time.perf_counter() - begun) / count

    def step(self, count: int) -> float:
        """Run `count` steps on batches that are at hand; return the seconds of one."""
        begun = time.perf_counter()
        for _ in range(count):
            float(self._step(self._batches[self._stepped % len(self._batches)]).loss)
            self._stepped += 1
        return (time.perf_counter() - begun) / count


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, the dataset is missing, or a side failed.
    """
    if size.backend == "inductor":
        need_cxx()
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-") as cache:
        wanted = {"spec": dict(size.spec), "backend": size.backend, "cache_dir": cache}
        with Child("bench.loader:Sides", wanted) as child:
            say("the first step, which compiles")
            child.call("step", count=1)
            samples = interleave(
                {name: lambda name=name: child.call(name, count=size.batches) for name in ("step", "pack")},  # type: ignore[misc]
                runs=size.runs,
                warmup=size.warmup,
                on_round=lambda number, of: say(f"round {number} of {of}"),
            )
    body = {
        "ratios": {"step/pack": ratio(samples["step"], samples["pack"])},
        "ratios_spread": {"step/pack": ratio_spread(samples["step"], samples["pack"])},
        "ms": {name: statistics.median(values) * 1e3 for name, values in samples.items()},
        "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        "samples_per_s": size.spec["data"]["batch_size"] / statistics.median(samples["pack"]),
        "backend": size.backend,
        "spec": dict(size.spec),
    }
    return result("loader", body, runs=size.runs)


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title=f"one batch of {found['spec']['data']['batch_size']}: packed, and taken by a step, on one core",
        caption=f"{found['runs']} interleaved runs; it packs {found['ratios']['step/pack']:.1f}× as fast as the "
        f"step on {found['backend']} takes, {found['samples_per_s']:,.0f} samples a second",
    )
    for name in ("side", "ms", "IQR", "least", "most"):
        page.add_column(name, justify="left" if name == "side" else "right")
    for name, numbers in found["ms_spread"].items():
        page.add_row(name, *(f"{numbers[key]:.2f}" for key in ("median", "iqr", "min", "max")))
    return page
