"""The compiler: one train step, captured whole as a graph of ATen ops, transformed, lowered, cached and run.

In the order a step takes: `state.py` prepare, `capture.py` capture, `passes.py` transform, `inductor.py` and `xla.py`
lower, `runner.py` run and commit; `key.py` decides when to compile again. Nothing here knows a model.
"""

from twinstep.worker.compile.entry import compile
from twinstep.worker.compile.events import CompileEvent, CompileWarning
from twinstep.worker.compile.key import CompileKey
from twinstep.worker.compile.parity import ParityReport, parity
from twinstep.worker.compile.runner import Runner
from twinstep.worker.compile.step_compiler import StepCompiler

__all__ = [
    "CompileEvent",
    "CompileKey",
    "CompileWarning",
    "ParityReport",
    "Runner",
    "StepCompiler",
    "compile",
    "parity",
]
