"""`checkpoint`: what saving costs a run, how fast the disk is used, how soon a killed run is back, and its goodput.

disk: a state of so many MiB saved and restored, in turns with one file of as many bytes written (and fsynced) and read
by plain system calls; before each read the file is dropped from the page cache. stall: seconds that steps waited for
copies, over 100 steps' time, at one checkpoint per 100 steps. resume: from the start of the process to the first step,
with a warm compile cache and a checkpoint, over a cold start. goodput: useful step time over wall time of a run under a
supervisor whose worker is killed once, half way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.child import ROOT, need_cxx
from bench.measure import MIN_RUNS, Say, interleave, ratio, ratio_spread, result, spread
from twinstep.spec.errors import TrainError
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.checkpoint.saver import Checkpoints

BLOCK = 8 << 20  # bytes of one system call of the plain side

SPEC: dict[str, Any] = {
    "name": "bench-checkpoint",
    "model": {"embedding_dim": 64, "transducer_dim": 64, "num_layers": 2, "hidden_dim": 64},
    "data": {
        "dataset": "synthetic", "synthetic_events": 20000, "batch_size": 32, "uih_len": 64, "num_candidates": 8,
        "rows": {"item_id": 200_000},
    },
    "train": {"eval_batches": 4, "log_every": 10},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any] = field(default_factory=lambda: SPEC)
    backends: tuple[str, ...] = ("inductor", "xla")
    mib: int = 512
    runs: int = MIN_RUNS
    steps: int = 300
    """Of the runs whose stall and start are measured."""
    every: int = 100
    """Steps between checkpoints."""
    goodput_s: float = 600.0
    """About how long the killed run trains."""


FULL = Size()


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, or a run failed.
    """
    if "inductor" in size.backends:
        need_cxx()
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-", dir=os.environ.get("TMPDIR")) as folder:
        base = Path(folder)
        body: dict[str, Any] = {"disk": _disk(size, base / "disk", say=say)}
        for backend in size.backends:
            body[backend] = _runs(size, backend, base / backend, say=say)
        body["goodput"] = _goodput(size, size.backends[0], base, say=say)
    return result("checkpoint", body, runs=size.runs)


