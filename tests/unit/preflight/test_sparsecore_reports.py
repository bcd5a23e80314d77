"""The memory of SparseCore specs against what the TPU compiler said of them: never too low, and too high by a bound.

The reports are libtpu 0.0.42.1's, of the whole step; `scripts/bench preflight` asks it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import tpu_slices
from bench.preflight import Case, dlrm
from twinstep.preflight.check import preflight

MIB = 1 << 20
ADAGRAD = {"dense": {"kind": "adam"}, "sparse": {"kind": "adagrad"}}
SPARSECORE = {"engine": "sparsecore"}
SMALL = dlrm(rows=4_000_000, batch=8192, embedding=SPARSECORE, optimizers=ADAGRAD)
SMALL["model"] |= {"bottom_dims": [128], "over_dims": [128]}
LARGE = dlrm(rows=40_000_000, batch=2048, embedding=SPARSECORE, optimizers=ADAGRAD)
HISTORIES: dict[str, Any] = {
    "name": "histories",
    "model": {"embedding_dim": 64, "transducer_dim": 256, "num_layers": 2, "num_heads": 2, "linear_dim": 128,
              "attention_dim": 128, "hidden_dim": 256, "dropout": 0.0},
    "data": {"dataset": "synthetic", "batch_size": 256, "uih_len": 128, "num_candidates": 6,
             "rows": {"item_id": 1 << 21}},
    "embedding": SPARSECORE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "peak"),
    [
        pytest.param(SMALL, 912.2, id="dlrm"),
        pytest.param(LARGE, 7414.2, id="large-tables"),
        pytest.param(HISTORIES, 1093.2, id="row-wise"),
    ],
)
def test_the_model_is_never_under_the_compilers_report_and_little_over(spec: dict[str, Any], peak: float) -> None:
    told = preflight(Case(name="t", topology="v5p:2x2x1", spec=spec).job()).hbm / MIB
    assert 0 <= told / peak - 1 <= 0.15


REPORTS = Path(__file__).parents[3] / "bench/results/tpu"
KEPT = [case for case in tpu_slices.GRID if case.engine == "sparsecore" and (REPORTS / f"{case.name}.json").exists()]


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_the_model_is_never_under_a_kept_report_and_over_by_what_a_program_may_be(case: tpu_slices.SliceCase) -> None:
    peak = json.loads((REPORTS / f"{case.name}.json").read_text())["hbm"]["peak"]
    # A row-wise rule's copies of tables share room with what the step's own passes need; the model adds both up.
    rowwise = case.model == "dlrmv3"
    assert 0 <= preflight(case.job()).hbm - peak <= (max(1.2 * peak, 100 * MIB) if rowwise else 100 * MIB)


def test_a_bag_is_one_sample_to_a_sparse_core() -> None:
    """Its ids are summed there: neither activations nor what a step keeps grow with how many there are."""

    def parts(most: int) -> dict[str, int]:
        spec = {**SMALL, "data": {**SMALL["data"], "synthetic": {"max_ids": most}}}
        found = preflight(Case(name="t", topology="v5p:2x2x1", spec=spec).job())
        return {part.name: part.bytes for part in found.parts}

    one, many = parts(1), parts(16)
    assert many["SparseCore buffers"] > one["SparseCore buffers"]
    for name in ("SparseCore activations", "activations"):
        assert many[name] == one[name]
