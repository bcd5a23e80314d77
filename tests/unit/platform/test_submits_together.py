"""Submits that share a transaction: each gets its own answer, none is lost or doubled, and none goes into a project
that is gone."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select, update
from sqlalchemy.exc import DataError

from twinstep.platform.api.submits import written
from twinstep.platform.scheduler.accounts import LOCAL
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings
from twinstep.platform.store import store as store_module
from twinstep.platform.store import submits
from twinstep.platform.store.audit import AuditLog
from twinstep.platform.store.database import Database
from twinstep.platform.store.entry import Entry
from twinstep.platform.store.gather import MOST, Gathered
from twinstep.platform.store.store import Store
from twinstep.platform.store.submits import HomeChangedError, Submit, _new_job, store_submits
from twinstep.platform.store.tables import EventRow, IdempotencyRow, JobRow, ProjectRow, RunRow
from twinstep.platform.store.users import Users
from twinstep.spec.errors import ConflictError, NotFoundError, TwinstepError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import DEFAULT_PROJECT

SPEC = JobSpec(name="a-job")
OWNERS = itertools.count()
TPU: dict[str, Any] = {
    "name": "on-tpu",
    "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"},
    "kubernetes": {"image": "registry.example/worker@sha256:" + "0" * 64, "queue": "team"},
}


def submit(key: str | None = None, *, actor: str = "ada", project: str = DEFAULT_PROJECT, **more: Any) -> Submit:
    return Submit(**{"spec": SPEC, "project": project, "actor": actor, "key": key} | more)


# ---- gathering ----


def test_whatever_comes_meanwhile_is_done_together_and_each_gets_its_own_answer() -> None:
    batches: list[list[int]] = []
    begun, go_on = threading.Event(), threading.Event()

    def work(asked: Sequence[int]) -> list[int | Exception]:
        batches.append(list(asked))
        begun.set()
        assert go_on.wait(20)
        return [ValueError(str(each)) if each == 3 else each * each for each in asked]

    gathered: Gathered[int, int] = Gathered(work, name="squares")
    first = gathered.ask(0)
    assert begun.wait(20)
    futures = [gathered.ask(number) for number in range(1, MOST + 6)]
    go_on.set()
    assert first.result(20) == 0
    for number, future in enumerate(futures, start=1):
        if number == 3:
            with pytest.raises(ValueError, match="3"):
                future.result(20)
        else:
            assert future.result(20) == number * number
    assert [len(batch) for batch in batches] == [1, MOST, 5]
    gathered.close()


@pytest.mark.parametrize("count", [1, 7, MOST, 2 * MOST + 5])
def test_what_tasks_ask_in_one_turn_of_a_loop_is_done_together(count: int) -> None:
    """However many wait, they are handed over in as few parts as may be: each transaction costs as much as twenty."""
    batches: list[int] = []

    def work(asked: Sequence[int]) -> list[int | Exception]:
        batches.append(len(asked))
        return [ValueError(str(each)) if each == 3 else each * each for each in asked]

    gathered: Gathered[int, int] = Gathered(work, name="turns")

    async def ask_all() -> list[int | BaseException]:
        return await asyncio.gather(*(gathered.answer(number) for number in range(count)), return_exceptions=True)

    found = asyncio.run(ask_all())
    assert [-1 if isinstance(each, ValueError) else each for each in found] == [
        -1 if number == 3 else number * number for number in range(count)
    ]
    assert sum(batches) == count
    assert len(batches) == -(-count // MOST)
    gathered.close()
    with pytest.raises(UnavailableError):
        asyncio.run(gathered.answer(1))


def test_a_task_that_is_given_up_keeps_no_other_from_its_answer() -> None:
    go_on = threading.Event()

    def work(asked: Sequence[int]) -> list[int]:
        assert go_on.wait(20)
        return list(asked)

    gathered: Gathered[int, int] = Gathered(work, name="given-up")

    async def some() -> int:
        tasks = [asyncio.ensure_future(gathered.answer(number)) for number in (1, 2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        return await tasks[1]

    assert asyncio.run(some()) == 2
    asyncio.run(asyncio.sleep(0))  # a loop that has ended is told nothing, and nobody fails of it
    gathered.close()


def test_what_fails_as_a_whole_fails_for_all_and_the_next_goes_on() -> None:
    def work(asked: Sequence[int]) -> list[int | Exception]:
        if 1 in asked:
            raise UnavailableError("away", remedy="wait")
        return list(asked)

    gathered: Gathered[int, int] = Gathered(work, name="fails")
    with pytest.raises(UnavailableError):
        gathered.ask(1).result(20)
    assert gathered.ask(2).result(20) == 2
    gathered.close()


def test_what_was_asked_before_the_end_is_done_and_nothing_after_it() -> None:
    gathered: Gathered[int, int] = Gathered(list, name="ends")
    futures = [gathered.ask(number) for number in range(200)]
    gathered.close()
    assert [future.result(0) for future in futures] == list(range(200))
    with pytest.raises(UnavailableError):
        gathered.ask(1)
    unused: Gathered[int, int] = Gathered(list, name="unused")
    unused.close()


# ---- submits in one transaction ----


def test_a_bad_submit_does_not_keep_the_others_from_being_stored(one_store: Store) -> None:
    database = one_store.database
    (first,) = store_submits(database, [submit("bad-1")])
    found = store_submits(
        database,
        [
            submit("bad-2"),
            submit("bad-1", spec=JobSpec(name="another")),
            submit(project="nowhere"),
            submit("bad-1"),
            submit("bad-2"),
            submit("bad-2", actor="bob"),
            submit("bad-2", spec=JobSpec(name="another")),
            submit(),
        ],
    )
    assert isinstance(first, tuple)
    kinds = [type(each) if isinstance(each, Exception) else each[1] for each in found]
    assert kinds == [True, ConflictError, NotFoundError, False, False, True, ConflictError, True]
    jobs = [each[0].id if isinstance(each, tuple) else None for each in found]
    assert (jobs[3], jobs[4]) == (first[0].id, jobs[0])
    assert len({jobs[0], jobs[5], jobs[7], first[0].id}) == 4


def test_the_answer_to_a_submit_is_the_job_as_it_is_read_later(one_store: Store) -> None:
    spec = JobSpec.model_validate(TPU)
    for each in (SPEC, spec):
        (found,) = store_submits(one_store.database, [submit(spec=each)])
        assert isinstance(found, tuple)
        assert found[0] == one_store.job(found[0].id)
        assert found[0].model_dump_json() == one_store.job(found[0].id).model_dump_json()


def test_an_answer_is_the_same_with_the_spec_as_it_was_written() -> None:
    spec = SPEC.model_copy(update={"train": SPEC.train.model_copy(update={"seed": 3})})
    asks = Submit(spec=spec, project="default", actor='a "user" \u00e9')
    job = _new_job(asks, "job-1", 1.5)
    for warnings in ((), ('so "it" is', "\u00e9\n")):
        answers = [json.loads(written(job, warnings, text)) for text in (asks.text, None)]
        assert answers[0] == answers[1]
        assert list(answers[0]) == list(answers[1])


def test_a_key_knows_its_spec_whatever_the_order_of_names_in_it(one_store: Store) -> None:
    """Also in one transaction with the first, and where another version wrote the digest."""
    one, two = (
        JobSpec.model_validate({**TPU, "kubernetes": {**TPU["kubernetes"], "env": dict(names)}})
        for names in ([("A", "1"), ("B", "2")], [("B", "2"), ("A", "1")])
    )
    database, key = one_store.database, f"order-{next(OWNERS)}"
    first, second = store_submits(database, [submit(key, spec=one), submit(key, spec=two)])
    (third,) = store_submits(database, [submit(key, spec=two)])
    with database.write() as connection:
        connection.execute(update(IdempotencyRow).where(IdempotencyRow.key == key).values(digest="of-another-version"))
    (fourth, fifth) = store_submits(database, [submit(key, spec=one), submit(key)])
    assert isinstance(first, tuple)
    for each in (second, third, fourth):
        assert isinstance(each, tuple)
        assert (each[0].id, each[1]) == (first[0].id, False)
    assert isinstance(fifth, ConflictError)


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("how", ["text", "data", "bug"])
def test_a_submit_that_the_database_refuses_is_alone_with_its_error(
    one_store: Store, monkeypatch: pytest.MonkeyPatch, place: int, how: str
) -> None:
    """None of the others is lost, and none is told that it failed and would be sent, and stored, again."""
    name, actor = f"good-{next(OWNERS)}", f"u{next(OWNERS)}"
    asked = [submit(spec=JobSpec(name=name), actor=actor) for _ in range(4)]
    bad = "b\0d" if how == "text" else "bad"  # PostgreSQL itself refuses the first
    asked.insert(place, submit(actor=bad))
    if how == "text" and one_store.database.dialect == "sqlite":
        pytest.skip("SQLite stores any text")
    write = submits._write

    def refuses(connection: Any, new: Any) -> None:
        write(connection, new)
        if any(each.actor == "bad" for each, _ in new):
            raise DataError("INSERT", {}, Exception("out of range")) if how == "data" else KeyError(1)

    monkeypatch.setattr(submits, "_write", refuses)
    found = store_submits(one_store.database, asked)
    assert [isinstance(each, tuple) for each in found] == [number != place for number in range(5)]
    assert isinstance(found[place], KeyError if how == "bug" else DataError)
    assert _counts(one_store, name) == (4, 4, 4, 0)


def test_the_scheduler_looks_once_a_job_is_stored_though_nobody_waits_for_the_answer(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes cancels what it waits for; the job is stored all the same."""
    begun, go_on, seen = threading.Event(), threading.Event(), []
    whole = store_module.store_submits

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return whole(*args)

    monkeypatch.setattr(store_module, "store_submits", slowly)
    service = Service(store, settings, nudge=lambda: seen.append(len(store.jobs().items)))

    async def goes() -> None:
        asks = asyncio.ensure_future(service.submit(SPEC, home=service.accounts.users.project(DEFAULT_PROJECT)))
        assert await asyncio.to_thread(begun.wait, 20)
        asks.cancel()
        with suppress(asyncio.CancelledError):
            await asks

    asyncio.run(goes())
    assert seen == []
    go_on.set()
    store._submits.close()
    assert seen == [1]


