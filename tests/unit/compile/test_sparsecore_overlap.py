"""What a compiled schedule runs beside SparseCores: from a text, and the TPU compiler's own of a pipelined step."""

from __future__ import annotations

import importlib.util

import pytest

from twinstep.spec.parse import validate_spec
from twinstep.worker.compile.aot_report import AotReport
from twinstep.worker.compile.overlap import Overlap, overlap
from twinstep.worker.train.ahead import compile_spec

TEXT = """HloModule jit_whole, is_scheduled=true

%called (p: f32[8]) -> f32[8] {
  %inner = f32[8] fusion(%p), backend_config={"estimated_cycles":"999"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %alone = f32[8] fusion(%p), backend_config={"estimated_cycles":"10"}
  %one.call-start = ((f32[8]), f32[8]) call-start(%p), async_execution_thread="sparsecore", to_apply=%called
  %beside = f32[8] fusion(%alone), backend_config={"estimated_cycles":"30"}
  %two.call-start = ((f32[8]), f32[8]) call-start(%p), async_execution_thread="sparsecore", to_apply=%called
  %one.call-done = f32[8] call-done(%one.call-start)
  %two.call-done = f32[8] call-done(%two.call-start)
  ROOT %last = f32[8] fusion(%beside), backend_config={"estimated_cycles":"60"}
}
"""


def test_a_schedule_says_what_runs_beside_sparsecores() -> None:
    found = overlap(TEXT)
    assert found == Overlap(calls=2, beside=1, cycles=100, cycles_beside=30)
    assert (found.share_of_calls, found.share_of_cycles) == (0.5, 0.3)
    longest = overlap(TEXT, {"%called": 40.0}.__getitem__)
    assert (longest.sparse_cycles, longest.covered, longest.share_of_span) == (80, 30, 30 / 80), "a call's own length"
    assert overlap(TEXT, {"%called": 20.0}.__getitem__).share_of_span == 0.5, "no more than all of a call is covered"
    nothing = overlap(TEXT.replace("sparsecore", "other"))
    assert (nothing.calls, nothing.share_of_calls, nothing.share_of_cycles) == (0, 0.0, 0.0)


def compiled(pipeline: str) -> AotReport:
    spec = validate_spec(
        {
            "name": "t",
            "model": {"kind": "dlrm", "embedding_dim": 16, "bottom_dims": [32], "over_dims": [32], "cross_rank": 8},
            "data": {
                "dataset": "synthetic-clicks", "synthetic_events": 2000, "batch_size": 256,
                "synthetic": {"table_rows": [500, 3000, 20000], "max_ids": 4},
            },
            "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"},
            "embedding": {"engine": "sparsecore", "pipeline": pipeline, "limits": {"batches": 2}},
            "optimizers": {"sparse": {"kind": "adagrad"}},
        }
    )  # fmt: skip
    return compile_spec(spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_a_pipelined_step_works_beside_its_sparsecores_on_a_slice() -> None:
    full, off = (compiled(each).overlap for each in ("full", "off"))
    assert full is not None
    assert off is not None
    assert full.calls >= 1
    assert full.share_of_calls >= 0.9
    assert 0.9 <= full.share_of_span <= 1  # of a step so small, all is covered without a pipeline too
    assert full.share_of_cycles > off.share_of_cycles
