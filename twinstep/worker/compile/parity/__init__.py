"""Parity: eager PyTorch against what the compiler makes of the same step, tensor by tensor, after every step.

`run.py` is the door; `compare.py` and `noise.py` measure (pure), `trial.py` and `steppers.py` run, `bisect.py` names
the pass or strategy that brings a divergence, `report.py` draws.
"""

from twinstep.worker.compile.parity.result import ParityReport
from twinstep.worker.compile.parity.run import parity

__all__ = ["ParityReport", "parity"]
