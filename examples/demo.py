"""The demo: a control plane of its own, one job per backend submitted over REST, and a table of what came of them.

    scripts/demo [--json] [--keep] [--steps N]

It uses what any client has: the command's HTTP client and the job spec in examples/ml-100k.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from twinstep import __version__
from twinstep.cli.client import PlaneClient
from twinstep.cli.follow import follow_job
from twinstep.spec.errors import TwinstepError, UnavailableError
from twinstep.worker.train.environment import usable_processors
from twinstep.worker.train.toolchain import check_compiler

HERE = Path(__file__).parent
BACKENDS = ("inductor", "xla")
READY = "control plane ready: "
START_LIMIT = 60.0  # seconds; NiceGUI's first import compiles its bytecode


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--keep", action="store_true", help="leave the control plane and its dashboard running")
    parser.add_argument("--steps", type=int, help="train so many steps instead of the spec's")
    options = parser.parse_args()
    console = Console(stderr=False)
    started = time.monotonic()
    backends = usable_backends(console)
    try:
        with control_plane(keep=options.keep) as (url, data_dir), PlaneClient(url) as plane:
            console.print(f"control plane and dashboard: {url}")
            jobs = {backend: run_job(plane, job_spec(backend, options.steps), console) for backend in backends}
            seconds = time.monotonic() - started
            console.print(results_table(jobs))
            if options.keep:
                console.print(f"dashboard: {url} (still running; end it with `kill {server_pid(data_dir)}`)")
            else:
                console.print(f"dashboard: {url} (ended with the demo; see the runs again with")
                console.print(f"  .venv/bin/twinstep up --data-dir {data_dir} )", soft_wrap=True)
    except TwinstepError as error:
        print(f"demo: {error.problem}\nfix: {error.remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; its jobs were cancelled", file=sys.stderr)
        return 130
    done = all(job["state"] == "succeeded" for job in jobs.values())
    if options.json:
        print(json.dumps(results(jobs, seconds)))
    return 0 if done else 1


def usable_backends(console: Console) -> tuple[str, ...]:
    """Return the backends this machine can compile with: Inductor needs a C++ compiler and Python's headers."""
    try:
        check_compiler()
    except UnavailableError as error:
        console.print(f"the inductor job is left out: {error.problem}", soft_wrap=True)
        console.print(f"to have it: {error.remedy}", soft_wrap=True)
        return ("xla",)
    return BACKENDS


@contextmanager
def control_plane(*, keep: bool) -> Iterator[tuple[str, Path]]:
    """Start a control plane on a free port with a directory of its own; end it, unless it is to be kept."""
    data_dir = Path(tempfile.mkdtemp(prefix="twinstep-demo-"))
    command = [sys.executable, "-m", "twinstep", "up", "--port", "0", "--data-dir", str(data_dir)]
    log = data_dir / "control-plane.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield wait_ready(server, log), data_dir
    except BaseException:
        keep = False
        raise
    finally:
        if not keep and server.poll() is None:
            server.send_signal(signal.SIGTERM)
            server.wait(30)


def wait_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address the control plane says it serves.

    Raises:
        TwinstepError: it ended, or said nothing in time.
    """
    limit = time.monotonic() + START_LIMIT
    while time.monotonic() < limit and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith(READY):
                return line.removeprefix(READY)
        time.sleep(0.05)
    raise TwinstepError("the control plane did not start", remedy=f"read {log}")


def server_pid(data_dir: Path) -> int:
    """Return the control plane's process id."""
    return int(json.loads((data_dir / "server.json").read_text())["pid"])


def job_spec(backend: str, steps: int | None) -> dict[str, Any]:
    """Return the example's spec with the backend set."""
    spec: dict[str, Any] = yaml.safe_load((HERE / "ml-100k.yaml").read_text())
    spec["compile"] = {**spec.get("compile", {}), "backend": backend}
    if steps is not None:
        spec["train"] = {**spec.get("train", {}), "steps": steps}
    return spec


def run_job(plane: PlaneClient, spec: dict[str, Any], console: Console) -> dict[str, Any]:
    """Submit a job over REST, show it until it ends, and return it; cancel it when the demo is interrupted."""
    job_id = plane.post("/v1/jobs", spec)["id"]
    backend = spec["compile"]["backend"]
    console.rule(f"{spec['name']} on {backend}")
    try:
        follow_job(plane, job_id, as_json=False)
    except KeyboardInterrupt:
        plane.post(f"/v1/jobs/{job_id}/cancel")
        raise
    return plane.job(job_id)


def results_table(jobs: dict[str, dict[str, Any]]) -> Table:
    """Return the table of backends and baselines."""
    title = "MovieLens-100K, newest 20 % of time held out, rating ≥ 4"
    table = Table(title=title, caption="(…) baselines without parameters")
    for name in ("backend", "state", "steps", "examples/s", "compile s", "AUC", "NE"):
        table.add_column(name, justify="left" if name in ("backend", "state") else "right")
    baselines: dict[str, Any] = {}
    for backend, job in jobs.items():
        summary = job.get("summary") or {}
        baselines = baselines or summary.get("baselines") or {}
        table.add_row(
            backend,
            job["state"],
            str(summary.get("steps", "–")),
            number(summary.get("examples_per_s"), ",.0f"),
            number(summary.get("compile_s"), ".1f"),
            number(summary.get("auc"), ".4f"),
            number(summary.get("ne"), ".4f"),
        )
    for name, score in baselines.items():
        table.add_row(f"({name})", "", "", "", "", number(score.get("auc"), ".4f"), "")
    return table


def number(value: float | None, form: str) -> str:
    """Return a number for people, or a dash."""
    return "–" if value is None else format(value, form)


def results(jobs: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return what the demo found, for programs."""
    summaries = {backend: job.get("summary") or {} for backend, job in jobs.items()}
    first = next(iter(summaries.values()))
    states = {job["state"] for job in jobs.values()}
    return {
        "state": "succeeded" if states == {"succeeded"} else "failed",
        "auc": first.get("auc"),
        "ne": first.get("ne"),
        "baselines": {name: score.get("auc") for name, score in (first.get("baselines") or {}).items()},
        "seconds": round(seconds, 2),
        "backends": {
            backend: {
                key: summary.get(key)
                for key in ("compile_s", "examples_per_s", "steps", "auc", "ne", "final_loss", "train_s", "eval_s")
            }
            for backend, summary in summaries.items()
        },
        "versions": {"twinstep": __version__, **(summaries.get("xla") or first).get("versions", {})},
        "cpu": os.cpu_count(),
        "threads": usable_processors(),
        "runs": 1,
    }


if __name__ == "__main__":
    sys.exit(main())