def _counts(store: Store, name: str) -> tuple[int, ...]:
    """Return how many jobs of a name there are, with their runs, events and keys."""
    counts = []
    with store.database.read() as connection:
        jobs = select(JobRow.id).where(JobRow.name == name)
        for table, column in ((JobRow, JobRow.id), (RunRow, RunRow.job_id), (EventRow, EventRow.job_id)):
            counts.append(
                connection.execute(select(func.count()).select_from(table).where(column.in_(jobs))).scalar_one()
            )
        keys = select(func.count()).select_from(IdempotencyRow).where(IdempotencyRow.job_id.in_(jobs))
        counts.append(connection.execute(keys).scalar_one())
    return tuple(counts)


@given(data=st.data())
def test_however_submits_are_gathered_each_key_has_one_job(one_store: Store, data: st.DataObject) -> None:
    """The oracle is a dictionary: the first spec that comes with a key is the one that is stored."""
    database, owner = one_store.database, f"u{next(OWNERS)}"
    keys, names = st.sampled_from(["a", "b", "c", None]), st.sampled_from(["x", "y"])
    batches = data.draw(st.lists(st.lists(st.tuples(keys, names), min_size=1, max_size=6), max_size=4))
    stored: dict[str, tuple[str, str]] = {}
    new = 0
    for batch in batches:
        asked = [submit(key, actor=owner, spec=JobSpec(name=name)) for key, name in batch]
        for (key, name), answer in zip(batch, store_submits(database, asked), strict=True):
            if key is not None and key in stored:
                if stored[key][0] == name:
                    assert isinstance(answer, tuple)
                    assert (answer[0].id, answer[1]) == (stored[key][1], False)
                else:
                    assert isinstance(answer, ConflictError)
                continue
            assert isinstance(answer, tuple)
            assert answer[1]
            assert one_store.job(answer[0].id) == answer[0]
            new += 1
            if key is not None:
                stored[key] = (name, answer[0].id)
    with database.read() as connection:
        mine = select(func.count()).select_from(JobRow).where(JobRow.submitted_by == owner)
        assert connection.execute(mine).scalar_one() == new


