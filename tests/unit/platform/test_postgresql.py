"""What only a PostgreSQL server can do to a store: several control planes, lost connections, full disks, passwords."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from bench.postgres import Server, postgres, programs
from twinstep.cli.app import run
from twinstep.platform.settings import Settings
from twinstep.platform.store import troubles
from twinstep.platform.store.database import Database, parse_url, shown
from twinstep.platform.store.store import Store
from twinstep.platform.store.troubles import REMEDIES, TRIES, TransientError, again, remedy
from twinstep.platform.store.users import Users
from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import DEFAULT_PROJECT, Role
from twinstep.spec.states import RunState

DATABASES = ("postgresql",)
SPEC = JobSpec(name="a-job")


@pytest.fixture
def two(database_url: str) -> Iterator[tuple[Store, Store]]:
    """The stores of two control planes on one database."""
    with closing(Store(database_url)) as one, closing(Store(database_url)) as other:
        yield one, other


def empty_database(server: Server, name: str) -> str:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {name}")
    return server.url(name)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)

    def one(number: int) -> Any:
        barrier.wait(timeout=20)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_control_planes_that_start_at_once_make_the_tables_once(server: Server) -> None:
    url = empty_database(server, "started_at_once")
    with ExitStack() as stack:
        stores = at_once(4, lambda number: stack.enter_context(closing(Store(url))))
        job = stores[0].create_job(SPEC)
        assert [store.job(job.id) for store in stores[1:]] == [job] * 3


def test_of_two_control_planes_that_move_a_run_at_one_version_one_wins(two: tuple[Store, Store]) -> None:
    for _ in range(10):
        run_id = two[0].create_job(SPEC).run_id

        def move(number: int, run_id: str = run_id) -> bool:
            return two[number % 2].move(run_id, to=RunState.QUEUED, if_version=1, reason="a race", actor="scheduler")

        assert sorted(at_once(6, move)) == [False] * 5 + [True]
        assert (two[1].run(run_id).state, two[1].run(run_id).version) == (RunState.QUEUED, 2)


def test_one_key_sent_to_two_control_planes_at_once_makes_one_job(two: tuple[Store, Store]) -> None:
    for round_ in range(5):
        found = at_once(6, lambda number, key=f"key-{round_}": two[number % 2].create_job_once(SPEC, key=key))
        assert len({job.id for job, _ in found}) == 1
        assert sum(new for _, new in found) == 1
    assert len(two[0].jobs().items) == 5


def test_a_follower_hears_of_what_another_control_plane_wrote(two: tuple[Store, Store], wait: Any) -> None:
    one, other = two
    run = one.run(one.create_job(SPEC).run_id)
    for version in range(1, 4):
        before = other.changes.count(run.job_id)
        one.move(run.id, to=RunState.QUEUED, if_version=1, reason="", actor="user") if version == 1 else None
        one.request_cancel(run.id, actor="user") if version == 2 else None
        one.set_reasons([(one.run(run.id), "because")]) if version == 3 else None
        wait(lambda before=before: other.changes.count(run.job_id) != before)


def test_after_a_silence_every_job_counts_as_changed(two: tuple[Store, Store], server: Server, wait: Any) -> None:
    one, other = two
    job = one.create_job(SPEC)
    wait(lambda: other.changes.count(job.id) > 0)
    before = other.changes.count(job.id)
    cut_all(server)
    wait(lambda: other.changes.count(job.id) != before)  # it connected again, and knows of nothing in between
    heard = other.changes.count(job.id)
    one.request_cancel(job.run_id, actor="user")
    wait(lambda: other.changes.count(job.id) != heard)


def cut_all(server: Server) -> None:
    """End every connection of every control plane, as a server that is started again does."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'twinstep%'"
        )


def test_connections_that_are_cut_between_two_transactions_are_never_noticed(store: Store, server: Server) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(store.create_job(SPEC).id)
        cut_all(server)
    assert [job.id for job in store.jobs().items] == jobs[::-1]


def test_a_connection_that_is_cut_within_a_transaction_has_its_work_done_again(store: Store, server: Server) -> None:
    run_id = store.create_job(SPEC).run_id
    tries = []

    @again
    def ask_to_stop() -> None:
        with store._database.write() as connection:
            connection.execute(text("UPDATE runs SET version = version + 1 WHERE id = :id"), {"id": run_id})
            tries.append(run_id)
            if len(tries) == 1:
                cut_all(server)
            connection.execute(text("UPDATE runs SET reason = 'twice' WHERE id = :id"), {"id": run_id})

    ask_to_stop()
    assert (len(tries), store.run(run_id).version, store.run(run_id).reason) == (2, 2, "twice")


def test_a_commit_that_may_have_arrived_is_not_done_again(store: Store, server: Server) -> None:
    tries = []

    @again
    def work() -> None:
        with store._database.write() as connection:
            connection.execute(text("SELECT 1"))
            tries.append(1)
            cut_all(server)

    with pytest.raises(UnavailableError) as caught:
        work()
    assert (len(tries), isinstance(caught.value, TransientError)) == (1, False)


