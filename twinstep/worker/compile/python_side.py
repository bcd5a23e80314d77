"""What a step does on Python's side happens once, while it is traced, and never again.

Refused are changes of a module's attributes, numbers from Python's and NumPy's generators, and reads of the clock. What
a step reads of globals, closures and modules is part of the key (`code.py`): a new value compiles again. What else
Python may read at each step (files, the environment) cannot be seen, and stays as it was at the first.
"""

from __future__ import annotations

import contextlib
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from twinstep.spec.errors import CaptureError
from twinstep.worker.compile.key import module_settings

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


@contextlib.contextmanager
def python_as_it_was(model: nn.Module) -> Iterator[None]:
    """Refuse a step that changes what Python holds, or reads what will be another at the next step.

    Raises:
        CaptureError: what it changed or read, and what to do.
    """
    settings, numbers = dict(module_settings(model)), _generators()
    with _clocks_watched() as read:
        yield
    for name, now in module_settings(model):
        if settings.get(name) != now:
            raise CaptureError(
                f"the step changes the module's attribute {name} from {settings.get(name, 'none')} to {now}",
                remedy="make it a buffer (register_buffer), or change it outside the step",
            )
    if _generators() != numbers:
        raise CaptureError(
            "the step draws numbers from Python's or NumPy's generator, which would be the same at every step",
            remedy="draw with torch (torch.rand, torch.bernoulli), or put the numbers into the batch",
        )
    if read:
        raise CaptureError(
            f"the step reads the clock, which would stand still: {read[0]}",
            remedy="put the time into the batch, or measure outside the step",
        )


@contextlib.contextmanager
def _clocks_watched() -> Iterator[list[str]]:
    """Note each read of a clock by code that is neither torch's, ours, nor the standard library's."""
    read: list[str] = []
    thread = threading.get_ident()
    clocks = {name: getattr(time, name) for name in _CLOCKS}

    def watched(name: str) -> Any:
        def clock() -> Any:
            frame = sys._getframe(1)
            if threading.get_ident() == thread and not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
                read.append(f"time.{name}() at {frame.f_code.co_filename}:{frame.f_lineno}")
            return clocks[name]()

        return clock

    for name in clocks:
        setattr(time, name, watched(name))
    try:
        yield read
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)


def _generators() -> tuple[Any, ...]:
    """Return where Python's and NumPy's global generators stand."""
    numpys: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    return random.getstate(), numpys[1].tobytes(), numpys[2]
