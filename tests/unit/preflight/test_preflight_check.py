"""What fits passes; what does not is refused with the number that broke, and with changes that were tried."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.preflight import check
from twinstep.preflight.changes import with_fields
from twinstep.preflight.check import check_fits, preflight
from twinstep.preflight.chips import FACTS, where
from twinstep.preflight.tiles import tiled_bytes
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.topology import GPUS, TPUS

ADAM: Any = {"optimizers": {"sparse": {"kind": "adam"}}}


def job(accelerator: Any = None, *, rows: int = 1000, batch: int = 1024, **more: Any) -> JobSpec:
    """A DLRMv3 of usual size."""
    model = {"embedding_dim": 64, "transducer_dim": 512, "num_layers": 3, "num_heads": 4, "linear_dim": 128,
             "attention_dim": 128, "hidden_dim": 512}  # fmt: skip
    data = {"dataset": "synthetic", "batch_size": batch, "uih_len": 512, "num_candidates": 6, "rows": {"item_id": rows}}
    accelerator = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"} if accelerator is None else accelerator
    return JobSpec.model_validate({
        "name": "preflight", "model": {**model, **more.pop("model", {})}, "data": {**data, **more.pop("data", {})},
        "accelerator": accelerator, **more,
    })  # fmt: skip


def test_a_job_that_fits_says_so_with_its_memory_by_category_and_the_least_time_of_a_step() -> None:
    found = preflight(job())
    assert found.fits
    assert found.hbm == sum(part.bytes for part in found.parts)
    assert found.limit is not None
    assert found.hbm <= found.limit
    assert found.step is not None
    roofs = (found.step.compute_s, found.step.memory_s, found.step.interconnect_s, found.step.network_s)
    assert found.step.seconds == max(roofs)
    assert not found.changes
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize(("spec", "field", "says"), [
    (job(batch=1001), "data.batch_size", "1,001 does not divide over the 4 devices of v5p:2x2x1"),
    (job(rows=2**31 - 1), "data.rows.item_id", "all 4 devices of v5p:2x2x1 together"),
    (job(rows=2**29, **ADAM), "optimizers.sparse.kind", "of each device of v5p:2x2x1, which has 91.0 GiB"),
    (job(batch=65536, rows=1000, compile={"strategies": []}), "data.batch_size", "activations|attention"),
])  # fmt: skip
def test_a_job_that_cannot_run_is_refused_with_the_number_that_broke(spec: JobSpec, field: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_fits(spec)
    fault = caught.value.faults[0]
    assert fault.field == field
    assert re.search(says, fault.problem)
    assert fault.given
    assert fault.allowed
    assert fault.remedy


@pytest.mark.parametrize("spec", [
    job(batch=1001), job(rows=2**29, **ADAM), job(batch=65536, compile={"strategies": []}),
    job({"kind": "gpu", "model": "l4", "count": 8}, rows=2**27, **ADAM),
    job({"kind": "gpu", "model": "a100", "count": 8}, batch=16384),
    job({"kind": "tpu", "generation": "v6e", "topology": "2x4", "chips_per_host": 8}, rows=2**29, **ADAM),
])  # fmt: skip
def test_every_change_that_is_offered_fits(spec: JobSpec) -> None:
    found = preflight(spec)
    assert not found.fits
    assert found.changes
    for change in found.changes:
        changed = with_fields(spec, change.fields)
        assert changed is not None
        again = preflight(changed)
        assert again.fits, change.text
        assert again.hbm == change.bytes
        assert change.text


def test_the_nearest_batch_is_the_largest_that_fits() -> None:
    spec = job(batch=65536, compile={"strategies": []})
    change = next(each for each in preflight(spec).changes if "data.batch_size" in each.fields)
    size = change.fields["data.batch_size"]
    one_more = with_fields(spec, {"data.batch_size": size + 4})
    assert one_more is not None
    assert not preflight(one_more).fits


def test_only_the_topology_is_changed_for_a_larger_slice() -> None:
    spec = job(rows=2**29, **ADAM)
    change = next(each for each in preflight(spec).changes if "accelerator" in each.fields)
    changed = with_fields(spec, change.fields)
    assert changed is not None
    assert where(changed).devices > where(spec).devices
    assert changed.model_dump(exclude={"accelerator"}) == spec.model_dump(exclude={"accelerator"})


def test_who_wants_to_be_warned_only_is_let_go() -> None:
    spec = job(rows=2**29, **ADAM, debug={"preflight": "warn"})
    check_fits(spec)
    assert not preflight(spec).fits


def test_a_host_has_no_limit_and_is_never_refused() -> None:
    spec = job("cpu", rows=2**30)
    check_fits(spec)
    found = preflight(spec)
    assert (found.fits, found.limit, found.step) == (True, None, None)


def test_few_models_are_made_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = check.modelled

    def counted(spec: JobSpec) -> Any:
        nonlocal calls
        calls += 1
        return original(spec)

    monkeypatch.setattr(check, "modelled", counted)
    assert not preflight(job(rows=2**31 - 1, batch=65536)).fits
    assert calls <= 120  # of some 0.2 ms each


shapes = st.sampled_from((
    {}, {"model": {"dropout": 0.1}}, {"compile": {"strategies": []}}, {"data": {"uih_budget": 300}},
    {"optimizers": {"sparse": {"kind": "adam"}}},
))  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 40), st.sampled_from(("2x2x1", "2x2x2", "4x4x4")), st.integers(0, 28))
def test_memory_grows_with_the_batch_and_with_tables(
    more: dict[str, Any], rows: int, topology: str, power: int
) -> None:
    accelerator = {"kind": "tpu", "generation": "v5p", "topology": topology}
    devices = where(job(accelerator)).devices

    def taken(per_device: int, table: int) -> int:
        return preflight(job(accelerator, batch=per_device * devices, rows=table, **more)).hbm

    assert taken(rows, 2**power) <= taken(rows + 1, 2**power)
    if not power < 22 <= power + 2:  # a table of 1 GiB is split, and takes less of each device
        assert taken(rows, 2**power) <= taken(rows, 2 ** (power + 2))


def test_every_accelerator_has_its_facts() -> None:
    assert set(FACTS) == {*TPUS, *GPUS}
    for name, facts in FACTS.items():
        whole = TPUS[name].hbm_bytes // TPUS[name].devices_per_chip if name in TPUS else GPUS[name].memory_bytes
        assert 0.9 * whole <= facts.memory <= 1.01 * whole, name
        assert facts.source
        assert min(facts.flops_bf16, facts.hbm_bytes_per_s, facts.ici_bytes_per_s, facts.dcn_bytes_per_s) > 0


def test_arrays_take_whole_tiles_in_the_order_that_wastes_least() -> None:
    assert tiled_bytes((8, 128)) == 4096
    assert tiled_bytes((9, 128)) == 8192
    assert tiled_bytes((1 << 20, 16)) == (1 << 20) * 16 * 4
    assert tiled_bytes((0, 5)) == 0
    assert tiled_bytes((1024,), 8) == 4096
