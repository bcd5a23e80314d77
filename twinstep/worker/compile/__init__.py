"""The compiler: one train step, captured whole as a graph of ATen ops, transformed, lowered, cached and run.

In the order a step takes: `state.py` prepares, `capture.py` captures, `annotate.py` says what each value is, `passes/`
transform, `partition.py` folds, `lower/` makes a program, `runner.py` runs and commits; `step_compiler.py` and `key.py`
decide when to compile again. `aot.py` compiles for a TPU that is not here, `parity/` holds it all to eager PyTorch.
Nothing here knows a model.
"""

import importlib
from typing import TYPE_CHECKING, Any

from twinstep.spec.placement import Mesh
from twinstep.worker.compile import strategies
from twinstep.worker.compile.entry import compile
from twinstep.worker.compile.events import CompileEvent, CompileWarning
from twinstep.worker.compile.key import CompileKey
from twinstep.worker.compile.runner import Runner
from twinstep.worker.compile.step_compiler import StepCompiler

if TYPE_CHECKING:
    from twinstep.worker.compile.aot import compile_ahead
    from twinstep.worker.compile.parity import ParityReport, parity

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

if not TYPE_CHECKING:
    # Names that a run's start does without. The package `parity` is there first, or importing it later would put it in
    # the place of its function.
    _LATE = {"compile_ahead": "aot", "ParityReport": "parity", "parity": "parity"}
    importlib.import_module(f"{__name__}.parity")
    del parity

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
        return found