def _disk(size: Size, folder: Path, *, say: Say) -> dict[str, Any]:
    """Save and restore a state, in turns with plain writing and reading of as many bytes."""
    folder.mkdir()
    tensors = {"parameter:table": torch.rand(size.mib * 2048, 128), "optimizer:sparse/sum/table": torch.rand(1024, 1)}
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    checkpoints = Checkpoints(folder / "place")
    plain, block = folder / "plain", memoryview(bytearray(os.urandom(BLOCK)))
    buffers = {path: torch.empty_like(tensor) for path, tensor in tensors.items()}

    def save() -> None:
        checkpoints.save(tensors, step=1, about={})
        checkpoints.finish()

    def write() -> None:
        fd = os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(total // BLOCK):
            os.write(fd, block)
        os.fsync(fd)
        os.close(fd)

    def restore() -> None:
        name = max(checkpoints.place.names())
        Reader(checkpoints.place, name).tensors(buffers)

    def read() -> None:
        fd = os.open(plain, os.O_RDONLY)
        while os.readv(fd, [block]):
            pass
        os.close(fd)

    def timed(action: Callable[[], None], *, cold: bool) -> Callable[[], float]:
        def turn() -> float:
            if cold:
                _drop_from_cache(folder)
            started = time.perf_counter()
            action()
            return time.perf_counter() - started

        return turn

    sides = {
        "write": timed(write, cold=False),
        "save": timed(save, cold=False),
        "read": timed(read, cold=True),
        "restore": timed(restore, cold=True),
    }
    samples = interleave(sides, runs=size.runs, on_round=lambda at, of: say(f"disk: round {at} of {of}"))
    checkpoints.close()
    if not all(torch.equal(buffers[path], tensor) for path, tensor in tensors.items()):
        raise TrainError("what was restored is not what was saved", remedy="report it: this is a bug")
    return {
        "mib": size.mib,
        "mib_per_s": {name: size.mib / statistics.median(values) for name, values in samples.items()},
        "save_share": ratio(samples["write"], samples["save"]),
        "restore_share": ratio(samples["read"], samples["restore"]),
        "save_share_spread": ratio_spread(samples["write"], samples["save"]),
        "restore_share_spread": ratio_spread(samples["read"], samples["restore"]),
        "seconds": {name: spread(values) for name, values in samples.items()},
    }


def _drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _spec(size: Size, backend: str, folder: Path, *, steps: int) -> dict[str, Any]:
    spec = json.loads(json.dumps(size.spec))
    spec["train"] = {**spec.get("train", {}), "steps": steps}
    spec["compile"] = {"backend": backend, "cache_dir": str(folder / "cache")}
    spec["checkpoint"] = {"path": str(folder / "place"), "every_steps": size.every}
    return dict(spec)


class _Job:
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


def _runs(size: Size, backend: str, folder: Path, *, say: Say) -> dict[str, Any]:
    """Run a job from a cold start with checkpoints, then go on from them for one more step."""
    say(f"{backend}: {size.steps} steps from a cold start")
    cold = _Job(_spec(size, backend, folder, steps=size.steps), folder / "cold")
    summary = cold.end()
    parts = summary["time_s"]
    saved = sum(each["kind"] == "event" and each["name"] == "checkpoint_saved" for each in cold.records())
    resumed = []
    for number in range(3):
        say(f"{backend}: resume {number + 1} of 3")
        job = _Job(_spec(size, backend, folder, steps=size.steps + number + 1), folder / f"resume-{number}")
        job.end()
        resumed.append(job.first_step_s())
    step_s = parts["step"] / size.steps
    return {
        "stall_share": parts["checkpoint"] / max(saved, 1) / (size.every * step_s),
        "stall_ms": 1e3 * parts["checkpoint"] / max(saved, 1),
        "step_ms": 1e3 * step_s,
        "checkpoints": saved,
        "cold_s": cold.first_step_s(),
        "resume_s": statistics.median(resumed),
        "resume_share": statistics.median(resumed) / cold.first_step_s(),
    }


def _goodput(size: Size, backend: str, base: Path, *, say: Say) -> dict[str, Any]:
    """Run a job for a while, and kill its worker half way."""
    folder = base / backend  # its compile cache is warm, as that of a job that was compiled before
    rate = [
        each["values"]["step_ms"] + each["values"]["data_wait_ms"]
        for each in map(json.loads, (folder / "cold" / "spool.jsonl").read_bytes().split(b"\n")[:-1])
        if each["kind"] == "metric" and "step_ms" in each["values"]
    ]
    steps = max(20, int(size.goodput_s * 1e3 / statistics.median(rate)))
    spec = _spec(size, backend, folder, steps=steps)
    spec["checkpoint"]["path"] = str(base / "goodput-place")
    say(f"goodput: {steps} steps, killed half way")
    job = _Job(spec, base / "goodput", restarts=1)
    while job.step() < steps // 2:
        time.sleep(0.05)
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
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return what was found, for people."""
    made = Table("what", "value", "wanted")
    disk, goodput = found["disk"], found["goodput"]
    for name in ("save", "restore"):
        speed = disk["mib_per_s"]
        plain = speed["write" if name == "save" else "read"]
        made.add_row(
            f"{name} {disk['mib']} MiB",
            f"{speed[name]:,.0f} of {plain:,.0f} MiB/s: {disk[f'{name}_share']:.0%}",
            "≥ 60%",
        )
    for backend, each in found.items():
        if isinstance(each, Mapping) and "stall_share" in each:
            made.add_row(
                f"stall, {backend}",
                f"{each['stall_ms']:.1f} ms per 100 steps of {each['step_ms']:.1f} ms: {each['stall_share']:.2%}",
                "≤ 5%",
            )
            made.add_row(
                f"resume, {backend}",
                f"{each['resume_s']:.1f} s of {each['cold_s']:.1f} s: {each['resume_share']:.0%}",
                "≤ 20%",
            )
    made.add_row("goodput, one kill", f"{goodput['share']:.1%} of {goodput['wall_s']:.0f} s", "≥ 95%")
    return made
