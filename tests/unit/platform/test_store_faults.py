"""A store whose database fails under it: locked, full, gone and back, a clock that jumps, two that take in one batch.

Whatever happens, each record is stored once, in order, and the error says what to do.
"""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from twinstep.platform.store import ids, postgresql, sqlite, submits
from twinstep.platform.store import store as store_module
from twinstep.platform.store.store import Store
from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import EventRecord, MetricRecord, Record
from twinstep.spec.states import FINAL, RunState

SPEC = JobSpec(name="a-job")


def starting(store: Store) -> str:
    run_id = store.create_job(SPEC).run_id
    for version, to in ((1, RunState.QUEUED), (2, RunState.STARTING)):
        store.move(run_id, to=to, if_version=version, reason="", actor="scheduler")
    return run_id


def records(count: int, *, begin: int = 1) -> list[Record]:
    return [
        EventRecord(seq=seq, time=float(seq), name="tick", reason=str(seq))
        if seq % 5 == 0
        else MetricRecord(seq=seq, time=float(seq), step=seq, values={"loss": float(seq), "auc": None})
        for seq in range(begin, begin + count)
    ]


def check_all_stored(store: Store, run_id: str, count: int) -> None:
    run = store.run(run_id)
    assert run.acked_seq == count
    points = store.metrics(run_id, limit=10_000).items
    assert [point.step for point in points] == [seq for seq in range(1, count + 1) if seq % 5 for _ in range(2)]
    ticks = [event.reason for event in store.events(run.job_id, limit=10_000).items if event.name == "tick"]
    assert ticks == [str(seq) for seq in range(1, count + 1) if seq % 5 == 0]


def test_two_control_planes_that_take_in_one_batch_at_once_store_it_once(databases: Any) -> None:
    url = databases.new()
    with closing(Store(url)) as one, closing(Store(url)) as other:
        run_id = starting(one)
        for begin in range(1, 101, 20):
            meet = threading.Barrier(4)

            def send(number: int, batch: list[Record] = records(20, begin=begin), meet: Any = meet) -> int:  # noqa: B008
                meet.wait(timeout=20)
                return (one, other)[number % 2].ingest(run_id, batch).stored

            with ThreadPoolExecutor(4) as pool:
                assert sorted(pool.map(send, range(4))) == [0, 0, 0, 20]
        check_all_stored(other, run_id, 100)
        changes = [event for event in one.events(one.run(run_id).job_id).items if event.name == "state_changed"]
        assert [event.data["to"] for event in changes] == ["queued", "starting", "running"]


def test_a_database_that_another_holds_is_waited_for_and_then_told_of(
    databases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.2)
    monkeypatch.setitem(postgresql.LIMITS_MS, "lock_timeout", 200)
    url = databases.new()
    with closing(Store(url)) as store:
        run_id = starting(store)
        if databases.kind == "sqlite":
            holder: Any = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
        else:
            holder = psycopg.connect(url)
            holder.execute("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
        try:
            with pytest.raises(UnavailableError) as caught:
                store.ingest(run_id, records(10))
            assert caught.value.remedy
            holder.rollback() if databases.kind == "postgresql" else holder.execute("ROLLBACK")
            store.ingest(run_id, records(10))
        finally:
            holder.close()
        check_all_stored(store, run_id, 10)


def test_a_disk_that_is_full_stores_nothing_by_half_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/twinstep.db")) as store:
        run_id = starting(store)
        store.ingest(run_id, records(20))
        pages = _limit_pages(store, extra=4)

        def fill() -> None:
            for begin in range(21, 100_000, 500):
                store.ingest(run_id, records(500, begin=begin))

        with pytest.raises(UnavailableError, match="full") as caught:
            fill()
        assert "room" in caught.value.remedy
        stored = store.run(run_id).acked_seq
        check_all_stored(store, run_id, stored)  # reading goes on, and nothing is there by half
        with pytest.raises(UnavailableError):
            [store.create_job(SPEC) for _ in range(1000)]
        _limit_pages(store, extra=pages + 100_000)
        store.ingest(run_id, records(500, begin=stored + 1))
        check_all_stored(store, run_id, stored + 500)


def _limit_pages(store: Store, *, extra: int) -> int:
    """Let every connection of a store take no more pages than it has, and a few."""
    engine = store.database._engine
    with store.database.read() as connection:
        pages = int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())
    engine.dispose()
    from sqlalchemy import event

    event.listen(engine, "checkout", lambda raw, *rest: raw.execute(f"PRAGMA max_page_count = {pages + extra}"))
    return pages


