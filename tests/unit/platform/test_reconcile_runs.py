"""The reconciler over real processes: crashes at any point, the queue, failures of one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import update

from twinstep.platform.scheduler import reconcile, rundir
from twinstep.platform.scheduler.decide import NEEDS_MODULES
from twinstep.platform.scheduler.explain import explain
from twinstep.platform.scheduler.local import LocalBackend
from twinstep.platform.scheduler.reconcile import Reconciler
from twinstep.platform.scheduler.runnable import check_runnable
from twinstep.platform.settings import Settings, default_data_dir
from twinstep.platform.store.attempts import Attempts, NewAttempt
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import JobRow
from twinstep.spec.errors import SpecError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.spec.states import FINAL, RunState


class Crash(BaseException):
    """The control plane is killed here."""


class Plane:
    """Store, backend and reconciler, driven by hand; `again` is the control plane after a restart."""

    def __init__(self, settings: Settings, *, parallel: int = 1) -> None:
        self.settings = settings
        self.store = Store(settings.database)
        self.backend = LocalBackend(settings.runs_dir, command=settings.worker_command, api_url="http://127.0.0.1:9")
        self.reconciler = Reconciler(
            self.store,
            self.backend,
            max_parallel_runs=parallel,
            runs_modules=settings.runs_modules,
            every_seconds=0.05,
        )

    def close(self) -> None:
        self.backend.let_go()
        self.store.close()

    def passes_until(self, run_id: str, *states: RunState, wait: Callable[..., object]) -> None:
        def check() -> bool:
            self.reconciler.run_once()
            return self.store.run(run_id).state in states

        wait(check)

    def starts(self, run_id: str) -> int:
        path = self.settings.runs_dir / run_id / "starts"
        return len(path.read_text().split()) if path.exists() else 0


@pytest.fixture
def planes(settings: Settings, wait) -> Iterator[Callable[..., Plane]]:
    made: list[Plane] = []

    def make(**options: int) -> Plane:
        made.append(Plane(settings, **options))
        return made[-1]

    yield make
    last = make()
    for run in last.store.live_runs():
        last.store.request_cancel(run.id, actor="user")
        last.passes_until(run.id, *FINAL, wait=wait)
    for plane in made:
        plane.close()


POINTS = [
    (part, name, when, nth)
    for part, name, calls in [
        ("backend", "prepare", 1),
        ("store", "move", 3),
        ("backend", "launch", 1),
        ("store", "ingest", 1),
    ]
    for nth in range(1, calls + 1)
    for when in ("before", "after")
]


@pytest.mark.parametrize(("part", "name", "when", "nth"), POINTS)
def test_a_control_plane_killed_anywhere_neither_loses_a_run_nor_runs_it_twice(
    planes, wait, part: str, name: str, when: str, nth: int
) -> None:
    plane = planes()
    job = plane.store.create_job(JobSpec(name="reports-4"))
    calls = 0
    whole = getattr(getattr(plane, part), name)

    def broken(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            raise Crash
        result = whole(*args, **options)
        if calls == nth:
            raise Crash
        return result

    setattr(getattr(plane, part), name, broken)
    with pytest.raises(Crash):
        plane.passes_until(job.run_id, *FINAL, wait=wait)
    plane = planes()
    plane.passes_until(job.run_id, *FINAL, wait=wait)
    run = plane.store.run(job.run_id)
    assert (run.state, run.acked_seq) == (RunState.SUCCEEDED, 5)
    assert [point.step for point in plane.store.metrics(job.run_id).items] == [1, 2, 3, 4]
    assert plane.starts(job.run_id) == 1


@pytest.mark.parametrize("how", ["--data-dir", "TWINSTEP_DATA_DIR", "~"])
def test_a_run_comes_to_its_end_however_the_data_directory_was_named(
    settings: Settings, wait, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {"--data-dir": Path("./data"), "TWINSTEP_DATA_DIR": default_data_dir({"TWINSTEP_DATA_DIR": "data"})}
    plane = Plane(replace(settings, data_dir=named.get(how, Path("~/data"))))
    try:
        job = plane.store.create_job(JobSpec(name="reports-2"))
        plane.passes_until(job.run_id, *FINAL, wait=wait)
        run = plane.store.run(job.run_id)
        assert (run.state, run.acked_seq) == (RunState.SUCCEEDED, 3), run.reason
    finally:
        plane.close()
    assert (tmp_path / "data" / "runs" / job.run_id / "exit.json").exists()


def test_a_failed_run_says_its_exit_code_and_the_last_line_of_its_log(planes, wait) -> None:
    plane = planes()
    job = plane.store.create_job(JobSpec(name="crashes"))
    plane.passes_until(job.run_id, *FINAL, wait=wait)
    run = plane.store.run(job.run_id)
    assert run.state is RunState.FAILED
    assert run.reason == "its worker ended with exit code 3: Traceback: the tables do not fit"


def test_only_so_many_runs_are_live_and_the_others_wait_in_order(planes, wait) -> None:
    plane = planes(parallel=2)
    jobs = [plane.store.create_job(JobSpec(name="sleeps")) for _ in range(4)]
    for _ in range(4):
        plane.reconciler.run_once()
    states = [plane.store.run(job.run_id).state for job in jobs]
    assert states == [RunState.STARTING] * 2 + [RunState.QUEUED] * 2
    reasons = [plane.store.run(job.run_id).reason for job in jobs[2:]]
    assert reasons == ["waits for 2 runs ahead", "waits for 3 runs ahead"]
    plane.store.request_cancel(jobs[0].run_id, actor="user")
    plane.passes_until(jobs[0].run_id, RunState.CANCELLED, wait=wait)
    plane.passes_until(jobs[2].run_id, RunState.STARTING, wait=wait)
    plane.reconciler.run_once()
    assert plane.store.run(jobs[3].run_id).reason == "waits for 2 runs ahead"


def test_control_planes_that_share_a_queue_say_the_same_of_those_who_wait(planes, settings, wait) -> None:
    """Each has slots of its own, and so another number of runs of its own."""
    plane = planes(parallel=1)
    jobs = [plane.store.create_job(JobSpec(name="sleeps")) for _ in range(4)]
    plane.store.move(jobs[0].run_id, to=RunState.QUEUED, if_version=1, reason="", actor="other")
    plane.store.move(jobs[0].run_id, to=RunState.STARTING, if_version=2, reason="", actor="other", home="another")
    for _ in range(3):
        plane.reconciler.run_once()
    mine = [plane.store.run(job.run_id) for job in jobs]
    assert [run.state for run in mine] == [RunState.STARTING] * 2 + [RunState.QUEUED] * 2
    assert [run.reason for run in mine[2:]] == ["waits for 2 runs ahead", "waits for 3 runs ahead"]
    none = Reconciler(plane.store, plane.backend, max_parallel_runs=0, runs_modules=True, every_seconds=0.05)
    none._backend = LocalBackend(settings.data_dir / "third", command=("false",), api_url="http://127.0.0.1:9")
    none.run_once()
    assert [plane.store.run(job.run_id).reason for job in jobs[2:]] == [run.reason for run in mine[2:]]
    with plane.store.database.write() as connection:  # its control plane is gone for good
        connection.exec_driver_sql("UPDATE runs SET home = NULL, state = 'cancelled' WHERE home = 'another'")


def test_a_control_plane_that_runs_no_users_code_starts_none_that_another_took(planes, settings, wait) -> None:
    """Whoever listens where others submit shares a database with one on loopback, which takes such jobs."""
    taker = planes()
    model = {"kind": "module", "factory": "nobody_has_this:build"}
    spec = validate_spec({"name": "reports-1", "model": model})
    own, none, built_in = (taker.store.create_job(each) for each in (spec, spec, JobSpec(name="reports-1")))
    refuses = Plane(replace(settings, modules=False, data_dir=settings.data_dir / "shared"))
    refuses.store.close()
    refuses.store = refuses.reconciler._store = taker.store
    with pytest.raises(SpecError):
        check_runnable(spec, refuses.settings)
    refuses.passes_until(built_in.run_id, *FINAL, wait=wait)
    refuses.reconciler.run_once()
    run = taker.store.run(own.run_id)
    assert (run.state, run.reason) == (RunState.QUEUED, NEEDS_MODULES)
    assert explain(taker.store.job(own.id)).cause == "needs_modules"
    taker.store.request_cancel(none.run_id, actor="user")
    refuses.reconciler.run_once()
    assert taker.store.run(none.run_id).state is RunState.CANCELLED
    taker.passes_until(own.run_id, *FINAL, wait=wait)
    assert [plane.starts(own.run_id) for plane in (taker, refuses)] == [1, 0]


def test_of_runs_that_wait_control_planes_that_differ_do_not_write_by_turns(planes, settings) -> None:
    taker = planes()
    taker.store.create_job(JobSpec(name="sleeps"))
    own = taker.store.create_job(
        validate_spec({"name": "own", "model": {"kind": "module", "factory": "nobody_has_this:build"}})
    )
    refuses = Plane(replace(settings, modules=False, data_dir=settings.data_dir / "shared"))
    refuses.store.close()
    refuses.store = refuses.reconciler._store = taker.store
    said = []
    for plane in (refuses, taker, refuses, taker, refuses):
        plane.reconciler.run_once()
        said.append(taker.store.run(own.run_id).reason)
    assert said == [NEEDS_MODULES, *["waits for 1 run ahead"] * 4]
    refuses.backend.let_go()


def test_a_queued_run_is_cancelled_without_ever_starting(planes, wait) -> None:
    plane = planes()
    first = plane.store.create_job(JobSpec(name="sleeps"))
    second = plane.store.create_job(JobSpec(name="sleeps"))
    plane.passes_until(first.run_id, RunState.STARTING, wait=wait)
    plane.store.request_cancel(second.run_id, actor="user")
    plane.reconciler.run_once()
    assert plane.store.run(second.run_id).state is RunState.CANCELLED
    assert plane.starts(second.run_id) == 0


def test_a_spec_that_this_version_cannot_read_fails_its_run_with_that_reason(planes, wait) -> None:
    plane = planes()
    job = plane.store.create_job(JobSpec(name="reports-1"))
    with plane.store._database.write() as connection:
        connection.execute(update(JobRow).values(spec=job.spec | {"hologram": 1}))
    plane.passes_until(job.run_id, *FINAL, wait=wait)
    run = plane.store.run(job.run_id)
    assert (run.state, "can read" in run.reason) == (RunState.FAILED, True)


def test_a_launch_that_fails_holds_its_slot_and_is_given_up_after_three(planes, wait, monkeypatch) -> None:
    plane = planes()
    first, second = (plane.store.create_job(JobSpec(name="reports-1")) for _ in range(2))
    monkeypatch.setattr("sys.executable", "/no/such/python")
    states = []
    for _ in range(6):
        plane.reconciler.run_once()
        states.append((plane.store.run(first.run_id).state, plane.store.run(second.run_id).state))
    assert max(sum(state is RunState.STARTING for state in both) for both in states) == 1
    failed = plane.store.run(first.run_id)
    assert failed.state is RunState.FAILED
    assert "could not be started in 3 tries" in failed.reason


@pytest.mark.parametrize("parallel", [1, 2])
def test_what_goes_wrong_with_one_run_does_not_hold_up_another(planes, wait, parallel: int) -> None:
    plane = planes(parallel=parallel)
    bad = plane.store.create_job(JobSpec(name="sleeps"))
    good = plane.store.create_job(JobSpec(name="reports-1"))
    prepare = plane.backend.prepare

    def breaks(run_id: str, spec: JobSpec) -> str:
        if run_id == bad.run_id:
            raise UnavailableError("no room on the disk", remedy="make some")
        return prepare(run_id, spec)

    plane.backend.prepare = breaks
    plane.passes_until(good.run_id, RunState.SUCCEEDED, wait=wait)
    plane.reconciler.run_once()
    waiting = plane.store.run(bad.run_id)
    assert waiting.state is RunState.QUEUED
    assert "no room on the disk" in waiting.reason
    plane.backend.prepare = prepare
    plane.passes_until(bad.run_id, RunState.STARTING, wait=wait)


def test_a_run_whose_directory_was_taken_away_fails_and_is_not_started_again(planes, wait, tmp_path: Path) -> None:
    plane = planes()
    job = plane.store.create_job(JobSpec(name="reports-1"))
    plane.store.move(job.run_id, to=RunState.QUEUED, if_version=1, reason="", actor="scheduler")
    plane.store.move(job.run_id, to=RunState.STARTING, if_version=2, reason="", actor="scheduler")
    plane.store.move(job.run_id, to=RunState.RUNNING, if_version=3, reason="", actor="worker")
    plane.reconciler.run_once()
    assert plane.store.run(job.run_id).state is RunState.FAILED
    assert plane.starts(job.run_id) == 0


def test_a_silent_worker_is_heard_through_its_spool(planes, wait, monkeypatch) -> None:
    monkeypatch.setattr("twinstep.platform.scheduler.reconcile.SILENCE_S", 0.0)
    plane = planes()
    job = plane.store.create_job(JobSpec(name="reports-40"))
    plane.passes_until(job.run_id, RunState.RUNNING, wait=wait)  # its API URL leads nowhere
    assert plane.store.run(job.run_id).acked_seq < 41
    plane.passes_until(job.run_id, RunState.SUCCEEDED, wait=wait)
    assert plane.store.run(job.run_id).acked_seq == 41


def test_a_silent_workers_spool_is_parsed_once_however_often_it_is_looked_at(planes, wait, monkeypatch) -> None:
    monkeypatch.setattr("twinstep.platform.scheduler.reconcile.SILENCE_S", -1.0)
    plane = planes()
    job = plane.store.create_job(JobSpec(name="sleeps"))
    plane.passes_until(job.run_id, RunState.STARTING, wait=wait)
    wait(lambda: plane.starts(job.run_id) == 1)
    spool = plane.settings.runs_dir / job.run_id / "spool.jsonl"
    parsed: list[int] = []
    validate = rundir._RECORD.validate_json
    monkeypatch.setattr(rundir, "_RECORD", SimpleNamespace(validate_json=lambda at: parsed.append(1) or validate(at)))

    def spools(plane: Plane, first: int, count: int) -> int:
        with spool.open("a") as file:
            file.writelines(
                json.dumps({"kind": "metric", "seq": seq, "time": 0, "step": seq, "values": {"loss": 1}}) + "\n"
                for seq in range(first, first + count)
            )
        parsed.clear()
        for _ in range(3):
            plane.reconciler.run_once()
        return len(parsed)

    assert [spools(plane, first, 20) for first in range(1, 101, 20)] == [20] * 5
    assert plane.store.run(job.run_id).acked_seq == 100
    again = planes()  # after a restart from the beginning, once
    assert [spools(again, first, 20) for first in range(101, 161, 20)] == [120, 20, 20]
    # A gap is waited for, and what follows it is not lost: it is stored when the gap is filled, or at the end.
    spools(again, 162, 1500)
    assert again.store.run(job.run_id).acked_seq == 160
    again.store.request_cancel(job.run_id, actor="user")
    again.passes_until(job.run_id, *FINAL, wait=wait)
    assert again.store.run(job.run_id).acked_seq == 1661
    lost = [event.data for event in again.store.events(job.id).items if event.name == "reports_lost"]
    assert lost == [{"first": 161, "last": 161}]


def test_looking_again_at_what_is_settled_changes_nothing(planes, wait) -> None:
    plane = planes()
    job = plane.store.create_job(JobSpec(name="sleeps"))
    plane.passes_until(job.run_id, RunState.STARTING, wait=wait)
    wait(lambda: plane.starts(job.run_id) == 1)
    before = plane.store.run(job.run_id), plane.store.events(job.id)
    for _ in range(5):
        plane.reconciler.run_once()
    assert (plane.store.run(job.run_id), plane.store.events(job.id)) == before


def elsewhere(plane: Plane, settings: Settings, tmp_path: Path) -> Plane:
    """Another control plane, with a data directory of its own, on the same database."""
    return Plane(replace(settings, data_dir=tmp_path / "elsewhere", database_url=plane.settings.database))


def test_of_two_control_planes_on_one_database_each_looks_after_the_runs_it_started(
    planes, settings: Settings, tmp_path: Path, wait
) -> None:
    one = planes(parallel=2)
    other = elsewhere(one, settings, tmp_path)
    jobs = [one.store.create_job(JobSpec(name=f"reports-{2 + number}")) for number in range(4)]

    def both_pass() -> bool:
        one.reconciler.run_once()
        other.reconciler.run_once()
        return all(one.store.run(job.run_id).state in FINAL for job in jobs)

    wait(both_pass)
    runs = [one.store.run(job.run_id) for job in jobs]
    assert {run.state for run in runs} == {RunState.SUCCEEDED}
    assert [one.starts(run.id) + other.starts(run.id) for run in runs] == [1] * 4
    assert {run.home for run in runs} <= {one.backend.home(), other.backend.home()}
    assert one.backend.home() != other.backend.home()
    other.close()


def test_a_run_whose_control_plane_is_gone_can_still_be_given_up(
    planes, settings: Settings, tmp_path: Path, monkeypatch
) -> None:
    one = planes()
    other = elsewhere(one, settings, tmp_path)
    run_id = one.store.create_job(JobSpec(name="reports-1")).run_id
    for version, to in ((1, RunState.QUEUED), (2, RunState.STARTING)):
        other.store.move(run_id, to=to, if_version=version, reason="", actor="scheduler", home=other.backend.home())
    one.reconciler.run_once()
    assert one.store.run(run_id).state is RunState.STARTING
    one.store.request_cancel(run_id, actor="user")
    one.reconciler.run_once()
    assert one.store.run(run_id).state is RunState.STARTING
    monkeypatch.setattr(reconcile, "GONE_S", -1.0)
    one.reconciler.run_once()
    assert (one.store.run(run_id).state, one.starts(run_id)) == (RunState.CANCELLED, 0)
    other.close()


def followed(plane: Plane, job_id: str) -> str:
    """Store another run of a job, as a resize does, and return its id."""
    run = plane.store.runs(job_id)[-1]
    attempts = Attempts(plane.store.database, changed=lambda _: None)
    attempts.add(job_id, NewAttempt(verb="resized", after=run.id, version=run.version), actor="ada", key=None, asked={})
    return plane.store.runs(job_id)[-1].id


def test_two_runs_of_a_job_never_run_at_once_whichever_control_plane_has_the_first(
    planes, settings: Settings, tmp_path: Path, wait
) -> None:
    one = planes(parallel=4)
    other = elsewhere(one, settings, tmp_path)
    job = one.store.create_job(JobSpec(name="sleeps"))
    one.passes_until(job.run_id, RunState.STARTING, wait=wait)
    second = followed(one, job.id)
    for _ in range(4):
        other.reconciler.run_once()
    assert one.store.run(job.run_id).state is RunState.STARTING
    assert one.store.run(second).state is RunState.QUEUED
    one.passes_until(job.run_id, RunState.CANCELLED, wait=wait)
    other.passes_until(second, RunState.STARTING, wait=wait)
    one.store.request_cancel(second, actor="user")
    other.passes_until(second, *FINAL, wait=wait)
    other.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_two_runs_of_a_job_that_both_wait_are_not_started_in_one_pass(planes, wait, breaks: bool) -> None:
    plane = planes(parallel=4)
    job = plane.store.create_job(JobSpec(name="sleeps"))
    runs = [job.run_id, followed(plane, job.id)]
    with plane.store.database.write() as connection:  # nobody stops the first
        connection.exec_driver_sql("UPDATE runs SET cancel_requested_at = NULL")
    plane.reconciler.run_once()
    assert [plane.store.run(run_id).state for run_id in runs] == [RunState.QUEUED] * 2
    launch = plane.backend.launch

    def broken(*args: object, **options: object) -> None:
        raise UnavailableError("no more processes", remedy="end some")

    plane.backend.launch = broken if breaks else launch
    plane.reconciler.run_once()
    assert [plane.store.run(run_id).state for run_id in runs] == [RunState.STARTING, RunState.QUEUED]
    plane.backend.launch = launch


def test_a_place_keeps_its_id(settings: Settings) -> None:
    made = [LocalBackend(settings.runs_dir, command=(), api_url="") for _ in range(3)]
    assert len({backend.home() for backend in made}) == 1
    assert made[0].home()
    assert [path.name for path in settings.runs_dir.iterdir()] == [".home"]


def test_a_run_that_waits_for_a_slot_too_long_fails_and_the_others_wait_on(
    planes, wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = planes(parallel=0)
    short, long = (
        plane.store.create_job(JobSpec.model_validate({"name": "reports-1", "runtime": {"max_wait_seconds": seconds}}))
        for seconds in (60, 600)
    )
    plane.reconciler.run_once()
    plane.reconciler.run_once()
    assert {plane.store.run(job.run_id).state for job in (short, long)} == {RunState.QUEUED}
    now = reconcile.time.monotonic
    monkeypatch.setattr(reconcile.time, "monotonic", lambda: now() + 61)
    plane.reconciler.run_once()
    run = plane.store.run(short.run_id)
    assert (run.state, run.waiting_since) == (RunState.FAILED, None)
    assert "runtime.max_wait_seconds is 60" in run.reason
    assert plane.store.run(long.run_id).state is RunState.QUEUED
    assert plane.starts(short.run_id) == 0


@pytest.mark.parametrize("jump", [90_000, -90_000])
@pytest.mark.parametrize("off", [False, True])
def test_a_clock_that_is_set_and_a_control_plane_that_was_off_end_no_wait(
    planes, monkeypatch: pytest.MonkeyPatch, jump: float, off: bool
) -> None:
    plane = planes(parallel=0)
    job = plane.store.create_job(JobSpec.model_validate({"name": "long", "runtime": {"max_wait_seconds": 3600}}))
    plane.reconciler.run_once()
    plane.reconciler.run_once()
    now, steady = reconcile.time.time, reconcile.time.monotonic
    monkeypatch.setattr(reconcile.time, "time", lambda: now() + jump)
    if off:
        monkeypatch.setattr(reconcile.time, "monotonic", lambda: steady() + 90_000)
        plane = planes(parallel=0)
    plane.reconciler.run_once()
    assert plane.store.run(job.run_id).state is RunState.QUEUED
    monkeypatch.setattr(reconcile.time, "monotonic", lambda: steady() + 90_000 + 3601)
    plane.reconciler.run_once()
    assert plane.store.run(job.run_id).state is RunState.FAILED, "the time that has passed is counted still"


def test_a_run_that_can_start_is_not_too_late(planes, wait, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = planes(parallel=0)
    job = plane.store.create_job(JobSpec.model_validate({"name": "reports-1", "runtime": {"max_wait_seconds": 60}}))
    plane.reconciler.run_once()
    now = reconcile.time.monotonic
    monkeypatch.setattr(reconcile.time, "monotonic", lambda: now() + 61)
    plane.reconciler._slots = 1
    plane.passes_until(job.run_id, RunState.STARTING, *FINAL, wait=wait)
    assert plane.store.run(job.run_id).state is not RunState.FAILED
