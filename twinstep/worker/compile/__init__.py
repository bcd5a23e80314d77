"""The compiler: one train step, captured whole as a graph of ATen ops, transformed, lowered, cached and run.

In the order a step takes: `state.py` prepares, `capture.py` captures, `annotate.py` says what each value is, `passes/`
transform, `partition.py` folds, `lower/` makes a program, `runner.py` runs and commits; `step_compiler.py` and `key.py`
decide when to compile again. `aot.py` compiles for a TPU that is not here, `parity/` holds it all to eager PyTorch.
Nothing here knows a model.
"""

from twinstep.spec.placement import Mesh
from twinstep.worker.compile import strategies
from twinstep.worker.compile.aot import compile_ahead
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
    "Mesh",
    "ParityReport",
    "Runner",
    "StepCompiler",
    "compile",
    "compile_ahead",
    "parity",
    "strategies",
]
