"""DLRM from its spec to held-out scores, through the worker as DLRMv3 goes; and its step on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from twinstep.spec.job import JobSpec
from twinstep.spec.parse import parse_spec
from twinstep.worker.train import run_spec
from twinstep.worker.train.parity import parity_spec

EXAMPLE = Path(__file__).parents[3] / "examples" / "dlrm.yaml"
SMALL = {"synthetic_events": 2000, "batch_size": 32}


def example(**changes: object) -> JobSpec:
    spec = parse_spec(EXAMPLE.read_text())
    return spec.model_copy(update={name: getattr(spec, name).model_copy(update=each) for name, each in changes.items()})


def test_the_example_learns_to_rank_held_out_clicks() -> None:
    summary = run_spec(example(compile={"cache": False}), console=None)
    assert summary is not None
    assert summary.auc is not None
    assert summary.auc > 0.7
    assert summary.eval_examples == 4000
    assert summary.baselines == {}


@pytest.mark.parametrize("backend", ["xla", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])])
def test_the_step_of_a_spec_holds_parity(backend: Literal["inductor", "xla"]) -> None:
    report = parity_spec(example(data=SMALL), backends=[backend], steps=3, gradients=False)
    assert report.ok, report.summary()
