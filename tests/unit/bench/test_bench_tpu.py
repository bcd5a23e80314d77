"""What `scripts/bench tpu` compares, and what its result holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import tpu, tpu_slices
from bench.measure import as_line
from twinstep.preflight.check import preflight
from twinstep.spec.errors import CompileError, NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile.aot_report import AotReport, HbmBytes, Traffic
from twinstep.worker.compile.hlo import Collective
from twinstep.worker.train.tables import cores_of_slice


def report(topology: str, seconds: float, moved: float) -> AotReport:
    return AotReport(
        topology=topology,
        devices=parse_slice(topology).devices,
        effort="full",
        key="0" * 16,
        hbm=HbmBytes(arguments=100, outputs=90, alias=80, temp=30, code=7),
        state_bytes=75,
        sharded=(),
        flops=1e9,
        bytes_accessed=moved,
        traffic=(Traffic(kind="products", bytes=int(moved), hbm_bytes=int(moved / 3)),),
        optimal_seconds=None,
        unestimated=0,
        collectives=(Collective(kind="all-reduce", count=3, bytes=4096),),
        nodes=100,
        capture_seconds=1.0,
        lower_seconds=1.0,
        compile_seconds=seconds,
        versions=(),
        passes=(),
    )


def test_the_full_size_step_is_compiled_naively_and_by_us_and_both_ratios_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def compile_spec(spec: JobSpec, *, topology: str, strategies: Any = None, effort: str) -> AotReport:
        if spec.name == "bench-slices" and topology == tpu_slices.LARGEST:
            raise CompileError("too large", remedy="none")
        asked.append((topology, strategies, effort, getattr(spec.model, "num_layers", 0), spec.data.batch_size))
        return report(topology, 100.0, 9e9) if strategies == () else report(topology, 25.0, 3e9)

    monkeypatch.setattr(tpu, "compile_spec", compile_spec)
    found = tpu.run(say=lambda text: None, reports=tmp_path)
    full = [("v5p:4x4x8", asks, "full", 5, 1024) for asks in ((), None)]
    quick = [(topology, asks, "quick", *size) for topology, asks, _, *size in full]
    assert asked[:4] == [*full, *quick]
    assert found["ratios"] == {
        "compile_s": 4.0,
        "bytes_accessed": 3.0,
        "compile_s_quick": 4.0,
        "bytes_accessed_quick": 3.0,
        "hbm_traffic": 3.0,
        "hbm_traffic_quick": 3.0,
    }
    assert {
        "topology", "model", "engine", "compiled", "compile_s", "hbm_bytes", "optimal_seconds", "bytes_accessed",
        "collectives",
    } <= set(found["slices"][0])  # fmt: skip
    assert {each["topology"].partition(":")[0] for each in found["slices"]} >= {"v5p", "v6e", "v7x"}
    json.loads(as_line(found))
    assert tpu.table(found).row_count == len(found["slices"]) + len(found["grid"])
    compiled = [each for each in found["grid"] if each["compiled"]]
    assert 0 < len(compiled) < len(found["grid"]), "what the compiler refuses is said, and the others go on"
    assert {f"{each['name']}.json" for each in compiled} == {each.name for each in tmp_path.iterdir()}
    kept = json.loads((tmp_path / f"{compiled[0]['name']}.json").read_text())
    assert kept["hbm"]["peak"] == compiled[0]["hbm_bytes"]


def test_parts_of_the_grid_are_compiled_alone_and_take_their_places_in_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused: list[str] = []

    def compile_spec(spec: JobSpec, *, topology: str, effort: str) -> AotReport:
        if topology in refused:
            raise CompileError("too large", remedy="none")
        return report(topology, 25.0, 3e9)

    monkeypatch.setattr(tpu, "compile_spec", compile_spec)
    place, reports = tmp_path / "tpu.json", tmp_path / "tpu"
    place.write_text(json.dumps({"slices": [], "grid": [], "ratios": {"compile_s": 2.0}}))

    def compiled(only: str) -> dict[str, bool]:
        found = tpu.run(say=lambda text: None, reports=reports, only=only)
        assert found == json.loads(place.read_text())
        assert found["ratios"] == {"compile_s": 2.0}
        names = {each["name"]: each["compiled"] for each in found["grid"]}
        assert {f"{name}.json" for name, done in names.items() if done} == {each.name for each in reports.iterdir()}
        return names

    rings = [case.name for case in tpu_slices.GRID if case.engine == "ring" and case.topology.startswith("v5p")]
    assert list(compiled("v5p-*-ring")) == rings
    more = compiled("v6e-2x2-*")
    assert len(more) == len(rings) + 3
    assert list(more) == [case.name for case in tpu_slices.GRID if case.name in more]
    refused.append("v5p:2x2x1")
    assert compiled(rings[0]) == {**more, rings[0]: False}, "what is refused now leaves no report of before"
    with pytest.raises(NotFoundError, match="no step's name matches 'v9'"):
        tpu.run(say=lambda text: None, reports=reports, only="v9")


def test_the_kept_result_has_the_steps_whose_reports_are_kept() -> None:
    kept = json.loads(tpu.REPORTS.with_name("tpu.json").read_text())["grid"]
    names = {each["name"]: each["hbm_bytes"] for each in kept if each["compiled"]}
    reports = {each.stem: json.loads(each.read_text())["hbm"]["peak"] for each in tpu.REPORTS.iterdir()}
    assert names == reports


def test_the_grid_has_each_engine_on_each_slice_from_one_spec_that_the_model_lets_pass() -> None:
    asked = {(case.topology, case.model, case.engine) for case in tpu_slices.GRID}
    for topology in (*tpu_slices.SLICES, tpu_slices.LARGEST):
        for kind in (("dlrmv3", "ring"), ("dlrmv3", "sparsecore"), ("dlrm-26", "sparsecore")):
            assert (topology, *kind) in asked
    names = [case.name for case in tpu_slices.GRID]
    assert len(set(names)) == len(names)
    first, *others = (case.job() for case in tpu_slices.GRID if (case.model, case.engine) == ("dlrm-26", "sparsecore"))
    for case, spec in zip(tpu_slices.GRID, (case.job() for case in tpu_slices.GRID), strict=True):
        assert spec.data.batch_size % parse_slice(case.topology).devices == 0
        assert case.engine == "ring" or spec.data.batch_size % cores_of_slice(case.topology).count == 0
        assert preflight(spec).fits
    same = [each for each in others if each.data.batch_size == first.data.batch_size]
    assert len(same) == len(tpu_slices.SLICES) - 1
    assert len({each.model_copy(update={"accelerator": first.accelerator}).model_dump_json() for each in same}) == 1


def test_each_case_is_a_valid_job_for_a_slice_that_its_batch_divides_over() -> None:
    for case in tpu.FULL.cases:
        spec = JobSpec.model_validate(case.spec)
        assert spec.data.batch_size % parse_slice(case.topology).devices == 0