def test_of_two_that_wait_for_each_other_both_come_to_their_end(store: Store) -> None:
    runs = [store.create_job(SPEC).run_id for _ in range(2)]
    met, tries = threading.Barrier(2), []

    @again
    def lock_both(number: int) -> None:
        with store._database.write() as connection:
            for place in (number, 1 - number):
                connection.execute(text("UPDATE runs SET version = version + 1 WHERE id = :id"), {"id": runs[place]})
                if place == number and len(tries) < 2:
                    tries.append(number)
                    met.wait(timeout=20)

    at_once(2, lock_both)
    assert [store.run(run_id).version for run_id in runs] == [3, 3]


def test_work_is_done_again_a_few_times_with_growing_pauses_and_then_given_up(monkeypatch: Any) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(troubles.time, "sleep", pauses.append)

    @again
    def never() -> None:
        raise TransientError("rolled back", remedy="")

    with pytest.raises(TransientError):
        never()
    assert len(pauses) == TRIES - 1
    assert all(0.02 < pause < 1 for pause in pauses)
    assert pauses[-1] > pauses[0]


def test_a_reader_sees_one_moment(two: tuple[Store, Store]) -> None:
    one, other = two
    with one._database.read() as connection:
        count = text("SELECT count(*) FROM jobs")
        assert connection.execute(count).scalar_one() == 0
        other.create_job(SPEC)
        assert connection.execute(count).scalar_one() == 0
        with pytest.raises(Exception, match="read-only"):
            connection.execute(text("DELETE FROM jobs"))
        connection.rollback()
    assert len(one.jobs().items) == 1


def test_a_server_that_is_not_there_is_told_of_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        Store(f"postgresql://someone:hunter2@/twinstep?host={tmp_path}")
    assert "hunter2" not in str(caught.value)
    assert str(tmp_path).replace("/", "%2F") in caught.value.problem
    assert caught.value.remedy == REMEDIES["08"]


def test_a_database_that_is_not_there_is_told_of_with_what_to_do(server: Server) -> None:
    with pytest.raises(UnavailableError, match="does not exist") as caught:
        Store(server.url("nobody_made_it"))
    assert caught.value.remedy == REMEDIES["3D"]


@pytest.mark.parametrize(
    ("code", "key"),
    [("53100", "53100"), ("53200", "53"), ("57P01", "57P"), ("28P01", "28"), ("08006", "08"), (None, "08")],
)
def test_each_trouble_has_its_remedy(code: str | None, key: str) -> None:
    assert remedy("postgresql", code) == REMEDIES[key]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@h:5432/n",
        "postgres://u:hunter2@h/n",
        "postgresql+psycopg://u@h/n?password=hunter2",
        "postgresql://u@h/n?sslpassword=hunter2&host=/x",
    ],
)
def test_no_password_is_ever_shown(url: str, tmp_path: Path) -> None:
    assert "hunter2" not in shown(parse_url(url))
    assert parse_url(url).get_backend_name() == "postgresql"
    assert "hunter2" not in repr(Settings(data_dir=tmp_path, database_url=url))


@pytest.mark.parametrize(
    "url", ["hunter2", "mysql://u:hunter2@h/n", "://hunter2", "postgresql://u:hunter2@h:port/n", ""]
)
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        Database(url)
    assert "hunter2" not in str(caught.value)
    assert "postgresql://" in caught.value.remedy


def test_a_newer_control_planes_tables_are_refused(store: Store, database_url: str) -> None:
    with store._database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UnavailableError, match="not ones this version knows"):
        Store(database_url)


def test_every_postgresql_that_is_installed_here_will_do(tmp_path: Path, monkeypatch: Any) -> None:
    if len(programs()) < 2:
        pytest.skip("one PostgreSQL is installed, and the other tests use it")
    other = programs()[1]
    monkeypatch.setenv("TWINSTEP_TEST_POSTGRES", str(other))
    with postgres() as server, closing(Store(server.url())) as store:
        assert store.job(store.create_job(SPEC).id).name == "a-job"
        home = server.sockets
    assert not home.exists()


def test_the_command_that_migrates_makes_the_tables_and_says_where_without_the_password(
    server: Server, capsys: Any
) -> None:
    url = empty_database(server, "migrated_apart")
    assert run(["migrate", "--database-url", url]) == 0
    assert "up to date" in capsys.readouterr().out
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_of_two_who_make_a_user_a_member_at_once_both_succeed_and_one_role_stands(two: tuple[Store, Store]) -> None:
    users = [Users(store.database) for store in two]
    for number in range(10):
        roles = at_once(
            4,
            lambda each, user=f"user-{number}": (
                users[each % 2].set_member(DEFAULT_PROJECT, user, (Role.VIEWER, Role.SUBMITTER)[each % 2]).role
            ),
        )
        (member,) = [each for each in users[0].members(DEFAULT_PROJECT) if each.user == f"user-{number}"]
        assert member.role in roles
