"""Guarded moves of a run: one winner, the table obeyed, an event for each."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from twinstep.platform.store import store as store_module
from twinstep.platform.store.database import Database
from twinstep.platform.store.ids import new_id
from twinstep.platform.store.search import JobFilter
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import Base
from twinstep.spec.errors import NotFoundError, StateError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.states import FINAL, MOVES, RunState

SPEC = JobSpec(name="a-job")


def test_a_new_job_has_one_pending_run_and_the_event_of_its_submission(store: Store) -> None:
    job = store.create_job(SPEC)
    (run,) = store.runs(job.id)
    assert (run.state, run.attempt, run.version) == (RunState.PENDING, 1, 1)
    assert [event.name for event in store.events(job.id).items] == ["submitted"]
    assert JobSpec.model_validate(store.job(job.id).spec) == SPEC


def test_of_many_who_move_at_one_version_exactly_one_wins(store: Store) -> None:
    run_id = store.create_job(SPEC).run_id
    barrier, won = threading.Barrier(8), []

    def racer() -> None:
        barrier.wait()
        won.append(store.move(run_id, to=RunState.QUEUED, if_version=1, reason="a race", actor="scheduler"))

    threads = [threading.Thread(target=racer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    run = store.run(run_id)
    assert (run.state, run.version) == (RunState.QUEUED, 2)
    assert [event.name for event in store.events(run.job_id).items] == ["submitted", "state_changed"]


@given(wishes=st.lists(st.sampled_from(list(RunState)), max_size=12))
@settings(max_examples=15, deadline=None)
def test_only_moves_of_the_table_happen_and_each_leaves_its_event(one_store: Store, wishes: list[RunState]) -> None:
    store = one_store
    job = store.create_job(SPEC)
    path = [RunState.PENDING]
    for version, to in enumerate(wishes, start=1):
        run = store.run(job.run_id)
        if to in MOVES[path[-1]]:
            assert store.move(job.run_id, to=to, if_version=run.version, reason=f"wish {version}", actor="user")
            path.append(to)
        else:
            with pytest.raises(StateError):
                store.move(job.run_id, to=to, if_version=run.version, reason="no", actor="user")
    changes = [event for event in store.events(job.id).items if event.name == "state_changed"]
    assert [(e.data["from"], e.data["to"]) for e in changes] == list(itertools.pairwise(path))
    assert all(e.reason and e.actor and e.time for e in changes)
    assert (store.run(job.run_id).finished_at is not None) == (path[-1] in FINAL)


def test_a_run_that_is_not_there_cannot_be_moved_or_looked_at(store: Store) -> None:
    with pytest.raises(NotFoundError):
        store.move("run-0", to=RunState.QUEUED, if_version=1, reason="", actor="user")
    with pytest.raises(NotFoundError):
        store.run("run-0")
    with pytest.raises(NotFoundError):
        store.job("job-0")


def test_asking_to_cancel_counts_once_and_makes_an_older_look_lose(store: Store) -> None:
    run_id = store.create_job(SPEC).run_id
    assert store.request_cancel(run_id, actor="user")
    assert not store.request_cancel(run_id, actor="user")
    assert not store.move(run_id, to=RunState.QUEUED, if_version=1, reason="too late", actor="scheduler")
    names = [event.name for event in store.events(store.run(run_id).job_id).items]
    assert names == ["submitted", "cancel_requested"]


def test_jobs_are_listed_newest_first_page_by_page_and_by_state(store: Store) -> None:
    made = [store.create_job(JobSpec(name=f"job-{index}")) for index in range(7)]
    store.move(made[3].run_id, to=RunState.QUEUED, if_version=1, reason="", actor="scheduler")
    seen, cursor = [], None
    while True:
        page = store.jobs(limit=3, cursor=cursor)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [job.id for job in reversed(made)]
    assert [job.id for job in store.jobs(JobFilter(states=(RunState.QUEUED,))).items] == [made[3].id]


def test_ids_sort_by_time_and_are_safe_in_a_url() -> None:
    ids = [new_id("run") for _ in range(2000)]
    assert ids == sorted(set(ids))
    assert all(len(one) == 18 and one.replace("-", "").isalnum() for one in ids)


def test_the_migrations_make_the_very_tables_the_code_speaks_of(store: Store) -> None:
    with store.database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_a_store_opened_again_holds_what_it_held(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a b%20c' / 'twinstep.db'}"
    first = Store(url)
    job = first.create_job(SPEC)
    first.close()
    second = Store(url)
    assert second.job(job.id) == job
    second.close()


def test_a_database_is_its_owners_alone_also_one_that_was_not(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        for _ in range(2):
            store = Store(f"sqlite:///{tmp_path}/new/twinstep.db")
            store.create_job(SPEC)
            files = sorted((tmp_path / "new").iterdir())
            assert {path.name for path in files} >= {"twinstep.db", "twinstep.db-wal"}
            assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
            store.close()
            (tmp_path / "new" / "twinstep.db").chmod(0o666)
    finally:
        os.umask(mask)


@pytest.mark.parametrize("make", ["under-a-file", "a-directory", "not-a-database", "newer"])
def test_a_database_that_cannot_be_used_is_refused_with_its_path_and_a_remedy(tmp_path: Path, make: str) -> None:
    path = tmp_path / "twinstep.db"
    if make == "under-a-file":
        path.write_text("a file")
        path = path / "twinstep.db"
    elif make == "a-directory":
        path.mkdir()
    elif make == "not-a-database":
        path.write_text("no database, only words; " * 100)
    else:
        store = Store(f"sqlite:///{path}")
        with store.database.write() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        store.close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UnavailableError) as caught:
        Store(f"sqlite:///{path}")
    assert sorted(tmp_path.rglob("*")) == before
    assert str(path.parent) in caught.value.problem
    assert caught.value.remedy


def test_a_step_down_of_the_tables_keeps_what_hangs_on_runs(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/twinstep.db")
    store = Store(f"sqlite:///{tmp_path}/twinstep.db")
    store.create_job(SPEC)
    with database.write() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(store_module.__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        command.downgrade(config, "0003")
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM events")).scalar_one() == 1
        assert connection.execute(text("SELECT count(*) FROM runs")).scalar_one() == 1
    store.close()
    database.close()