def test_a_full_disk_is_a_503_that_says_so_and_the_worker_may_send_again(live: Any, monkeypatch: Any) -> None:
    job = live.submit("reports-1")
    live.when(job["id"], "succeeded")
    full = sqlite3.OperationalError("database or disk is full")

    def broken(*args: Any, **options: Any) -> Any:
        from sqlalchemy.exc import OperationalError

        raise OperationalError("INSERT", {}, full)

    with monkeypatch.context() as patch:
        patch.setattr(submits, "_write", broken)
        answer = live.http.post("/v1/jobs", json={"name": "a"}, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert answer.json()["remedy"]
    assert live.http.post("/v1/jobs", json={"name": "a"}, headers={"Idempotency-Key": "k"}).status_code == 201
    assert live.http.post("/v1/jobs", json={"name": "a"}, headers={"Idempotency-Key": "k"}).status_code == 200


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("step", [-86_400.0 * 400, -3600.0, 3600.0, 86_400.0 * 4000])
def test_a_clock_that_jumps_puts_nothing_out_of_order(store: Store, monkeypatch: Any, step: float) -> None:
    clock = Clock(1_800_000_000.0)
    for module in (store_module, submits, ids):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ids, "_last", 0)
    before = [store.create_job(SPEC).id for _ in range(3)]
    run_id = starting(store)
    store.ingest(run_id, records(10))
    clock.now += step
    after = [store.create_job(SPEC).id for _ in range(3)]
    store.ingest(run_id, records(10, begin=11))
    run = store.run(run_id)
    assert store.move(run_id, to=RunState.SUCCEEDED, if_version=run.version, reason="", actor="scheduler")
    listed = [job.id for job in store.jobs().items]
    assert listed == [*after[::-1], run.job_id, *before[::-1]]  # newest first, by what came first and not by the clock
    check_all_stored(store, run_id, 20)
    states = [event.data["to"] for event in store.events(run.job_id).items if event.name == "state_changed"]
    assert states == ["queued", "starting", "running", "succeeded"]
    ended = store.run(run_id)
    assert (ended.state in FINAL, ended.active_seconds >= 0) == (True, True)


def test_a_batch_is_told_to_be_sent_again_until_the_server_is_back_and_is_stored_once(
    tmp_path: Path, wait: Any
) -> None:
    from bench.postgres import NoServerError, postgres

    try:
        with (
            postgres(fsync="on", synchronous_commit="on", full_page_writes="on", restart_after_crash="on") as server,
            closing(Store(server.url())) as store,
        ):
            run_id = starting(store)
            stop, refused = threading.Event(), []

            def worker() -> None:
                acked = 0
                while acked < 400 and not stop.is_set():
                    try:
                        acked = store.ingest(run_id, records(10, begin=acked + 1)).acked
                    except UnavailableError as error:
                        refused.append(error)
                        stop.wait(0.05)

            thread = threading.Thread(target=worker)
            thread.start()
            wait(lambda: store.run(run_id).acked_seq >= 50)
            crash(server.url())
            thread.join(timeout=60)
            stop.set()
            assert all(error.remedy for error in refused)
            check_all_stored(store, run_id, 400)
    except NoServerError as error:
        pytest.skip(str(error))


def crash(url: str) -> None:
    """Kill a process of the server: it takes every connection and all memory with it, and starts again from its log."""
    import os
    import signal

    with suppress(psycopg.OperationalError), psycopg.connect(url) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        with suppress(ProcessLookupError):
            os.kill(row[0], signal.SIGKILL)


def test_a_stream_whose_database_goes_ends_without_its_end_and_is_taken_up_again(live: Any, monkeypatch: Any) -> None:
    job = live.submit("reports-3")
    live.when(job["id"], "succeeded")
    whole = live.plane.store.job
    calls = []

    def broken(job_id: str) -> Any:
        calls.append(job_id)
        if len(calls) > 2:
            raise UnavailableError("the database does not answer", remedy="wait")
        return whole(job_id)

    with monkeypatch.context() as patch:
        patch.setattr(live.plane.store, "job", broken)
        lines: list[str] = []
        with suppress(httpx.TransportError), live.http.stream("GET", f"/v1/jobs/{job['id']}/stream") as answer:
            lines.extend(answer.iter_lines())
    assert not any(line == "event: end" for line in lines)
    with live.http.stream("GET", f"/v1/jobs/{job['id']}/stream") as answer:
        assert "event: end" in list(answer.iter_lines())
