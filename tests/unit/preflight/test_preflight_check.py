"""What fits passes; what does not is refused with the number that broke, and with changes that were tried."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.preflight import changes, check
from twinstep.preflight.changes import Budget, SpentError, changes_for, with_fields
from twinstep.preflight.check import check_fits, preflight
from twinstep.preflight.chips import FACTS, where
from twinstep.preflight.engines import SMALL_BYTES
from twinstep.preflight.report import StepTime
from twinstep.preflight.roofline import seen_pairs
from twinstep.preflight.shapes import data_shape, rows_field
from twinstep.preflight.tiles import tiled_bytes
from twinstep.preflight.tokens import batch_ids, work_of
from twinstep.preflight.words import as_text
from twinstep.spec.base import MAX_TABLES
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.model import DLRMv3Spec
from twinstep.spec.topology import GPUS, TPUS
from twinstep.worker.embedding.hybrid import plan

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
    job(rows=2**29, **ADAM), job(batch=65536, compile={"strategies": []}),
    job({"kind": "gpu", "model": "h100", "count": 8}),
    job({"kind": "gpu", "model": "l4", "count": 8}, rows=2**27, **ADAM),
    job({"kind": "gpu", "model": "h100", "count": 8}, optimizers={"sparse": {"kind": "adamw"}}),
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


H100 = {"kind": "gpu", "model": "h100", "count": 8}


@pytest.mark.parametrize("engine", ["dense", "torchrec"])
@pytest.mark.parametrize("count", [1, 8])
def test_gpus_are_for_the_engine_that_a_worker_runs_on_them(engine: str, count: int) -> None:
    spec = job(H100 | {"count": count}, embedding={"engine": engine})
    found = preflight(spec)
    assert found.fits == (engine == "torchrec")
    if engine == "torchrec":
        check_fits(spec)
        return
    with pytest.raises(SpecError) as caught:
        check_fits(spec)
    assert [each.field for each in caught.value.faults] == ["embedding.engine"]
    assert "embedding.engine: torchrec" in caught.value.faults[0].remedy


@pytest.mark.parametrize("spec", [
    job(H100, rows=2**31 - 1, embedding={"engine": "torchrec"}),
    job({"kind": "gpu", "model": "a100", "count": 8}, batch=16384, embedding={"engine": "torchrec"}),
    job(rows=2**29, embedding={"engine": "sparsecore"}, **ADAM),
])  # fmt: skip
def test_what_was_held_to_no_measurement_is_warned_of_and_not_refused(spec: JobSpec) -> None:
    check_fits(spec)
    found = preflight(spec)
    assert found.fits
    assert found.warnings
    assert f"may not fit: {found.warnings[0].problem}" in as_text(found)
    for change in found.changes:
        changed = with_fields(spec, change.fields)
        assert changed is not None
        assert not preflight(changed).warnings


def ringed(*, rows: int = 1000, share: float = 1.0) -> JobSpec:
    """A ring whose step takes about `share` of what a device has, most of it values."""
    limit = preflight(job()).limit
    assert limit is not None
    sizes = range(4, 65537, 64)
    plain = {"compile": {"strategies": ["sparse_embedding"]}, "embedding": {"engine": "ring"}}
    size = sizes[bisect_left(sizes, share * limit, key=lambda size: preflight(job(batch=size, **plain)).hbm)]
    return job(rows=rows, batch=size, **plain)


@pytest.mark.parametrize(("share", "refused"), [(0.9, False), (1.1, False), (1.4, False), (1.6, True)])
def test_a_ring_is_refused_where_more_than_the_models_error_is_missing(share: float, refused: bool) -> None:
    spec = ringed(share=share)
    found = preflight(spec)
    assert found.fits is not refused
    assert bool(found.warnings) == (1 < share < 1.5)
    if refused:
        with pytest.raises(SpecError):
            check_fits(spec)
    else:
        assert check_fits(spec) == found.warnings
    assert bool(found.changes) == (share > 1)


def test_tables_that_no_ring_holds_are_refused() -> None:
    spec = job(rows=770_000_000, embedding={"engine": "ring"}, model={"embedding_dim": 128})
    found = preflight(spec)
    assert found.limit is not None
    assert found.limit < found.hbm < 1.5 * found.limit
    assert not found.fits


def test_hosts_that_keep_whole_tables_for_every_process_are_warned_of() -> None:
    found = preflight(job(H100 | {"count": 128}, rows=2**30, embedding={"engine": "torchrec"}))
    assert found.fits
    assert ["processes of a host" in each.problem for each in found.warnings] == [True]
    assert not preflight(job(H100, rows=2**24, embedding={"engine": "torchrec"})).warnings


def test_divided_tables_take_a_share_and_no_gradient_of_their_size() -> None:
    def parts(rows: int, engine: str) -> dict[str, int]:
        looked = preflight(job(H100, rows=rows, embedding={"engine": engine}, **ADAM))
        return {part.name: part.bytes for part in looked.parts}

    small, large = parts(2**17, "torchrec"), parts(2**27, "torchrec")
    assert small["tables"] < 2**17 * 64 * 4 / 4
    assert large["gradients"] - small["gradients"] < 2**28
    assert parts(2**27, "dense")["gradients"] > 2**31
    assert SMALL_BYTES == plan.SMALL_BYTES


def test_a_budget_of_values_is_counted_and_is_the_first_change_where_values_break_it() -> None:
    spec = job(batch=16384, compile={"strategies": []})
    change = preflight(spec).changes[0]
    budget = change.fields["compile.memory_budget_mib"]
    kept = with_fields(spec, change.fields)
    assert kept is not None
    within = {part.name: part.bytes for part in preflight(kept).parts}
    assert within["activations"] + within["attention"] <= budget << 20
    more = with_fields(spec, {"compile.memory_budget_mib": budget + 1})
    assert more is not None
    assert not preflight(more).fits


def most_tables(engine: str) -> JobSpec:
    """As many tables as a spec can have, of which none fits."""
    half = range(MAX_TABLES // 2)
    columns = {f"{kind}_features": [f"{kind}{index}" for index in half] for kind in ("user", "item")}
    rows = {f"user{index}": 2**31 - 1 - index for index in half} | {f"item{index}": 2**30 - index for index in half}
    data = {"dataset": "parquet", "path": "/d", "columns": columns, "rows": rows}
    return job(batch=65536, data=data, embedding={"engine": engine})


@pytest.mark.parametrize("spec", [job(rows=2**31 - 1, batch=65536), *map(most_tables, ("dense", "ring"))])
def test_few_models_are_made_for_a_refusal(monkeypatch: pytest.MonkeyPatch, spec: JobSpec) -> None:
    calls, now = 0, 0.0
    original = check.modelled

    def counted(spec: JobSpec) -> Any:
        nonlocal calls, now
        calls, now = calls + 1, now + 0.0101
        return original(spec)

    monkeypatch.setattr(check, "modelled", counted)
    monkeypatch.setattr(changes, "thread_time", lambda: now)
    found = preflight(spec, seconds=0.04)
    assert not found.fits
    assert len(found.problems) <= check.MAX_TOLD
    assert calls == 1 + 4
    with pytest.raises(SpecError):
        check_fits(spec)
    assert calls == 2 * 5
    preflight(spec)
    assert calls <= 2 * 5 + 1 + check.MAX_TRIED


def test_what_was_found_before_time_ran_out_is_offered() -> None:
    spec = job(batch=65536, compile={"strategies": []})
    budget = Budget(check.tried, calls=12)
    few, every = changes_for(spec, budget), preflight(spec).changes
    assert 0 < len(few) <= len(every)
    with pytest.raises(SpentError):
        budget(spec)


def test_every_category_names_the_field_that_decides_it() -> None:
    engines: tuple[Any, ...] = (job(), *(job(embedding={"engine": each}) for each in ("ring", "sparsecore")),
                                job(H100, embedding={"engine": "torchrec"}))  # fmt: skip
    assert {part.name for spec in engines for part in preflight(spec).parts} == set(check.FIELDS)
    for path in check.FIELDS.values():
        part: Any = JobSpec.model_validate({"name": "a"})
        for name in path.split("."):
            part = getattr(part, name)


@pytest.mark.parametrize(("data", "table", "field"), [
    ({"rows": {"item_id": 2**20}}, "item_id", "rows.item_id"),
    ({"rows": {"item_id": 1}}, "item_id", "synthetic.items"),
    ({"rows": {}, "synthetic": {"items": 2**20}}, "item_id", "synthetic.items"),
    ({"synthetic": {"item_features": {"brand": 2**20}}}, "brand", "synthetic.item_features.brand"),
    ({"dataset": "parquet", "path": "/d", "rows": {}, "hash_rows": {"item_id": 2**20}}, "item_id", "hash_rows.item_id"),
    ({"dataset": "parquet", "path": "/d", "rows": {"item_id": 5}, "hash_rows": {"item_id": 9}}, "item_id",
     "hash_rows.item_id"),
])  # fmt: skip
def test_rows_are_those_of_the_field_that_says_them(data: dict[str, Any], table: str, field: str) -> None:
    assert rows_field(job(data=data).data, table) == f"data.{field}"


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


@pytest.mark.parametrize(("name", "links", "gb"), [
    ("v4", 6, 50), ("v5e", 4, 50), ("v5p", 6, 100), ("v6e", 4, 100), ("v7x", 6, 100), ("h100", 18, 25),
    ("b200", 18, 50),
])  # fmt: skip
def test_the_interconnect_is_all_links_in_one_direction(name: str, links: int, gb: int) -> None:
    per_chip = TPUS[name].devices_per_chip if name in TPUS else 1
    assert FACTS[name].ici_bytes_per_s * per_chip == links * gb * 1e9


def step(spec: JobSpec) -> StepTime:
    found = preflight(spec).step
    assert found is not None
    return found


@pytest.mark.parametrize("more", [
    {"data": {"uih_budget": 64}}, {"model": {"max_attn_len": 32}}, {"data": {"uih_budget": 64, "num_candidates": 100}},
])  # fmt: skip
def test_attention_counts_no_more_pairs_than_rows_of_average_length_have(more: dict[str, Any]) -> None:
    """Held to a count over rows of all the same length, which have the fewest."""
    spec = job(**more)
    model, data, shape = spec.model, spec.data, data_shape(spec.data)
    assert isinstance(model, DLRMv3Spec)
    history = (data.uih_budget or data.uih_len) + len(shape.contextual)
    window = model.max_attn_len or history
    pairs = sum(min(at + 1, window + 1) for at in range(history)) + data.num_candidates * (min(history, window) + 1)
    counted = seen_pairs(model, work_of(spec, shape, where(spec)))
    assert 0.75 * pairs <= counted <= pairs


def test_an_optimizer_that_changes_every_row_moves_whole_tables() -> None:
    rows, slots = 2**22, 2
    adam, quiet = (
        step(job(rows=rows, model={"embedding_dim": 128}, optimizers={"sparse": {"kind": kind}})).hbm_bytes
        for kind in ("adam", "adagrad")
    )
    share = rows * 128 * 4 / 4  # of four devices
    assert adam - quiet == pytest.approx(share * (3 + 2 * slots), rel=0.05)


def test_gradients_of_a_whole_table_are_sent_to_all_others_once() -> None:
    """Each device sends its part of the gradients' rows to every other one; the rest of the step is alike."""
    sgd: Any = {"optimizers": {"sparse": {"kind": "sgd"}}, "embedding": {"engine": "dense"}}
    few, more = (job({"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}, rows=2**23 // 4, batch=batch,
                     data={"uih_len": 64}, **sgd) for batch in (256, 512))  # fmt: skip
    ids = {spec.data.batch_size: batch_ids(spec, data_shape(spec.data))["item_id"] for spec in (few, more)}
    sent = step(more).ici_bytes - step(few).ici_bytes
    assert sent == pytest.approx((ids[512] - ids[256]) * 64 * 4 * 3 / 4, rel=0.01)


def test_arrays_take_whole_tiles_in_the_order_that_wastes_least() -> None:
    assert tiled_bytes((8, 128)) == 4096
    assert tiled_bytes((9, 128)) == 8192
    assert tiled_bytes((1 << 20, 16)) == (1 << 20) * 16 * 4
    assert tiled_bytes((0, 5)) == 0
    assert tiled_bytes((1024,), 8) == 4096
