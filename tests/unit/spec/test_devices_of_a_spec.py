"""What devices cannot run is refused with the spec, before anything starts; a batch that is not given fits them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.scheduler.attempts import resized
from twinstep.preflight.changes import changes_for, with_fields
from twinstep.spec.accelerator import CpuSpec, GpuSpec, TpuSpec
from twinstep.spec.devices import devices_of, shares_of
from twinstep.spec.embedding import EmbeddingSpec
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import CompileSpec, JobSpec
from twinstep.spec.optimizers import OptimizersSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.train.tables import cores_of_slice

TPU: dict[str, Any] = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
SPARSECORE = {"engine": "sparsecore"}


def refused(spec: dict[str, Any]) -> Fault:
    with pytest.raises(SpecError) as caught:
        validate_spec({"name": "a", **spec})
    (fault,) = caught.value.faults
    return fault


@pytest.mark.parametrize(("spec", "field", "remedy"), [
    ({"accelerator": {"kind": "cpu", "devices": 2}, "compile": {"backend": "eager"}}, "compile.backend",
     "backend: xla"),
    ({"accelerator": {"kind": "cpu", "devices": 2}}, "compile.backend", "backend: xla"),
    ({"accelerator": {"kind": "cpu", "devices": 3}, "compile": {"backend": "xla"}, "data": {"batch_size": 8}},
     "data.batch_size", "batch_size: 9"),
    ({"accelerator": TPU, "data": {"batch_size": 1023}}, "data.batch_size", "batch_size: 1024"),
    ({"accelerator": TPU, "data": {"batch_size": 1}}, "data.batch_size", "batch_size: 4"),
    ({"accelerator": {**TPU, "topology": "4x4x4"}, "data": {"batch_size": 65535}}, "data.batch_size",
     "batch_size: 65536"),
    ({"accelerator": {**TPU, "topology": "4x4x4", "slices": 1024}, "debug": {"preflight": "warn"},
      "data": {"batch_size": 65535}}, "data.batch_size", "batch_size: 65536"),
    ({"accelerator": {**TPU, "topology": "16x16x24", "slices": 1024}}, "accelerator.slices", "slices: 10"),
    ({"accelerator": {**TPU, "topology": "16x16x24", "slices": 10}, "embedding": SPARSECORE}, "accelerator.slices",
     "slices: 2"),
    ({"accelerator": {**TPU, "topology": "4x4x4"}, "embedding": SPARSECORE, "data": {"batch_size": 64}},
     "data.batch_size", "batch_size: 256"),
    ({"accelerator": {"kind": "tpu", "generation": "v7x", "topology": "2x2x1"}, "embedding": SPARSECORE,
      "data": {"batch_size": 1001}}, "data.batch_size", "batch_size: 1008"),
])  # fmt: skip
def test_what_its_devices_cannot_run_is_no_spec(spec: dict[str, Any], field: str, remedy: str) -> None:
    fault = refused(spec)
    assert (fault.field, fault.remedy) == (field, remedy)
    assert fault.given
    assert fault.allowed


@given(devices=st.integers(1, 64), size=st.integers(1, 65536))
def test_devices_take_a_batch_that_they_divide_and_the_offered_one_where_they_do_not(devices: int, size: int) -> None:
    spec = {"name": "a", "accelerator": {"kind": "cpu", "devices": devices}, "compile": {"backend": "xla"}}
    if size % devices == 0:
        assert validate_spec({**spec, "data": {"batch_size": size}}).data.batch_size == size
        return
    offered = int(refused({**spec, "data": {"batch_size": size}}).remedy.removeprefix("batch_size: "))
    assert validate_spec({**spec, "data": {"batch_size": offered}}).data.batch_size == offered
    assert abs(offered - size) < devices


@pytest.mark.parametrize(("accelerator", "batch"), [
    ("cpu", 32), ({"kind": "cpu", "devices": 3}, 33), (TPU, 32), ({**TPU, "topology": "4x4x12"}, 192),
    ({"kind": "gpu", "model": "h100", "count": 64}, 32),
])  # fmt: skip
def test_a_batch_that_is_not_given_is_one_that_the_devices_divide(accelerator: Any, batch: int) -> None:
    kind = "xla" if accelerator != "cpu" and accelerator["kind"] == "cpu" else None
    spec = validate_spec({"name": "a", "accelerator": accelerator, **({"compile": {"backend": kind}} if kind else {})})
    assert spec.data.batch_size == batch


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5p:4x4x4", "v5p:4x4x12", "v6e:2x2", "v6e:8x16", "v7x:2x2x1"])
def test_sparsecores_have_as_many_samples_each(topology: str) -> None:
    generation, _, shape = topology.partition(":")
    asked = {"name": "a", "accelerator": {**TPU, "generation": generation, "topology": shape}, "embedding": SPARSECORE}
    cores = cores_of_slice(topology).count
    size = validate_spec(asked).data.batch_size
    assert size % cores == 0
    assert size - cores < 32 <= size
    fault = refused({**asked, "data": {"batch_size": size + cores // 2}})
    assert (fault.field, fault.remedy) == ("data.batch_size", f"batch_size: {size + cores}")
    assert f"{cores} SparseCores of {topology}" in fault.problem


def test_an_engine_or_a_batch_that_would_make_a_job_fit_is_offered_where_the_sparsecores_divide_it() -> None:
    tables = {"dataset": "synthetic", "rows": {"item_id": 2**31 - 1}}
    spec = {"name": "a", "accelerator": {**TPU, "topology": "4x4x4"}, "model": {"embedding_dim": 8}}
    for engine, size in (("dense", 64), ("ring", 64), ("sparsecore", 65536)):
        job = validate_spec({**spec, "data": {**tables, "batch_size": size}, "embedding": {"engine": engine}})
        for change in changes_for(job, lambda changed: changed.data.batch_size):
            changed = with_fields(job, change.fields)
            assert changed is not None
            assert changed.data.batch_size % shares_of(changed.accelerator, changed.embedding.engine) == 0
            assert change.fields != {"embedding.engine": "sparsecore"}
    sizes = [change.fields.get("data.batch_size") for change in changes_for(job, fits_few)]
    assert 1024 in sizes, "multiples of 256, of which the largest that fits"


def fits_few(spec: JobSpec) -> int | None:
    return 1 if spec.data.batch_size <= 1279 else None


@pytest.mark.parametrize(("accelerator", "more"), [
    (CpuSpec(devices=3), {"compile": CompileSpec(backend="xla")}),
    (TpuSpec(**{**TPU, "topology": "4x4x12"}), {}),
    (TpuSpec(**{**TPU, "topology": "4x4x4"}), {"embedding": EmbeddingSpec(engine="sparsecore")}),
    (TpuSpec(**TPU), {"optimizers": OptimizersSpec.model_validate({"sparse": {"kind": "adam"}})}),
    (TpuSpec(**TPU), {"compile": CompileSpec(backend="xla", strategies=())}),
    (GpuSpec(kind="gpu", model="h100", count=64), {"embedding": EmbeddingSpec(engine="torchrec")}),
])  # fmt: skip
def test_a_spec_of_specs_is_that_of_their_fields(accelerator: Any, more: dict[str, Any]) -> None:
    plain = {name: each.model_dump(mode="json") for name, each in {"accelerator": accelerator, **more}.items()}
    assert JobSpec(name="a", accelerator=accelerator, **more) == validate_spec({"name": "a", **plain})


def test_a_job_is_not_resized_to_devices_that_cannot_run_it() -> None:
    eager = validate_spec({"name": "a", "compile": {"backend": "eager"}}).model_dump(mode="json")
    with pytest.raises(SpecError) as caught:
        resized(eager, {"devices": 2})
    assert [each.field for each in caught.value.faults] == ["compile.backend"]
    spread = validate_spec({"name": "a", "compile": {"backend": "xla"}}).model_dump(mode="json")
    assert resized(spread, {"devices": 2}).accelerator == CpuSpec(devices=2)
    with pytest.raises(SpecError) as caught:
        resized(spread, {"devices": 3})
    assert [each.field for each in caught.value.faults] == ["data.batch_size"]
    assert devices_of(resized(spread, {"devices": 3, "batch_size": 30}).accelerator) == 3
