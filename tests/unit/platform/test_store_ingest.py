"""Reports are stored exactly once and in order, however they arrive."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from twinstep.platform.store.ingest import clean
from twinstep.platform.store.store import Store
from twinstep.spec.errors import NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import EventRecord, MetricRecord, ProgressRecord, Record, ResultRecord, RunSummary
from twinstep.spec.states import RunState

SPEC = JobSpec(name="a-job")


def starting(store: Store) -> str:
    run_id = store.create_job(SPEC).run_id
    store.move(run_id, to=RunState.QUEUED, if_version=1, reason="", actor="scheduler")
    store.move(run_id, to=RunState.STARTING, if_version=2, reason="", actor="scheduler", token_hash="x" * 64)
    return run_id


def metric(seq: int, **values: float | None) -> MetricRecord:
    return MetricRecord(seq=seq, time=float(seq), step=seq, values=values or {"loss": 1.0 / seq})


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_doubling_and_mixing_of_batches_stores_each_record_once_in_order(
    one_store: Store, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 30), label="records")
    records: list[Record] = [
        EventRecord(seq=seq, time=0.0, name="tick", reason=str(seq)) if seq % 4 == 0 else metric(seq)
        for seq in range(1, count + 1)
    ]
    store = one_store
    run_id = starting(store)
    spans = st.tuples(st.integers(0, count), st.integers(0, count)).map(sorted)
    for begin, end in data.draw(st.lists(spans, max_size=12), label="batches"):
        batch = list(records[begin:end])
        if data.draw(st.booleans(), label="mixed up"):
            batch = data.draw(st.permutations(batch))
        before = store.run(run_id).acked_seq
        acked = store.ingest(run_id, batch).acked
        assert before <= acked <= count
    acked = store.run(run_id).acked_seq
    store.ingest(run_id, records[acked:])  # a sender goes on from what was acked, and that is all it takes
    assert store.run(run_id).acked_seq == count
    assert [point.step for point in store.metrics(run_id).items] == [s for s in range(1, count + 1) if s % 4]
    ticks = [e.reason for e in store.events(store.run(run_id).job_id).items if e.name == "tick"]
    assert ticks == [str(seq) for seq in range(1, count + 1) if seq % 4 == 0]


def test_a_gap_ends_the_batch_and_the_answer_says_where_to_go_on(store: Store) -> None:
    run_id = starting(store)
    done = store.ingest(run_id, [metric(1), metric(2), metric(4)])
    assert (done.acked, done.stored, done.lost) == (2, 2, ())


def test_a_sender_that_is_gone_leaves_its_gap_behind_and_the_gap_is_told_of(store: Store) -> None:
    run_id = starting(store)
    done = store.ingest(run_id, [metric(1), metric(4)], skip_gaps=True)
    assert (done.acked, done.stored, done.lost) == (4, 2, ((2, 3),))
    (told,) = [e for e in store.events(done.job_id).items if e.name == "reports_lost"]
    assert told.data == {"first": 2, "last": 3}


def test_the_first_report_moves_a_starting_run_to_running_and_no_other_does(store: Store) -> None:
    run_id = starting(store)
    assert store.ingest(run_id, []).stored == 0
    assert store.run(run_id).state is RunState.STARTING
    store.ingest(run_id, [metric(1)])
    store.ingest(run_id, [metric(2)])
    run = store.run(run_id)
    assert (run.state, run.version) == (RunState.RUNNING, 4)
    assert run.heartbeat_at is not None


def test_late_reports_of_a_finished_run_are_kept_and_never_move_it(store: Store) -> None:
    run_id = starting(store)
    store.move(run_id, to=RunState.FAILED, if_version=3, reason="gone", actor="scheduler")
    summary = RunSummary(
        backend="eager",
        steps=2,
        examples=2,
        examples_per_s=math.inf,
        compile_s=0,
        train_s=0,
        eval_s=0,
        final_loss=math.nan,
        auc=None,
        ne=None,
        eval_examples=0,
    )
    store.ingest(run_id, [metric(1), ResultRecord(seq=2, time=1, summary=summary)])
    run = store.run(run_id)
    assert run.state is RunState.FAILED
    assert run.reason == "gone"
    assert run.summary is not None
    assert (run.summary.examples_per_s, run.summary.final_loss) == (0.0, None)
    assert len(store.metrics(run_id).items) == 1


def test_numbers_that_are_not_finite_are_stored_as_undefined(store: Store) -> None:
    run_id = starting(store)
    progress = ProgressRecord(seq=2, time=1, phase="training", step=1, total_steps=2, examples_per_s=math.inf)
    store.ingest(run_id, [metric(1, a=math.nan, b=math.inf, c=None, d=0.5), progress])
    assert {p.name: p.value for p in store.metrics(run_id).items} == {"a": None, "b": None, "c": None, "d": 0.5}
    shown = store.run(run_id).progress
    assert shown is not None
    assert shown.examples_per_s is None


@given(st.integers().map(lambda each: each * 10**400) | st.integers(-(2**65), 2**65))
def test_whole_numbers_of_events_can_be_counted_with(whole: int) -> None:
    found = clean({"time_s": {"compute": whole}, "steps": [whole, True]})
    kept = whole if abs(whole) < 2**64 else None
    assert found == {"time_s": {"compute": kept}, "steps": [kept, True]}
    assert float(kept or 0) == float(json.loads(json.dumps(found))["steps"][0] or 0)


def test_an_event_with_a_number_of_any_size_is_stored(store: Store) -> None:
    run_id = starting(store)
    event = EventRecord(seq=1, time=0, name="profiled", reason="", data={"first": 10**5000, "last": 7})
    store.ingest(run_id, [event])
    (kept,) = (each for each in store.events(store.run(run_id).job_id).items if each.name == "profiled")
    assert kept.data == {"first": None, "last": 7}


def test_a_step_told_twice_keeps_its_first_number(store: Store) -> None:
    run_id = starting(store)
    store.ingest(run_id, [MetricRecord(seq=seq, time=0, step=5, values={"loss": float(seq)}) for seq in (1, 2)])
    assert [point.value for point in store.metrics(run_id).items] == [1.0]


def test_metrics_are_read_by_cursor_and_by_name(store: Store) -> None:
    run_id = starting(store)
    store.ingest(run_id, [metric(seq, loss=1.0, auc=0.5) for seq in range(1, 11)])
    seen, after = [], 0
    while page := store.metrics(run_id, after=after, names=["auc"], limit=3):
        if not page.items:
            break
        seen += [point.step for point in page.items]
        after = page.next_after
    assert seen == list(range(1, 11))


def test_text_that_postgresql_cannot_hold_is_stored_without_it(store: Store) -> None:
    run_id = starting(store)
    told = EventRecord(seq=1, time=0.0, name="ti\0ck", reason="a\0b", data={"k\0": ["v\0"]})
    store.ingest(run_id, [told, metric(2, **{"lo\0ss": 1.0})])
    (event,) = [e for e in store.events(store.run(run_id).job_id).items if e.actor == "worker" and e.name == "tick"]
    assert (event.reason, event.data) == ("ab", {"k": ["v"]})
    assert [point.name for point in store.metrics(run_id).items] == ["loss"]


def test_an_unknown_run_cannot_report(store: Store) -> None:
    with pytest.raises(NotFoundError):
        store.ingest("run-0", [metric(1)])


@pytest.mark.parametrize("count", [1, 500])
def test_a_batch_of_any_size_takes_one_transaction_of_a_few_statements(store: Store, count: int) -> None:
    run_id = starting(store)
    store.ingest(run_id, [metric(1)])
    said: list[str] = []
    event.listen(
        store.database._engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *rest: said.append(statement.split()[0]),
    )
    store.ingest(run_id, [metric(seq, loss=0.1, auc=0.2, ne=0.3) for seq in range(2, count + 2)])
    assert [each for each in said if each != "BEGIN"] == ["SELECT", "UPDATE", "INSERT"]
    assert len(store.metrics(run_id, limit=5000).items) == 1 + 3 * count


def test_time_that_is_not_finite_is_left_out_and_what_is_stored_can_be_read(store: Store) -> None:
    run_id = starting(store)
    spent = {"step": 2.0, "other": math.inf, "compile": math.nan}
    progress = ProgressRecord(seq=1, time=1, phase="training", step=1, total_steps=2, goodput=math.nan, time_s=spent)
    base = {"backend": "eager", "steps": 1, "examples": 1, "examples_per_s": 1.0, "compile_s": 0.0, "train_s": 1.0}
    rest = {"eval_s": 0.0, "final_loss": None, "auc": None, "ne": None, "eval_examples": 0}
    summary = RunSummary.model_validate({**base, **rest, "time_s": spent, "goodput": math.inf, "chip_hours": math.nan})
    store.ingest(run_id, [progress, ResultRecord(seq=2, time=1, summary=summary)])
    run = store.run(run_id)
    assert run.progress is not None
    assert run.summary is not None
    assert (run.progress.goodput, run.progress.time_s["step"], run.progress.time_s["other"]) == (None, 2.0, None)
    assert run.summary.time_s == {"step": 2.0}
    assert store.job(run.job_id).summary == run.summary


def test_what_a_worker_calls_its_time_takes_no_more_room_than_names_do(store: Store) -> None:
    run_id = starting(store)
    many = {f"part-{number}" + "x" * 1000: 1.0 for number in range(5000)}
    store.ingest(run_id, [ProgressRecord(seq=1, time=1, phase="training", step=1, total_steps=2, time_s=many)])
    progress = store.run(run_id).progress
    assert progress is not None
    assert len(str(progress.time_s)) < 10_000
