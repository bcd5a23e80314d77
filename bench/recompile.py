"""`recompile`: what it costs until a step has run: nothing compiled yet, compiled by an earlier process, seen before.

cold: a new process and a fresh cache directory. warm_start: a new process and the directory a cold one left.
known_shape: a process that was at another shape returns. Each counts from the call of the step to its loss, so that
one step is in all three; starting Python and loading torch is not, and is given beside them.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import Child, need_cxx
from bench.measure import MIN_RUNS, Say, interleave, ratio, ratio_spread, result, spread
from twinstep.spec.errors import TrainError

BACKENDS = ("inductor", "xla")
KINDS = ("cold", "warm_start", "known_shape")
PAIRS = (("known_shape", "cold"), ("warm_start", "cold"))

# One layer and SGD: Inductor's cold compile is a C++ compile per kernel, minutes with Adam on three layers, and it is
# run eight times. Sizes of tensors hardly count.
SPEC: dict[str, Any] = {
    "name": "bench-recompile",
    "model": {
        "embedding_dim": 16, "transducer_dim": 16, "num_layers": 1, "num_heads": 2,
        "linear_dim": 8, "attention_dim": 8, "hidden_dim": 16,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 2000, "batch_size": 8, "uih_len": 16, "num_candidates": 4},
    "optimizers": {"dense": {"kind": "sgd"}, "sparse": {"kind": "sgd"}},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    backends: tuple[str, ...] = BACKENDS
    runs: int = MIN_RUNS
    warmup: int = 1


FULL = Size(spec=SPEC)


@dataclass(slots=True)
class Side:
    """One backend's three kinds of start."""

    backend: str
    spec: Mapping[str, Any]
    folder: Path
    """Its cache directories are made here."""
    nodes: int = 0
    """Nodes of the captured graph."""
    process_s: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm_start": []})
    """Seconds from starting Python to the first loss, warm-up included."""
    _round: int = 0
    _resident: Child | None = None

    def child(self, cache: Path) -> Child:
        """Return a new process with its cache at `cache`."""
        arguments = {"backend": self.backend, "spec": self.spec, "cache_dir": str(cache)}
        return Child("bench.starts:Start", arguments, cache_dir=cache / "inductor")

    def cold(self) -> float:
        """Start a job with a cache directory that nobody used."""
        self._round += 1
        return self._start("cold", want="none")

    def warm_start(self) -> float:
        """Start a job with the cache directory of the last cold start."""
        return self._start("warm_start", want="disk")

    def known_shape(self) -> float:
        """Return to a shape in the process that stays; its two programs are compiled at the first call."""
        assert self._resident is not None, "enter keeps a process"
        found = self._resident.call("back")
        if found["compiles"] != 2:
            raise TrainError(
                f"{self.backend} compiled {found['compiles']} programs for two shapes", remedy="see CompileKey"
            )
        return float(found["seconds"])

    def enter(self, stack: contextlib.ExitStack) -> None:
        """Start the process that stays and let it see both shapes."""
        self._resident = stack.enter_context(self.child(self.folder / "resident"))
        self._resident.call("first")
        self._resident.call("away")

    def _start(self, kind: str, *, want: str) -> float:
        started = time.perf_counter()
        with self.child(self.folder / str(self._round)) as child:
            found = child.call("first")
            self.process_s[kind].append(time.perf_counter() - started)
        if found["cache"] != want:
            raise TrainError(
                f"a {kind} of {self.backend} was answered by {found['cache']}, not {want}",
                remedy="compile caches must be empty for a cold start and kept for a warm one; nothing else may "
                "write to the temporary directory",
            )
        self.nodes = int(found["nodes"])
        return float(found["seconds"])


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, a child failed, or a cache did not behave as its kind of start needs.
    """
    if "inductor" in size.backends:
        need_cxx()
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-") as folder, contextlib.ExitStack() as stack:
        sides = {
            name: Side(backend=name, spec=size.spec, folder=Path(folder) / name)
            for name in size.backends
        }  # fmt: skip
        actions: dict[str, Callable[[], float]] = {}
        for name, side in sides.items():
            say(f"{name}: both shapes, in the process that stays")
            side.enter(stack)
            actions |= {f"{name} {kind}": getattr(side, kind) for kind in KINDS}
        samples = interleave(
            actions,
            runs=size.runs,
            warmup=size.warmup,
            on_round=lambda number, total: say(f"round {number} of {total}"),
        )
    by_backend = {name: {kind: samples[f"{name} {kind}"] for kind in KINDS} for name in size.backends}
    return result("recompile", _body(size, sides, by_backend), runs=size.runs)


def _body(size: Size, sides: Mapping[str, Side], samples: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    def by_pair(number: Callable[[list[float], list[float]], Any]) -> dict[str, Any]:
        return {
            f"{above}/{below}": {name: number(kinds[above], kinds[below]) for name, kinds in samples.items()}
            for above, below in PAIRS
        }

    return {
        "ratios": by_pair(ratio),
        "ratio_spread": by_pair(ratio_spread),
        "seconds": {
            name: {kind: statistics.median(values) for kind, values in kinds.items()} for name, kinds in samples.items()
        },
        "seconds_spread": {
            name: {kind: spread(values) for kind, values in kinds.items()} for name, kinds in samples.items()
        },
        "process_s": {
            name: {kind: statistics.median(values[size.warmup :]) for kind, values in side.process_s.items()}
            for name, side in sides.items()
        },
        "nodes": {name: side.nodes for name, side in sides.items()},
        "spec": dict(size.spec),
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title="seconds until a step has run",
        caption=f"{found['runs']} interleaved runs; with Python: from starting the process, imports and data included",
    )
    for name in ("backend", "start", "s", "IQR", "least", "most", "of cold", "with Python s"):
        page.add_column(name, justify="left" if name in ("backend", "start") else "right")
    for backend, kinds in found["seconds_spread"].items():
        for kind, numbers in kinds.items():
            share = found["ratios"].get(f"{kind}/cold", {}).get(backend)
            process = found["process_s"][backend].get(kind)
            page.add_row(
                backend,
                kind,
                *(f"{numbers[key]:.4g}" for key in ("median", "iqr", "min", "max")),
                "–" if share is None else f"{share:.2%}",
                "–" if process is None else f"{process:.1f}",
            )
    return page
