"""`hybrid`: a step of HybridParallel in two processes, with and without the next batch's ids on their way meanwhile.

Both sides live in the same two processes and take turns. Twice: over loopback, which hardly makes a process wait, and
over a link of a fixed rate, for which the processes are put into a network of their own (`unshare`, `tc`, as root). On
two processors two processes leave nothing idle, so what overlap can win is the time that bytes travel.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import ROOT, environment, need_cxx
from bench.measure import Say, ratio, ratio_spread, result, spread
from twinstep.spec.errors import UnavailableError

RATE = "1gbit"
"""Of the link, both directions together: tc's word."""
SPEC: dict[str, Any] = {
    "name": "bench-hybrid",
    "model": {
        "kind": "dlrm",
        "embedding_dim": 16,
        "bottom_dims": [256, 128],
        "over_dims": [256, 128],
        "interaction": "dot",
    },
    "data": {
        "dataset": "synthetic-clicks",
        "synthetic_events": 40_000,
        "batch_size": 1024,
        "synthetic": {"table_rows": [100_000] * 8, "max_ids": 100, "dense": 13},
    },
    "optimizers": {"dense": {"kind": "adam"}, "sparse": {"kind": "rowwise_adagrad"}},
    "embedding": {"engine": "torchrec", "sharding": {f"cat_{index}": "row_wise" for index in range(8)}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    links: tuple[str | None, ...] = (None, RATE)
    """Rates of the links; None: loopback as it is."""
    runs: int = 9
    """Counted rounds."""
    steps: int = 5
    """Steps of one side's turn."""
    warmup: int = 2


FULL = Size(spec=SPEC)


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        UnavailableError: there is no C++ compiler, or the processes failed.
    """
    if size.spec.get("compile", {}).get("backend", "inductor") == "inductor":
        need_cxx()
    found: dict[str, dict[str, Any]] = {}
    for rate in size.links:
        if rate is not None and not can_shape():
            say(f"a link of {rate} needs root, unshare and tc; it is left out")
            continue
        say("loopback" if rate is None else f"a link of {rate}")
        found["loopback" if rate is None else rate] = _measured(size, rate)
    samples = {link: each["samples"] for link, each in found.items()}
    body = {
        "ratios": {f"off/on, {link}": ratio(each["off"], each["on"]) for link, each in samples.items()},
        "ratio_spread": {f"off/on, {link}": ratio_spread(each["off"], each["on"]) for link, each in samples.items()},
        "ms": {
            f"{side}, {link}": statistics.median(values) * 1e3
            for link, each in samples.items()
            for side, values in each.items()
        },
        "ms_spread": {
            f"{side}, {link}": spread([value * 1e3 for value in values])
            for link, each in samples.items()
            for side, values in each.items()
        },
        "equal": all(each["losses"]["on"] == each["losses"]["off"] for each in found.values()),
        "processes": 2,
        "steps_per_run": size.steps,
        "spec": dict(size.spec),
    }
    return result("hybrid", body, runs=size.runs)


def can_shape() -> bool:
    """Say whether a network of a fixed rate can be made here."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("unshare", "ip", "tc", "sh"))


def _measured(size: Size, rate: str | None) -> dict[str, Any]:
    asked = {"spec": dict(size.spec), "runs": size.runs, "steps": size.steps, "warmup": size.warmup}
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.hybrid_rank", str(out), json.dumps(asked)]
        if rate is not None:
            # The bucket holds more than a packet of loopback; the queue is long enough that none is dropped.
            shaped = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 256k latency 2s"
            command = ["unshare", "-n", "sh", "-c", f'{shaped} && exec "$@"', "sh", *command]
        code = subprocess.run(command, cwd=ROOT, env=environment(Path(folder) / "inductor"), check=False).returncode
        if code:
            raise UnavailableError(
                f"the processes of the benchmark ended with code {code}",
                remedy="their last words stand above; mend that",
            )
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    said = ", ".join(f"{name}: {value:.2f}" for name, value in found["ratios"].items())
    page = Table(
        title=f"one step of HybridParallel in {found['processes']} processes, "
        f"batch {found['spec']['data']['batch_size']}",
        caption=f"{found['runs']} interleaved runs of {found['steps_per_run']} steps; {said}; "
        f"losses {'are the same' if found['equal'] else 'differ'}",
    )
    for name in ("overlap, link", "ms", "IQR", "least", "most"):
        page.add_column(name, justify="left" if name == "overlap, link" else "right")
    for name, numbers in found["ms_spread"].items():
        page.add_row(name, *(f"{numbers[key]:.1f}" for key in ("median", "iqr", "min", "max")))
    return page
