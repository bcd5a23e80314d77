"""Packages of a backend that do not load end a run as other faults do: said with what to install, and reported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from twinstep.spec.errors import CompileError
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import run as module_of_run
from twinstep.worker.train import run_spec
from twinstep.worker.train.report import NoReporter

XLA = "twinstep.worker.compile.lower.xla"


class Broken:
    """Stands where modules are found, and fails as the code of an upgraded package does."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != XLA:
            return None
        self.asked += 1
        raise self.error


@pytest.mark.parametrize("error", [
    ImportError("cannot import name 'core' from 'jax'"),
    AttributeError("module 'jax' has no attribute 'core'"),
    RuntimeError("jaxlib version 0.1 is newer than jax"),
])  # fmt: skip
def test_a_run_whose_jax_does_not_load_says_so_and_reports_its_end(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reported: list[str] = []

    class Heard(NoReporter):
        def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None:
            reported.append(name)

    monkeypatch.setattr(module_of_run, "make_reporter", lambda context: Heard())
    monkeypatch.delitem(sys.modules, XLA, raising=False)
    broken = Broken(error)
    monkeypatch.setattr(sys, "meta_path", [broken, *sys.meta_path])
    spec = {
        "name": "t",
        "model": {"embedding_dim": 8, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8},
        "data": {"dataset": "synthetic", "synthetic_events": 600, "batch_size": 8, "uih_len": 8, "num_candidates": 3},
        "compile": {"backend": "xla", "cache": False},
        "train": {"steps": 1},
    }
    with pytest.raises(CompileError, match=f"xla backend do not load: {type(error).__name__}") as caught:
        run_spec(validate_spec(spec), quiet=True)
    assert "tested versions" in caught.value.remedy
    assert broken.asked > 0
    assert reported[0] == "started"
    assert reported[-1] == "failed"
