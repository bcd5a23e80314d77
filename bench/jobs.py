"""Runs of `twinstep train` as benchmarks start them: under a supervisor, in a directory of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.child import ROOT
from twinstep.spec.errors import TrainError

SPEC: dict[str, Any] = {
    "name": "bench-checkpoint",
    "model": {"embedding_dim": 64, "transducer_dim": 64, "num_layers": 2, "hidden_dim": 64},
    "data": {
        "dataset": "synthetic", "synthetic_events": 20000, "batch_size": 32, "uih_len": 64, "num_candidates": 8,
        "rows": {"item_id": 200_000},
    },
    "train": {"eval_batches": 4, "log_every": 10},
}  # fmt: skip


def job_spec(base: Mapping[str, Any], backend: str, folder: Path, *, steps: int, every: int) -> dict[str, Any]:
    """Return a job that trains on one backend, with its compile cache and its checkpoints below a folder."""
    spec = json.loads(json.dumps(base))
    spec["train"] = {**spec.get("train", {}), "steps": steps}
    spec["compile"] = {"backend": backend, "cache_dir": str(folder / "cache")}
    spec["checkpoint"] = {"path": str(folder / "place"), "every_steps": every}
    return dict(spec)


class Job:
    """One run of `twinstep train` under a supervisor, in a directory of its own."""

    def __init__(self, spec: Mapping[str, Any], run_dir: Path, *, restarts: int = 0) -> None:
        run_dir.mkdir(parents=True)
        self.run_dir, self.started = run_dir, time.time()
        (run_dir / "spec.json").write_text(json.dumps(spec))
        order = {
            "run_dir": str(run_dir),
            "command": [sys.executable, "-m", "twinstep", "train", str(run_dir / "spec.json")],
            "max_seconds": None,
            "stop_grace_seconds": 10.0,
            "restarts": restarts,
        }
        told = {
            "TWINSTEP_RUN_ID": "bench", "TWINSTEP_RUN_DIR": str(run_dir), "TWINSTEP_API_URL": "http://127.0.0.1:9",
            "TWINSTEP_RUN_TOKEN": "none", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-m", "twinstep.platform.scheduler.supervise", json.dumps(order)]
        self._process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **told})

    def records(self) -> list[dict[str, Any]]:
        """Return what the run has reported."""
        try:
            lines = (self.run_dir / "spool.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def step(self) -> int:
        """Return the step that the run is at."""
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.run_dir / "heartbeat").read_bytes())["step"])
        return 0

    def runs(self) -> bool:
        """Say whether the run goes on."""
        return self._process.poll() is None

    def kill_worker(self) -> None:
        """Kill the worker, as whatever kills a process would."""
        os.kill(json.loads((self.run_dir / "supervisor.json").read_text())["worker"]["pid"], signal.SIGKILL)

    def end(self) -> dict[str, Any]:
        """Wait for the end; return the summary and the wall seconds."""
        while self._process.poll() is None:
            time.sleep(0.2)
        found = [each["summary"] for each in self.records() if each["kind"] == "result"]
        if not found:
            raise TrainError(f"a run failed: {(self.run_dir / 'log').read_text()[-500:]}", remedy="see its log")
        return {**found[-1], "wall_s": time.time() - self.started}

    def first_step_s(self) -> float:
        """Return the seconds from the start of the process to the first step's report."""
        return float(next(each["time"] for each in self.records() if each["kind"] == "metric")) - self.started
