"""The plan of tables: fits when it says so, whatever the order, and more room never makes it slower."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.preflight.chips import FACTS
from twinstep.preflight.frequency import different_rows, fitted_exponent, hottest_share
from twinstep.preflight.planning import plan_spec
from twinstep.preflight.sharding import Room, TableUse, options_of, plan_tables
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec

few = settings(max_examples=60, deadline=None)


@st.composite
def tables(draw: st.DrawFn) -> list[TableUse]:
    count = draw(st.integers(1, 8))
    return [
        TableUse(
            name=f"t{index}",
            rows=draw(st.sampled_from((1, 10, 1000, 100_000, 40_000_000))),
            width=draw(st.sampled_from((1, 8, 20, 64, 512))),
            ids=draw(st.integers(0, 1_000_000)),
            slots=draw(st.sampled_from((0.0, 1 / 512, 1.0, 2.0))),
            quiet=draw(st.booleans()),
            zipf=draw(st.sampled_from((0.0, 1.0, 1.3))),
        )
        for index in range(count)
    ]


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    return Room(
        devices=draw(st.sampled_from((1, 4, 48, 128))),
        facts=FACTS[draw(st.sampled_from(sorted(FACTS)))],
        budget=draw(st.sampled_from((0, 1 << 20, 1 << 30, 1 << 36))),
        sparse_cores=draw(st.sampled_from((0, 2, 4))),
    )


@few
@given(tables(), rooms(), st.randoms(use_true_random=False))
def test_the_order_of_tables_changes_nothing(found: list[TableUse], room: Room, rng: random.Random) -> None:
    mixed = list(found)
    rng.shuffle(mixed)
    assert plan_tables(mixed, room) == plan_tables(found, room)


@few
@given(tables(), rooms())
def test_a_plan_fits_when_it_says_so_and_only_then(found: list[TableUse], room: Room) -> None:
    plan = plan_tables(found, room)
    assert plan.bytes == sum(each.bytes for each in plan.choices)
    assert [each.table.name for each in plan.choices] == sorted(table.name for table in found)
    assert plan.fits == (plan.bytes <= room.budget)
    least = sum(min(way.bytes for way in options_of(table, room)) for table in found)
    assert plan.fits == (least <= room.budget)
    for each in plan.choices:
        assert (each.way, each.bytes) in {(way.way, way.bytes) for way in each.options}
        assert math.isfinite(each.seconds)
        assert each.seconds >= 0
        assert each.why


@few
@given(tables(), rooms(), st.integers(0, 1 << 34))
def test_more_room_never_makes_a_plan_slower(found: list[TableUse], room: Room, more: int) -> None:
    larger = dataclasses.replace(room, budget=room.budget + more)
    before, after = plan_tables(found, room), plan_tables(found, larger)
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert after.fits or not before.fits


@few
@given(tables(), rooms(), st.integers(1, 10_000_000))
def test_a_larger_table_never_makes_a_plan_fit(found: list[TableUse], room: Room, more: int) -> None:
    grown = [dataclasses.replace(found[0], rows=found[0].rows + more), *found[1:]]
    assert plan_tables(found, room).fits or not plan_tables(grown, room).fits


@few
@given(tables(), rooms())
def test_no_way_holds_less_than_its_share_of_a_table(found: list[TableUse], room: Room) -> None:
    for table in found:
        for way in options_of(table, room):
            whole = table.rows * table.width * 4
            assert way.bytes >= (whole if way.way == "replicated" else whole / room.devices)


def use(**changes: Any) -> TableUse:
    made = TableUse(name="item", rows=50_000_000, width=64, ids=500_000, slots=1 / 64)
    return dataclasses.replace(made, **changes)


def test_small_tables_are_replicated_large_ones_split_and_each_choice_says_why() -> None:
    room = Room(devices=128, facts=FACTS["v5p"], budget=8 << 30)
    plan = plan_tables([use(), use(name="day", rows=7, ids=1024)], room, ways=("replicated", "row"))
    ways = {each.table.name: each for each in plan.choices}
    assert ways["day"].way == "replicated"
    assert ways["item"].way == "row"
    assert "replicated" in ways["item"].why
    assert plan.fits


def test_sparsecores_take_a_large_table_where_there_are_some() -> None:
    room = Room(devices=128, facts=FACTS["v5p"], budget=8 << 30, sparse_cores=4)
    (choice,) = plan_tables([use()], room).choices
    assert (choice.way, choice.stack) == ("sparsecore", "width 64")


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.4])
@pytest.mark.parametrize("count", [3, 200, 5000])
def test_different_rows_are_those_of_the_sum_over_all_ranks(exponent: float, count: int) -> None:
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = sum(weights)
    for draws in (1, 50, 20_000):
        exact = sum(1 - (1 - weight / total) ** draws for weight in weights)
        assert different_rows(draws, count, exponent) == pytest.approx(exact, rel=0.01)
    assert hottest_share(count, exponent) == pytest.approx(1 / total, rel=0.01)


def test_an_exponent_is_found_again_from_what_was_seen() -> None:
    for exponent in (0.3, 1.0, 1.6):
        seen = different_rows(50_000, 1_000_000, exponent)
        assert fitted_exponent(50_000, 1_000_000, round(seen)) == pytest.approx(exponent, abs=0.02)


SPEC = {"name": "plan", "data": {"dataset": "synthetic", "batch_size": 256, "rows": {"item_id": 100_000_000}},
        "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "4x4x4"}}  # fmt: skip


def test_statistics_of_batches_take_the_place_of_a_guess() -> None:
    spec = JobSpec.model_validate(SPEC)
    rows = [{"table": "item_id", "rows": 100_000_000, "ids_per_batch": 20_000, "unique_ids": 20}]
    hot = plan_spec(spec, seen={"tables": {"batches": 4, "tables": rows}})
    found = {each.table.name: each.table.zipf for each in hot.choices}
    assert found["item_id"] > 1.5
    assert found["user_id"] == spec.data.synthetic.zipf


@pytest.mark.parametrize("seen", [{}, {"tables": 3}, {"tables": {"batches": 1, "tables": [{"table": "x"}]}}, []])
def test_statistics_that_are_none_are_refused(seen: Any) -> None:
    with pytest.raises(SpecError, match="twinstep tables"):
        plan_spec(JobSpec.model_validate(SPEC), seen=seen)


@pytest.mark.parametrize("name", ["batches", "rows", "ids_per_batch", "unique_ids"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 10**400, None, [], "many"])
def test_statistics_with_numbers_that_count_nothing_are_refused_or_of_use(name: str, value: Any) -> None:
    row = {"table": "item_id", "rows": 1000, "ids_per_batch": 200, "unique_ids": 20}
    report = {"batches": 4, "tables": [row]}
    (report if name == "batches" else row)[name] = value
    with contextlib.suppress(SpecError):
        found = plan_spec(JobSpec.model_validate(SPEC), seen={"tables": report})
        assert isinstance(value, int)
        assert all(math.isfinite(each.table.zipf) for each in found.choices)


def test_statistics_of_other_tables_are_refused() -> None:
    rows = [{"table": name, "rows": 9, "ids_per_batch": 3, "unique_ids": 2} for name in ("item_id", "itme_id")]
    with pytest.raises(SpecError, match="tables that the spec has not: itme_id") as told:
        plan_spec(JobSpec.model_validate(SPEC), seen={"tables": {"batches": 4, "tables": rows}})
    assert "item_id" in told.value.remedy


@pytest.mark.parametrize("engine", ["dense", "ring", "sparsecore"])
@pytest.mark.parametrize("sparse", ["rowwise_adagrad", "adam"])
def test_the_room_of_tables_is_what_no_table_takes(engine: str, sparse: str) -> None:
    def room(rows: int, engine: str, sparse: str) -> int:
        data = {**SPEC["data"], "rows": {"item_id": rows}}
        more = {"embedding": {"engine": engine}, "optimizers": {"sparse": {"kind": sparse}}}
        return plan_spec(JobSpec.model_validate({**SPEC, "data": data, **more})).budget

    alone = room(1000, "dense", "sgd")
    assert {room(rows, engine, sparse) for rows in (1000, 2**24, 2**30)} == {alone}


def test_tables_of_a_host_are_not_planned() -> None:
    with pytest.raises(SpecError, match="cpu"):
        plan_spec(JobSpec.model_validate({**SPEC, "accelerator": "cpu"}))