def test_each_submit_of_a_batch_leaves_one_event_and_a_line_in_the_audit_log_each_time(store: Store) -> None:
    entries = [Entry(actor=f"u{n}", action="job.submit", project="default", request_id=f"r{n}") for n in range(3)]
    found = store_submits(store.database, [submit(f"k{n}", entry=entry) for n, entry in enumerate(entries)])
    repeated = Entry(actor="u0", action="job.submit", request_id="again")
    store_submits(store.database, [submit("k0", entry=repeated)])
    assert [entry.written for entry in (*entries, repeated)] == [True, True, True, True]
    lines = AuditLog(store.database).page(limit=10).items[::-1]
    jobs = [each[0].id for each in found if isinstance(each, tuple)]
    wanted = list(zip(("r0", "r1", "r2", "again"), (*jobs, jobs[0]), strict=True))
    assert [(line.request_id, line.target) for line in lines] == wanted
    assert _counts(store, "a-job") == (3, 3, 3, 3)


def test_many_at_once_on_two_control_planes_store_each_key_once(databases: Any) -> None:
    url = databases.new()
    with closing(Store(url)) as one, closing(Store(url)) as other:
        both = (one, other)

        def ask(number: int) -> str:
            return both[number % 2].create_job_once(SPEC, key=f"key-{number // 4}")[0].id

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(ask, range(160)))
        assert all(len(set(found[begin : begin + 4])) == 1 for begin in range(0, 160, 4))
        assert _counts(one, "a-job") == (40, 40, 40, 40)


