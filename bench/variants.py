"""The four ways to run one train step that `step.py` compares; each lives in a child process and is called from there.

torch.compile stands as its documentation has it used: the model compiled, the optimizers' step compiled, backward
between them. What it cannot do is see the three as one graph.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.subject import Subject
from twinstep.worker.data.batch import Batch
from twinstep.worker.train.environment import settle_memory

BATCHES = 8  # prepared before the clock runs, then gone through again and again: the loader is not what is measured
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Variant:
    """One variant over a model, optimizers and batches of its own.

    Args:
        variant: eager, torch_compile, inductor or xla.
        spec: the job; its backend is not looked at.
        cache_dir: where what was compiled goes; empty, so that the first step compiles.
    """

    def __init__(self, *, variant: str, spec: dict[str, Any], cache_dir: str) -> None:
        if variant == "xla":
            settle_memory()  # as a run does
        subject = Subject(spec)
        self._batches = itertools.cycle(subject.batches(BATCHES))
        self._step: Callable[[Batch], Any] = (
            torch_compile_step(subject)
            if variant == "torch_compile"
            else subject.compiler(variant, cache_dir=Path(cache_dir))
        )
        self._memory: dict[str, float] = {}

    def first(self) -> float:
        """Run the first step, which compiles; return its seconds and start to watch the memory of those that follow."""
        self._note("start", "VmRSS")
        seconds, _ = self._timed(1)
        self._note("compile", "VmHWM")
        # What compiling left behind goes back to the system, or it would stand for the steps' own memory.
        give_back()
        self._watched = reset_peak()
        return seconds

    def steps(self, count: int) -> dict[str, float]:
        """Run `count` steps; return the seconds of one and the last loss."""
        seconds, loss = self._timed(count)
        return {"seconds": seconds / count, "loss": loss}

    def memory(self) -> dict[str, float]:
        """Return resident memory in MiB: at `start`, the peak until `compile` was done, the peak of the `steps`."""
        if self._watched:
            self._note("steps", "VmHWM")
        return self._memory

    def _timed(self, count: int) -> tuple[float, float]:
        batches = list(itertools.islice(self._batches, count))
        started = time.perf_counter()
        for batch in batches:
            loss = float(self._step(batch).loss.detach())  # waits for the step, as the loop of a job does
        return time.perf_counter() - started, loss

    def _note(self, name: str, field: str) -> None:
        kib = status(field)
        if kib is not None:
            self._memory[name] = kib / 1024


def torch_compile_step(subject: Subject) -> Callable[[Batch], Any]:
    """Return the step with torch.compile's model and torch.compile's optimizer step."""
    model, optimizers = torch.compile(subject.model), subject.optimizers

    @torch.compile
    def update() -> None:
        for optimizer in optimizers.values():
            optimizer.step()

    def step(batch: Batch) -> Any:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        output = model(batch)
        output.loss.backward()
        update()
        return output

    return step


def give_back() -> None:
    """Give what is free in this process back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status(field: str) -> int | None:
    """Return a field of this process's status in KiB; None where the system has none."""
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return None


def reset_peak() -> bool:
    """Let the peak of resident memory start anew; say whether the system does that."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
