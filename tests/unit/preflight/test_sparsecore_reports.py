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
from twinstep.preflight.model import modelled

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
    ("spec", "topology", "peak"),
    [
        pytest.param(SMALL, "v5p:2x2x1", 912.2, id="dlrm"),
        pytest.param(LARGE, "v5p:2x2x1", 7414.2, id="large-tables"),
        pytest.param(HISTORIES, "v5p:2x2x1", 348.3, id="row-wise"),
        pytest.param(HISTORIES, "v6e:2x2", 340.3, id="row-wise, v6e"),
    ],
)
def test_the_model_is_never_under_the_compilers_report_and_little_over(
    spec: dict[str, Any], topology: str, peak: float
) -> None:
    told = preflight(Case(name="t", topology=topology, spec=spec).job()).hbm / MIB
    assert 0 <= told / peak - 1 <= 0.03


REPORTS = Path(__file__).parents[3] / "bench/results/tpu"
KEPT = [case for case in tpu_slices.GRID if case.engine == "sparsecore" and (REPORTS / f"{case.name}.json").exists()]


def hbm_of(case: tpu_slices.SliceCase) -> dict[str, int]:
    found: dict[str, int] = json.loads((REPORTS / f"{case.name}.json").read_text())["hbm"]
    return found


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_the_model_is_never_under_a_kept_report_and_over_by_little(case: tpu_slices.SliceCase) -> None:
    peak, rowwise = hbm_of(case)["peak"], case.model == "dlrmv3"
    least, share = (18 * MIB, 0.04) if rowwise else (66 * MIB, 0.01)
    assert 0 <= preflight(case.job()).hbm - peak <= max(share * peak, least)


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_the_program_takes_what_the_compiler_says_and_little_more(case: tpu_slices.SliceCase) -> None:
    (program,) = (part.bytes for part in preflight(case.job()).parts if part.name == "program")
    assert 0 <= program - hbm_of(case)["code"] <= 14 * MIB


def test_the_page_prints_the_errors_of_kept_row_wise_reports() -> None:
    page = (Path(__file__).parents[3] / "docs/howto/preflight.md").read_text()
    for case in (each for each in KEPT if each.model == "dlrmv3" and each.topology != tpu_slices.LARGEST):
        told, peak = preflight(case.job()).hbm, hbm_of(case)["peak"]
        row = f"| {case.topology} | {told / MIB:,.0f} | {peak / MIB:,.0f} | {told / peak - 1:+.1%}".replace("%", " %")
        assert f"{row} |\n" in page


@pytest.mark.parametrize(("items", "copied"), [(1 << 21, False), (1 << 17, False), (1 << 14, True)])
def test_a_row_wise_rule_copies_a_table_only_where_a_step_may_name_about_all_its_rows(items: int, copied: bool) -> None:
    spec = Case(
        name="t",
        topology="v5p:2x2x1",
        spec={**HISTORIES, "data": {**HISTORIES["data"], "rows": {"item_id": items}}},
    ).job()
    held = modelled(spec).memory.state
    assert {each.copied for each in held if "item_id" in each.name and each.role == "table"} == {copied}


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
