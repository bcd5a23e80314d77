"""`engine`: what preprocessing for SparseCores adds to a step that it runs ahead of, DLRM with 26 tables.

Three sides take turns in one child: steps on buffers that are at hand, buffers alone, and both, buffers made in a
thread while the step before runs, as a run does it. The claim is both ≤ 1.1 × the slower of the two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.child import Child
from bench.measure import Say, interleave, result, spread

SPEC: dict[str, Any] = {
    "name": "bench-engine",
    "model": {"kind": "dlrm", "embedding_dim": 32, "bottom_dims": [512, 256], "over_dims": [512, 256],
              "num_cross_layers": 3, "cross_rank": 128},
    "data": {"dataset": "synthetic-clicks", "synthetic_events": 60_000, "batch_size": 4096},
    "optimizers": {"sparse": {"kind": "rowwise_adagrad", "lr": 0.05}},
    "compile": {"backend": "xla", "cache": False},
    "embedding": {"engine": "sparsecore", "limits": {"source": "data"}, "overflow": "minibatch"},
    "train": {"steps": 100_000},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    runs: int = 9
    """Counted rounds."""
    steps: int = 4
    """Steps of one turn."""
    warmup: int = 1


FULL = Size(spec=SPEC)
SIDES = ("step", "preprocess", "both")


class Sides:
    """A run's Stepper, driven part by part."""

    def __init__(self, *, spec: dict[str, Any]) -> None:
        from bench.subject import Subject
        from twinstep.worker.data.loader import Loader
        from twinstep.worker.train.engines import Parts, make_stepper
        from twinstep.worker.train.processes import Process, Together

        subject = Subject(spec)
        self._loader = Loader(subject.dataset, subject.spec.data, seed=0)
        self._stepper = make_stepper(
            Parts(
                spec=subject.spec,
                model=subject.model,
                optimizers=subject.optimizers,
                loader=self._loader,
                on_start=lambda reason: None,
                on_event=lambda event: None,
                on_warning=lambda warning: None,
                tell=lambda name, text, data: None,
                together=Together(Process()),
            )
        )
        self._batches = [self._loader.train_batch(number) for number in range(8)]
        self._ready = [self._stepper.prepare(batch) for batch, _ in self._batches]
        self._number = 0

    def _one(self, prepared: Any) -> None:
        float(self._stepper.program(prepared, sizes={}, step=self._number)().loss)
        self._number += 1

    def step(self, count: int) -> float:
        """Run steps on buffers that are at hand; return the seconds of one."""
        begun = time.perf_counter()
        for number in range(count):
            self._one(self._ready[number % len(self._ready)])
        return (time.perf_counter() - begun) / count

    def preprocess(self, count: int) -> float:
        """Make buffers only; return the seconds of one batch's."""
        begun = time.perf_counter()
        for number in range(count):
            self._stepper.prepare(self._batches[number % len(self._batches)][0])
        return (time.perf_counter() - begun) / count

    def both(self, count: int) -> float:
        """Run steps on buffers that are made meanwhile; return the seconds of one."""
        from twinstep.worker.data.prefetch import Prefetch

        batches = (self._batches[number % len(self._batches)] for number in range(count + 4))
        with Prefetch(self._stepper.prepared(batches)) as ahead:
            self._one(next(ahead)[0])  # the first has nothing to hide behind
            begun = time.perf_counter()
            for _ in range(count):
                self._one(next(ahead)[0])
            return (time.perf_counter() - begun) / count


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: a side failed.
    """
    with Child("bench.engine:Sides", {"spec": dict(size.spec)}) as child:
        say("the first step, which compiles")
        child.call("step", count=1)
        samples = interleave(
            {name: lambda name=name: child.call(name, count=size.steps) for name in SIDES},  # type: ignore[misc]
            runs=size.runs,
            warmup=size.warmup,
            on_round=lambda number, of: say(f"round {number} of {of}"),
        )
    ratios = [both / max(step, pre) for step, pre, both in zip(*(samples[name] for name in SIDES), strict=True)]
    body = {
        "ratios": {"both/slower": statistics.median(ratios)},
        "ratios_spread": {"both/slower": spread(ratios)},
        "ms": {name: statistics.median(values) * 1e3 for name, values in samples.items()},
        "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        "spec": dict(size.spec),
    }
    return result("engine", body, runs=size.runs)


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title=f"DLRM, batch {found['spec']['data']['batch_size']}: steps, buffers for SparseCores, and both",
        caption=f"{found['runs']} interleaved runs; both over the slower: {found['ratios']['both/slower']:.3f}",
    )
    for name in ("side", "ms", "IQR", "least", "most"):
        page.add_column(name, justify="left" if name == "side" else "right")
    for name, ms in found["ms"].items():
        seen = found["ms_spread"][name]
        page.add_row(name, f"{ms:,.1f}", f"{seen['iqr']:,.1f}", f"{seen['min']:,.1f}", f"{seen['max']:,.1f}")
    return page
