"""Parity: eager PyTorch against what the compiler makes of the same step, tensor by tensor, after every step.

`run.py` is the door; `compare.py` and `noise.py` measure (pure), `trial.py` and `steppers.py` run, `bisect.py` names
the pass or strategy that brings a divergence, `report.py` draws.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinstep.worker.compile.parity.result import ParityReport
    from twinstep.worker.compile.parity.run import parity

__all__ = ["ParityReport", "parity"]

if not TYPE_CHECKING:
    _LATE = {"ParityReport": "result", "parity": "run"}

    def __getattr__(name: str) -> Any:  # a run's start does without them
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
