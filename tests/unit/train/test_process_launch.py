"""Processes of one run: their environment, whose end ends the others, signals, and what is left behind: nothing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinstep.spec.errors import UnavailableError
from twinstep.spec.words import EXIT_PEER_LOST
from twinstep.worker.train.launch import launch
from twinstep.worker.train.ranks import Ranks

LIMIT = 240.0  # seconds: a machine may be busy


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}"]


def launcher(code: str, *more: str) -> list[str]:
    """Return the command of a process that launches two."""
    call = f"launch({', '.join((repr(python(code)), '2', 'patience=0.1', *more))})"
    return [sys.executable, "-c", f"import sys; from twinstep.worker.train.launch import launch; sys.exit({call})"]


@contextlib.contextmanager
def in_a_group(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with a group of its own, of which nothing is left afterwards, whatever a test found."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_each_process_knows_where_it_stands(tmp_path: Path) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    code = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[n] for n in '{names}'.split()))"
    assert launch(python(code), 3) == 0
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [each[:5] for each in found] == [[str(r), "3", str(r), "3", "127.0.0.1"] for r in range(3)]
    (port,) = {int(each[5]) for each in found}
    assert 0 < port < 65536


def test_the_port_is_free_for_rank_0_to_listen_on() -> None:
    code = """
import socket
port = int(os.environ['MASTER_PORT'])
if rank == 0:
    with socket.create_server(('127.0.0.1', port)) as server:
        server.accept()[0].close()
else:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        try:
            socket.create_connection(('127.0.0.1', port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
"""
    assert launch(python(code), 2) == 0


def test_the_first_failure_ends_the_others_and_is_the_exit_code() -> None:
    said: list[str] = []
    code = "time.sleep(0 if rank == 1 else 600); sys.exit(7)"
    started = time.monotonic()
    assert launch(python(code), 3, patience=0.2, say=said.append) == 7
    assert time.monotonic() - started < LIMIT
    assert said == ["process 1 of this run ended with code 7; the others are stopped"]


@pytest.mark.parametrize(("late", "code"), [(0.0, 7), (0.5, 7), (600.0, 134)])
def test_who_was_ended_by_sigabrt_is_the_cause_only_where_nobody_else_fails(late: float, code: int) -> None:
    """As under JAX and NCCL: a process whose peer is gone is aborted, maybe before the peer has ended."""
    ends = f"os.abort() if rank == 1 else (time.sleep({late}), sys.exit(7))"
    assert launch(python(ends), 2, patience=5.0 if late < 600 else 0.2) == code


@pytest.mark.parametrize(("late", "missed"), [(0.5, 0.0), (0.0, 0.5)])
def test_a_crash_by_sigabrt_is_the_cause_though_another_process_missed_it(late: float, missed: float) -> None:
    said: list[str] = []
    ends = f"(time.sleep({late}), os.abort()) if rank == 1 else (time.sleep({missed}), sys.exit({EXIT_PEER_LOST}))"
    assert launch(python(ends), 2, patience=5.0, say=said.append) == 134
    assert "process 1 of this run ended with code 134" in said[-1]


def test_a_process_that_does_not_hear_is_killed(tmp_path: Path) -> None:
    code = f"""
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open({str(tmp_path / "ignoring")!r}, 'w').close()
    time.sleep(20)
    open({str(tmp_path / "outlived")!r}, 'w').close()
while not os.path.exists({str(tmp_path / "ignoring")!r}):
    time.sleep(0.02)
sys.exit(3)
"""
    assert launch(python(code), 2, patience=0.5) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["ignoring"]


def test_a_killed_process_counts_as_its_signal() -> None:
    assert (
        launch(python("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)"), 2, patience=0.2) == 137
    )


def test_a_signal_goes_on_to_all_and_each_takes_its_time(tmp_path: Path) -> None:
    code = f"""
def stop(*_):
    time.sleep(0.4 * rank)
    open(f'{tmp_path}/stopped{{rank}}', 'w').close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(f'{tmp_path}/up{{rank}}', 'w').close()
time.sleep(600)
"""
    with in_a_group(launcher(code)) as process:
        wait_for(tmp_path / "up0", tmp_path / "up1")
        process.terminate()
        assert process.wait(LIMIT) == 75
    assert sorted(each.name for each in tmp_path.glob("stopped*")) == ["stopped0", "stopped1"]


def test_no_signal_changes_the_exit_code_of_a_process_that_ends_with_its_ranks(tmp_path: Path) -> None:
    code = f"""
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
open(f'{tmp_path}/up{{rank}}', 'w').close()
time.sleep(0.2)
sys.exit(75)
"""
    with in_a_group(launcher(code, "ends_process=True")) as process:
        wait_for(tmp_path / "up0", tmp_path / "up1")
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            for number in (signal.SIGTERM, signal.SIGHUP):
                process.send_signal(number)
            time.sleep(0.001)
        assert process.wait(LIMIT) == 75


def test_a_signal_that_comes_before_all_are_started_reaches_all(tmp_path: Path) -> None:
    code = f"""
def stop(*_):
    open(f'{tmp_path}/stopped{{rank}}', 'w').close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(f'{tmp_path}/up{{rank}}', 'w').close()
time.sleep(600)
"""
    early = f"""
import os, signal, sys, time
from twinstep.worker.train import launch as module
start = module._Processes.start
def start_slowly(self, rank, command, environment):
    start(self, rank, command, environment)
    while rank == 0 and not os.path.exists('{tmp_path}/up0'):
        time.sleep(0.02)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
module._Processes.start = start_slowly
sys.exit(module.launch({python(code)!r}, 2, patience=0.1))
"""
    with in_a_group([sys.executable, "-c", early]) as process:
        try:
            # The second may be told before it can listen, and ends by that.
            assert process.wait(LIMIT) in (75, 128 + signal.SIGTERM)
        finally:
            process.kill()
    assert (tmp_path / "stopped0").exists()


def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    code = f"""
open(f'{tmp_path}/.{{rank}}', 'w').write(str(os.getpid()))
os.rename(f'{tmp_path}/.{{rank}}', f'{tmp_path}/{{rank}}')
time.sleep(600)
"""
    with in_a_group(launcher(code)) as process:
        wait_for(tmp_path / "0", tmp_path / "1")
        handles = [os.pidfd_open(int((tmp_path / str(rank)).read_text())) for rank in range(2)]
        process.kill()
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(LIMIT * 1e3), "a process outlived its launcher"
        os.close(handle)


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + LIMIT
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK is 'x'"),
    ],
)
def test_half_an_environment_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        Ranks.from_environment(environment)


def test_nothing_said_means_alone_and_what_is_said_comes_back() -> None:
    assert Ranks.from_environment({}) == Ranks()
    some = Ranks(rank=3, size=8, local=1, on_host=2, address="host", port=29500)
    assert Ranks.from_environment(some.as_environment()) == some
    assert Ranks.from_environment({"MASTER_ADDR": "host", "MASTER_PORT": "1"}) == Ranks()
