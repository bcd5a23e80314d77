"""`checkpoint`: what saving costs a run, how fast the disk is used, and how soon a killed run is back.

disk: a state of so many MiB saved and restored, in turns with one file of as many bytes written (and fsynced) and read
by plain system calls; before each read the file is dropped from the page cache. stall: seconds that steps waited for
copies, over 100 steps' time, at one checkpoint per 100 steps. resume: from the start of the process to the first step,
with a warm compile cache and a checkpoint, over a cold start.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.child import need_cxx
from bench.jobs import SPEC, Job, job_spec
from bench.measure import MIN_RUNS, Say, interleave, ratio, ratio_spread, result, spread
from twinstep.spec.errors import TrainError
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.checkpoint.saver import Checkpoints

BLOCK = 8 << 20  # bytes of one system call of the plain side


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


def _runs(size: Size, backend: str, folder: Path, *, say: Say) -> dict[str, Any]:
    """Run a job from a cold start with checkpoints, then go on from them for one more step."""
    say(f"{backend}: {size.steps} steps from a cold start")
    cold = Job(job_spec(size.spec, backend, folder, steps=size.steps, every=size.every), folder / "cold")
    summary = cold.end()
    parts = summary["time_s"]
    saved = sum(each["kind"] == "event" and each["name"] == "checkpoint_saved" for each in cold.records())
    resumed = []
    for number in range(3):
        say(f"{backend}: resume {number + 1} of 3")
        more = job_spec(size.spec, backend, folder, steps=size.steps + number + 1, every=size.every)
        job = Job(more, folder / f"resume-{number}")
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


def table(found: Mapping[str, Any]) -> Table:
    """Return what was found, for people."""
    made = Table("what", "value", "wanted")
    disk = found["disk"]
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
    return made
