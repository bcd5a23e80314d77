"""What devices cannot run is refused with the spec, before anything starts; a batch that is not given fits them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.scheduler.attempts import resized
from twinstep.spec.accelerator import CpuSpec
from twinstep.spec.devices import devices_of
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.parse import validate_spec

TPU: dict[str, Any] = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}


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
