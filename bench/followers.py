"""Many who follow one job over HTTP while it reports, and what they cost the process that serves them."""

from __future__ import annotations

import json
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from twinstep.spec.report import MetricRecord

BATCHES, ROWS = 50, 20  # of points that a followed job reports
OPEN_S, SEEN_S = 120, 240


@dataclass(frozen=True, slots=True)
class Followed:
    """What following came to."""

    resident_kb: float
    """The most that this process held meanwhile."""
    seconds: float
    """From the first report to the end of the last stream."""
    unseen: int
    """Points that somebody missed, or saw twice."""


def follow(url: str, count: int, report: Callable[[Sequence[MetricRecord]], object]) -> Followed:
    """Let so many follow a stream of this process, from another one, while `report` takes in points."""
    wanted = BATCHES * ROWS
    peak = resident_kb()
    spawn = multiprocessing.get_context("spawn")
    ready, out = spawn.Event(), spawn.Queue()
    process = spawn.Process(target=_follow_all, args=(url, count, wanted, ready, out))
    process.start()
    if not ready.wait(timeout=OPEN_S):
        raise TimeoutError("the followers did not all get through")
    started = time.perf_counter()
    for batch in range(BATCHES):
        steps = range(batch * ROWS, (batch + 1) * ROWS)
        report([MetricRecord(seq=step + 1, time=0.0, step=step, values={"loss": 1.0}) for step in steps])
        peak = max(peak, resident_kb())
        time.sleep(0.02)
    seen: list[int] = out.get(timeout=SEEN_S)
    process.join()
    seconds = time.perf_counter() - started
    return Followed(max(peak, resident_kb()), seconds, sum(abs(wanted - each) for each in seen))


def _follow_all(url: str, count: int, wanted: int, ready: Any, out: Any) -> None:
    """Follow so many times until every point was seen; put how many each saw."""
    seen = [0] * count
    open_ = threading.Barrier(count + 1)
    context = httpx.create_ssl_context()  # one for all: the bulk of what a client costs

    def one(number: int) -> None:
        with (
            httpx.Client(timeout=OPEN_S, trust_env=False, verify=context) as http,
            http.stream("GET", url, params={"kinds": ["metrics", "state"]}) as answer,
        ):
            open_.wait()
            for line in answer.iter_lines():
                if line.startswith("data:") and '"items"' in line:
                    seen[number] += len(json.loads(line[5:])["items"])
                if seen[number] >= wanted or line.startswith("event: end"):
                    return

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    open_.wait()
    ready.set()
    for thread in threads:
        thread.join()
    out.put(seen)


def resident_kb() -> float:
    """Return what this process holds in memory, in kB."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1024
    except OSError:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
