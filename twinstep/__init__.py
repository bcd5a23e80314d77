"""Twinstep: one PyTorch training step, written once, compiled whole for GPU and for TPU, and run on Kubernetes."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# The compiler needs torch and the control plane does without it, so these names are looked up only when asked for.
_COMPILER = (
    "Mesh",
    "ParityReport",
    "Runner",
    "StepCompiler",
    "compile",
    "compile_ahead",
    "parity",
    "strategies",
)
_FROM = dict.fromkeys(_COMPILER, "twinstep.worker.compile") | {
    "Batch": "twinstep.worker.data.batch",
    "MultiHotBatch": "twinstep.worker.data.multi_hot",
    "Lookup": "twinstep.worker.embedding.collection",
    "ModuleConfig": "twinstep.worker.models.module",
}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'twinstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM])
