"""`preprocess`: a batch's ids to SparseCore buffers, ours over jax-tpu-embedding's compiled code, on the same threads.

Each side lives in a process of its own that may use so many processors: the peer starts a thread for each it may use.
Buffers, statistics and minibatches are held against each other first; what differs makes the whole result unequal.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.child import Child
from bench.measure import Say, interleave, ratio_spread, result, spread

BARS = {"one-hot": 0.60, "split": 0.50}  # of the peer's time; the others: OTHER_BAR
OTHER_BAR = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    workloads: tuple[str, ...] = ("one-hot", "multi-hot", "stacked", "ragged", "sequence", "split")
    shapes: tuple[tuple[int, int], ...] = ((4, 4), (32, 4))
    """(devices, devices of this host)."""
    threads: tuple[int, ...] = (1, 2)
    runs: int = 9
    warmup: int = 2
    samples: int = 16_384
    calls: int = 1


FULL = Size()


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: a side failed.
    """
    cases, equal = {}, True
    for workload in size.workloads:
        for devices, local in size.shapes:
            for threads in size.threads:
                name = f"{workload}, {devices} chips, {threads} threads"
                say(name)
                found = case(workload, devices, local, threads, size)
                equal = equal and bool(found["equal"])
                cases[name] = found
    return result("preprocess", {"cases": cases, "equal": equal, "samples": size.samples}, runs=size.runs)


def case(workload: str, devices: int, local: int, threads: int, size: Size) -> dict[str, Any]:
    """Measure one workload on one shape with one number of threads."""
    given = {
        "workload": workload,
        "devices": devices,
        "local": local,
        "threads": threads,
        "samples": size.samples,
    }
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(Child("bench.preprocess_sides:Side", {**given, "side": side}))
            for side in ("ours", "theirs")
        }
        digests = {side: child.call("digest") for side, child in sides.items()}

        def turn(side: str) -> Callable[[], float]:
            return lambda: float(sides[side].call("run", calls=size.calls))

        samples = interleave({side: turn(side) for side in sides}, runs=size.runs, warmup=size.warmup)
        peaks = {side: float(child.call("peak")) for side, child in sides.items()}
        ids = int(sides["ours"].call("ids"))
    return {
        "ratio": ratio_spread(samples["ours"], samples["theirs"]),
        "ms": {side: spread([value * 1e3 for value in values]) for side, values in samples.items()},
        "ids": ids,
        "bar": BARS.get(workload, OTHER_BAR),
        "added_mb": peaks,
        "minibatches": digests["ours"]["minibatches"],
        "equal": digests["ours"] == digests["theirs"],
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title="host preprocessing for SparseCores over jax-tpu-embedding's",
        caption=f"{found['samples']} samples, {found['runs']} interleaved runs, medians of paired ratios",
    )
    for name in ("workload", "ours ms", "theirs ms", "ratio", "bar", "ns/id", "added MB", "theirs", "equal"):
        page.add_column(name, justify="left" if name == "workload" else "right")
    for name, each in found["cases"].items():
        ours, theirs = (each["ms"][side]["median"] for side in ("ours", "theirs"))
        page.add_row(
            name,
            f"{ours:.2f}",
            f"{theirs:.2f}",
            f"{each['ratio']['median']:.2f}",
            f"{each['bar']:.2f}",
            f"{ours * 1e6 / each['ids']:.1f}",
            *(f"{each['added_mb'][side]:.0f}" for side in ("ours", "theirs")),
            "yes" if each["equal"] else "NO",
        )
    return page


def timed(work: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one of `calls` calls; results are freed within the time, as a training loop frees them."""
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def pin(threads: int) -> None:
    """Let this process use so many processors."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