# ---- projects that go ----


def test_a_project_that_is_deleted_and_a_submit_to_it_never_both_come_through(databases: Any) -> None:
    url = databases.new()
    with closing(Store(url)) as store, closing(Store(url)) as other:
        users = Users(other.database)

        def deleted(name: str) -> bool:
            with suppress(TwinstepError):
                users.delete_project(name)
                return True
            return False

        def stored(name: str) -> bool:
            with suppress(TwinstepError):
                store.create_job(SPEC, project=name)
                return True
            return False

        with ThreadPoolExecutor(4) as pool:
            for number in range(25):
                name = f"goes-{number}"
                users.create_project(name, namespace="default", queue=None, image=None)
                jobs = [pool.submit(stored, name) for _ in range(2)]
                gone = pool.submit(deleted, name)
                assert gone.result(60) == (not any(job.result(60) for job in jobs))


@pytest.mark.parametrize("submit_first", [True, False])
def test_a_project_is_not_deleted_under_a_submit_that_is_not_committed_yet(databases: Any, submit_first: bool) -> None:
    if databases.kind == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    url = databases.new()
    with closing(Database(url)) as one, closing(Database(url)) as other, ThreadPoolExecutor(1) as pool:
        users = Users(other)
        users.create_project("goes", namespace="default", queue=None, image=None)
        if submit_first:
            with one.write() as connection:
                submits._store(connection, [submit(project="goes")])
                gone = pool.submit(users.delete_project, "goes")
                with pytest.raises(TimeoutError):
                    gone.result(0.5)
            with pytest.raises(ConflictError, match="have not ended"):
                gone.result(30)
        else:
            with one.write() as connection:
                connection.execute(select(ProjectRow.name).where(ProjectRow.name == "goes").with_for_update())
                answer = pool.submit(store_submits, other, [submit(project="goes")])
                with pytest.raises(TimeoutError):
                    answer.result(0.5)
                connection.exec_driver_sql("DELETE FROM projects WHERE name = 'goes'")
            assert isinstance(answer.result(30)[0], NotFoundError)


def test_a_job_fits_the_project_that_it_is_stored_in_not_the_one_that_is_remembered(live: Any) -> None:
    users, body = live.plane.service.accounts.users, {"name": "a"}
    for namespace in ("first", "second"):
        users.create_project("moves", namespace=namespace, queue=None, image=None)
        key = {"Idempotency-Key": namespace}
        remembered = live.plane.service.accounts.remembered_project(LOCAL, "moves")
        assert remembered is None or remembered.namespace == "first"
        answer = live.http.post("/v1/jobs", params={"project": "moves"}, json=body, headers=key)
        assert answer.status_code == 201
        assert answer.json()["spec"]["kubernetes"]["namespace"] == namespace
        live.when(answer.json()["id"], "succeeded", "failed")
        with live.plane.store.database.write() as connection:  # a name is given again only where no job has it
            connection.exec_driver_sql("DELETE FROM jobs WHERE project = 'moves'")
        users.delete_project("moves")
    gone = live.http.post("/v1/jobs", params={"project": "moves"}, json=body)
    assert (gone.status_code, gone.json()["code"]) == (404, "not_found")


def test_a_submit_for_a_project_that_was_made_anew_is_told_apart(store: Store) -> None:
    users = Users(store.database)
    before = users.create_project("anew", namespace="first", queue=None, image=None)
    users.delete_project("anew")
    now = users.create_project("anew", namespace="second", queue=None, image=None)
    found = store_submits(store.database, [submit(project="anew", home=before), submit(project="anew", home=now)])
    assert isinstance(found[0], HomeChangedError)
    assert isinstance(found[1], tuple)
