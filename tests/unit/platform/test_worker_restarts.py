"""Workers that die, hang or are asked to go, under a real supervisor: started again where granted, and told why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinstep.platform.scheduler.decide import Do, Seen, Sight, Wanted, decide
from twinstep.platform.scheduler.local import LocalBackend
from twinstep.spec.job import CheckpointSpec, JobSpec
from twinstep.spec.states import RunState

BEAT = "open('heartbeat', 'w').write(json.dumps({'phase': phase, 'step': step}))"
WORKER = f"""
import json, os, signal, sys, time
told = json.loads(os.environ.get('TWINSTEP_RESTART', 'null'))
with open('starts', 'a') as starts: starts.write(json.dumps(told) + chr(10))
def beat(phase, step): {BEAT}
first = told is None
"""
DIES = "beat('training', 7)\nif first: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(0)"
FAILS = "sys.exit(1)"
MENDS = "sys.exit(2)"
HANGS = "beat('training', 5)\nif first:\n    while True: time.sleep(60)\nsys.exit(0)"
DEAF = """
def told_to_stop(*_): open('asked', 'w').close()
signal.signal(signal.SIGTERM, told_to_stop)
beat('training', 5)
while True: time.sleep(60)
"""
COMPILES = "beat('compiling', 0)\ntime.sleep(3.5)\nsys.exit(0)"


def supervised(run_dir: Path, what: str, **more: Any) -> subprocess.Popen[bytes]:
    order = {
        "run_dir": str(run_dir),
        "command": [sys.executable, "-c", WORKER + what],
        "max_seconds": None,
        "stop_grace_seconds": 1.0,
        **more,
    }
    return subprocess.Popen([sys.executable, "-m", "twinstep.platform.scheduler.supervise", json.dumps(order)])


def ending_of(run_dir: Path, what: str, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    assert supervised(run_dir, what, **more).wait(timeout=120) == 0
    starts = [json.loads(line) for line in (run_dir / "starts").read_text().splitlines()]
    seconds = [start.pop("seconds") for start in starts if start is not None]
    assert seconds == sorted(seconds), "counted from the first worker's start"
    assert all(each > 0 for each in seconds)
    return json.loads((run_dir / "exit.json").read_text()), starts


def test_a_killed_worker_is_started_again_and_told_what_happened(tmp_path: Path) -> None:
    how, starts = ending_of(tmp_path, DIES, restarts=2)
    assert (how["code"], how["stopped"]) == (0, None)
    assert starts == [None, {"count": 1, "reason": "the worker before was ended by SIGKILL", "step": 7}]


@pytest.mark.parametrize(("what", "restarts", "count"), [(FAILS, 1, 2), (DIES, 0, 1), (MENDS, 3, 1)])
def test_restarts_are_counted_and_a_spec_to_mend_has_none(tmp_path: Path, what: str, restarts: int, count: int) -> None:
    how, starts = ending_of(tmp_path, what, restarts=restarts)
    assert len(starts) == count
    assert how["code"] != 0


def test_a_worker_that_ends_no_step_is_stopped_and_started_again(tmp_path: Path) -> None:
    how, starts = ending_of(tmp_path, HANGS, restarts=1, hang_seconds=0.5)
    assert how["code"] == 0
    assert starts[1] == {"count": 1, "reason": "the worker before hung, and was stopped", "step": 5}


def test_a_hung_worker_without_restarts_has_failed(tmp_path: Path) -> None:
    how, _ = ending_of(tmp_path, HANGS, hang_seconds=0.5)
    assert how["stopped"] == "hung"
    sight = Sight(seen=Seen.EXITED, code=how["code"], signal=how["signal"], stopped="hung")
    action = decide(Wanted(state=RunState.RUNNING), sight)
    assert (action.do, action.to) == (Do.FINISH, RunState.FAILED)
    assert "runtime.hang_seconds" in action.reason
    wanted = Wanted(state=RunState.RUNNING, cancel_requested_at=1.0)
    asked = decide(wanted, Sight(seen=Seen.EXITED, stopped="hung", time=2.0))
    assert asked.to is RunState.CANCELLED


def test_a_compile_takes_what_it_takes(tmp_path: Path) -> None:
    how, starts = ending_of(tmp_path, COMPILES, restarts=1, hang_seconds=0.2)
    assert (how["code"], how["stopped"], len(starts)) == (0, None, 1)


def test_a_wish_to_stop_ends_restarts(tmp_path: Path, wait: Callable[..., Any]) -> None:
    supervisor = supervised(tmp_path, FAILS, restarts=100)
    wait(lambda: (tmp_path / "starts").exists() and (tmp_path / "starts").read_text().count("\n") >= 2)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 0
    assert json.loads((tmp_path / "exit.json").read_text())["stopped"] == "asked"


def test_a_wish_to_stop_is_heard_while_a_hung_worker_is_being_stopped(tmp_path: Path, wait: Callable[..., Any]) -> None:
    supervisor = supervised(tmp_path, DEAF, restarts=1, hang_seconds=0.2, stop_grace_seconds=3.0)
    wait((tmp_path / "asked").exists, seconds=60)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 0
    how = json.loads((tmp_path / "exit.json").read_text())
    assert (how["stopped"], how["signal"]) == ("asked", "SIGKILL")
    assert (tmp_path / "starts").read_text().count("\n") == 1


def test_the_runs_of_a_job_share_a_place_for_checkpoints(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "runs", command=(), api_url="")
    spec = JobSpec(name="a")
    assert backend.checkpoints("job-1", spec) == str(tmp_path / "checkpoints" / "job-1")
    for path, place in [
        ("s3://bucket/x/", "s3://bucket/x/job-1"), ("/mnt/x", "/mnt/x/job-1"), ("x", str(tmp_path / "x" / "job-1")),
    ]:  # fmt: skip
        named = spec.model_copy(update={"checkpoint": CheckpointSpec(path=path)})
        assert backend.checkpoints("job-1", named) == place


def test_a_worker_is_given_its_jobs_place(tmp_path: Path, wait: Callable[..., Any]) -> None:
    tell = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('TWINSTEP_')}))"
    backend = LocalBackend(tmp_path / "runs", command=(sys.executable, "-c", tell), api_url="http://127.0.0.1:9")
    backend.launch("run-a", JobSpec(name="a"), job_id="job-1", attempt=3)
    wait(lambda: backend.observe("run-a").seen is Seen.EXITED)
    told = json.loads(backend.run_dir("run-a").log_path.read_text())
    assert (told["TWINSTEP_CHECKPOINTS"], told["TWINSTEP_ATTEMPT"]) == (str(tmp_path / "checkpoints" / "job-1"), "3")
    backend.forget("run-a")
