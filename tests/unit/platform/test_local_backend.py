"""Real processes under the local backend: started once, found again, stopped whole, and nothing else touched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinstep.platform.scheduler.decide import Seen
from twinstep.platform.scheduler.local import LocalBackend
from twinstep.platform.scheduler.procs import Process, kill_group_of_run
from twinstep.platform.settings import Settings
from twinstep.spec.job import JobSpec
from twinstep.spec.running import RuntimeSpec

SPEC = JobSpec(name="sleeps", runtime=RuntimeSpec(stop_grace_seconds=0.3))
Backends = Callable[[], LocalBackend]


@pytest.fixture
def backends(settings: Settings) -> Iterator[Backends]:
    """Make backends on one directory: each is a control plane started anew."""
    made: list[LocalBackend] = []

    def make() -> LocalBackend:
        made.append(LocalBackend(settings.runs_dir, command=settings.worker_command, api_url="http://127.0.0.1:9"))
        return made[-1]

    yield make
    for path in settings.runs_dir.glob("*/supervisor.json"):
        told = json.loads(path.read_text())
        for process in (Process.from_json(told["worker"]), Process.from_json(told)):
            if process:
                process.send(signal.SIGKILL)
    for backend in made:
        for run_id in list(backend._children):
            backend.forget(run_id)


def alive(backend: LocalBackend, run_id: str, wait: Callable[..., Any]) -> Process:
    """Wait until the worker runs; return it."""
    directory = backend.run_dir(run_id).path
    wait(lambda: (directory / "starts").exists() and backend.observe(run_id).seen is Seen.ALIVE)
    worker = Process.from_json(json.loads((directory / "supervisor.json").read_text())["worker"])
    assert worker is not None
    return worker


def has_sigterm(pid: int, kind: str) -> bool:
    """Say whether SIGTERM is in one of a process's sets of signals: SigIgn (ignored), ShdPnd (pending)."""
    (found,) = re.findall(rf"^{kind}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(found, 16) >> (signal.SIGTERM - 1) & 1)


def gone(pid: int) -> bool:
    return Process.of(pid) is None


def ended(backend: LocalBackend, run_id: str) -> Callable[[], bool]:
    return lambda: backend.observe(run_id).seen is Seen.EXITED


def test_a_run_is_absent_then_launching_then_alive_then_exited(backends: Backends, wait) -> None:
    backend = backends()
    assert backend.observe("run-a").seen is Seen.ABSENT
    backend.launch("run-a", SPEC)
    assert backend.observe("run-a").seen in (Seen.LAUNCHING, Seen.ALIVE)
    worker = alive(backend, "run-a", wait)
    worker.send(signal.SIGKILL)
    wait(ended(backend, "run-a"))
    sight = backend.observe("run-a")
    assert (sight.code, sight.signal, sight.stopped) == (None, "SIGKILL", None)


def test_starting_a_run_again_and_again_starts_one_worker(backends: Backends, wait) -> None:
    first, second, third = backends(), backends(), backends()
    for backend in (first, second, first, second):
        backend.launch("run-a", SPEC)
    alive(second, "run-a", wait)
    third.launch("run-a", SPEC)
    assert third._children["run-a"].wait(timeout=20) == 0  # turned away without harm
    starts = (first.run_dir("run-a").path / "starts").read_text().split()
    assert len(starts) == 1
    assert second.observe("run-a").seen is Seen.ALIVE


def test_a_new_control_plane_finds_a_run_and_stops_it(backends: Backends, wait) -> None:
    backends().launch("run-a", SPEC)
    other = backends()
    worker = alive(other, "run-a", wait)
    other.stop("run-a")
    wait(ended(other, "run-a"))
    sight = other.observe("run-a")
    assert (sight.signal, sight.stopped) == ("SIGTERM", "asked")
    assert not worker.alive()


def test_a_worker_that_does_not_listen_is_killed_with_all_it_started(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", SPEC.model_copy(update={"name": "stubborn"}))
    child_file = backend.run_dir("run-a").path / "child"
    wait(lambda: child_file.exists() and child_file.read_text())
    worker, child = alive(backend, "run-a", wait), int(child_file.read_text())
    wait(lambda: has_sigterm(worker.pid, "SigIgn") and has_sigterm(child, "SigIgn"))
    began = time.monotonic()
    backend.stop("run-a")
    backend.stop("run-a")  # asking twice does not shorten or renew the grace
    wait(ended(backend, "run-a"))
    assert 0.25 < time.monotonic() - began < 5
    assert backend.observe("run-a").signal == "SIGKILL"
    wait(lambda: gone(worker.pid) and gone(child))


def test_what_a_finished_worker_leaves_running_in_its_group_is_killed(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", SPEC.model_copy(update={"name": "leaves-a-child"}))
    wait(ended(backend, "run-a"))
    assert backend.observe("run-a").code == 0
    child = int((backend.run_dir("run-a").path / "child").read_text())
    wait(lambda: gone(child))


def test_a_time_limit_ends_a_run_and_says_so(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", JobSpec(name="sleeps", runtime=RuntimeSpec(max_seconds=0.3, stop_grace_seconds=5)))
    wait(ended(backend, "run-a"))
    assert backend.observe("run-a").stopped == "time_limit"


def test_a_killed_supervisor_takes_its_worker_along_and_counts_as_vanished(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", SPEC)
    worker = alive(backend, "run-a", wait)
    supervisor = Process.from_json(json.loads((backend.run_dir("run-a").path / "supervisor.json").read_text()))
    assert supervisor is not None
    supervisor.send(signal.SIGKILL)
    wait(lambda: backend.observe("run-a").seen is Seen.VANISHED)
    wait(lambda: not worker.alive())
    backend.launch("run-a", SPEC)  # nobody should; if somebody does, it is no second run
    backend._children["run-a"].wait(timeout=20)
    assert len((backend.run_dir("run-a").path / "starts").read_text().split()) == 1


def test_what_a_vanished_supervisor_left_is_swept_and_only_that(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", SPEC.model_copy(update={"name": "stubborn"}))
    child_file = backend.run_dir("run-a").path / "child"
    wait(lambda: child_file.exists() and child_file.read_text())
    alive(backend, "run-a", wait)
    supervisor = Process.from_json(json.loads((backend.run_dir("run-a").path / "supervisor.json").read_text()))
    assert supervisor is not None
    supervisor.send(signal.SIGKILL)
    wait(lambda: backend.observe("run-a").seen is Seen.VANISHED)
    child = int(child_file.read_text())
    assert not gone(child)
    assert backend.sweep("run-a") >= 1
    wait(lambda: gone(child))


def test_a_group_without_the_runs_mark_is_never_killed() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    try:
        assert kill_group_of_run(other.pid, "run-a") == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_pid_that_belongs_to_another_process_now_is_not_signalled(backends: Backends) -> None:
    backend = backends()
    directory = backend.run_dir("run-a")
    directory.prepare(SPEC)
    blocks = "import signal; signal.pthread_sigmask(0, [15]); print(flush=True); signal.pause()"
    other = subprocess.Popen([sys.executable, "-c", blocks], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()  # from here on a SIGTERM would be seen pending
        mine = Process.of(other.pid)
        assert mine is not None
        told = mine.to_json() | {"start_ticks": mine.start_ticks - 1, "worker": None}
        (directory.path / "supervisor.json").write_text(json.dumps(told))
        backend.stop("run-a")
        assert backend.observe("run-a").seen is Seen.VANISHED
        assert not has_sigterm(other.pid, "ShdPnd")
        other.send_signal(signal.SIGTERM)
        assert has_sigterm(other.pid, "ShdPnd")
    finally:
        other.kill()
        other.communicate()


def test_a_forbidden_run_never_starts_and_counts_as_ended(backends: Backends) -> None:
    backend = backends()
    backend.forbid("run-a", SPEC)
    backend.launch("run-a", SPEC)
    assert backend._children["run-a"].wait(timeout=20) == 0
    sight = backend.observe("run-a")
    assert (sight.seen, sight.stopped) == (Seen.EXITED, "asked")
    assert not (backend.run_dir("run-a").path / "starts").exists()


def test_a_run_that_is_up_cannot_be_forbidden(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", SPEC)
    alive(backend, "run-a", wait)
    backend.forbid("run-a", SPEC)
    assert backend.observe("run-a").seen is Seen.ALIVE


def test_a_worker_command_that_is_not_there_is_told_as_the_reason(settings: Settings, wait) -> None:
    backend = LocalBackend(settings.runs_dir, command=("/no/such/program",), api_url="")
    backend.launch("run-a", SPEC)
    wait(ended(backend, "run-a"))
    assert "/no/such/program" in (backend.observe("run-a").problem or "")
    backend.forget("run-a")


def test_a_runs_directory_is_its_owners_alone_and_keeps_its_token(backends: Backends) -> None:
    directory = backends().run_dir("run-a")
    first = directory.prepare(SPEC)
    assert directory.prepare(SPEC) == first
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert (directory.path / "token").stat().st_mode & 0o777 == 0o600
    assert len(directory.token()) >= 40


def test_a_supervisor_starts_without_any_package_of_others() -> None:
    code = (
        "import sys; import twinstep.platform.scheduler.supervise;"
        "print([m for m in ('pydantic', 'sqlalchemy', 'fastapi', 'psutil', 'asyncio', 'yaml') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_no_secret_is_an_argument_of_any_process(backends: Backends, wait) -> None:
    backend = backends()
    backend.launch("run-a", SPEC)
    alive(backend, "run-a", wait)
    token = backend.run_dir("run-a").token().encode()
    told = json.loads((backend.run_dir("run-a").path / "supervisor.json").read_text())
    for pid in (told["pid"], told["worker"]["pid"]):
        assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert os.environ.get("TWINSTEP_RUN_TOKEN") is None
