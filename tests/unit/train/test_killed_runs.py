"""Real runs killed with SIGKILL at random moments, or told to go: nothing is lost but the steps since a checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.train import stop as stop_module
from twinstep.worker.train.saving import last_words
from twinstep.worker.train.stop import StopSignal

STEPS = 40
SPEC: dict[str, Any] = {
    "name": "t",
    "model": {
        "embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
        "dropout": 0.1,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2},
    "compile": {"backend": "eager", "cache": False},
    "train": {"steps": STEPS, "eval_batches": 1},
    "runtime": {"threads": 1},
}  # fmt: skip
# Importing torch takes longer than a run, so runs are forked from a process that has; each is a process of its own.
SERVER = """
import json, os, sys
from rich.console import Console
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import run_spec
import twinstep.worker.train.run, torch
torch.set_num_threads(1)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        os.environ.update(order["environ"])
        out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1); os.dup2(out, 2)
        code = 1
        try:
            run_spec(validate_spec(order["spec"]), console=Console(width=500), ends_process=True)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            print(repr(error), flush=True)
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Runs:
    """Starts runs, one at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, run_dir: Path, spec: dict[str, Any]) -> int:
        """Start a run that reports to nobody who answers; return its pid."""
        run_dir.mkdir(exist_ok=True)
        told = {
            "TWINSTEP_RUN_ID": "run-a", "TWINSTEP_RUN_DIR": str(run_dir), "TWINSTEP_API_URL": "http://127.0.0.1:9",
            "TWINSTEP_RUN_TOKEN": "t",
        }  # fmt: skip
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"environ": told, "spec": spec, "log": str(run_dir / "log")}) + "\n")
        self._server.stdin.flush()
        return int(self._line())

    def end(self) -> int:
        """Wait for the run's end; return its exit code, negative for a signal."""
        return int(self._line())

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._server.stdout.close()


@pytest.fixture(scope="module")
def runs() -> Any:
    made = Runs()
    yield made
    made.close()


def spec_in(place: Path, **checkpoint: Any) -> dict[str, Any]:
    return {**SPEC, "checkpoint": {"path": str(place), **checkpoint}}


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's spool."""
    lines = (run_dir / "spool.jsonl").read_bytes().split(b"\n")[:-1] if (run_dir / "spool.jsonl").exists() else []
    return [json.loads(line) for line in lines]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(each["step"], each["values"]["loss"]) for each in records(run_dir) if "loss" in each.get("values", {})]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [each for each in records(run_dir) if each["kind"] == "event" and each["name"] == name]


def when_step(run_dir: Path, step: int, pid: int) -> None:
    """Wait until a run has told of a step, or has ended."""
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        told = (run_dir / "heartbeat").read_bytes() if (run_dir / "heartbeat").exists() else b""
        if told and json.loads(told)["step"] >= step:
            return
        time.sleep(0.001)
    raise AssertionError((run_dir / "log").read_text())


def last_state(place: Path) -> tuple[int, dict[str, torch.Tensor]]:
    name = max(each.name for each in place.glob("*-step-*"))
    reader = Reader(open_place(place), name)
    return reader.manifest.step, reader.tensors()


@pytest.fixture(scope="module")
def straight(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """A run that nobody kills."""
    base = tmp_path_factory.mktemp("straight")
    runs.start(base / "run", spec_in(base / "place", every_steps=7))
    assert runs.end() == 0, (base / "run/log").read_text()
    step, state = last_state(base / "place")
    assert step == STEPS
    return dict(losses(base / "run")), state


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_a_kill_at_any_moment_loses_the_steps_since_the_last_checkpoint_and_nothing_else(
    tmp_path: Path, runs: Runs, straight: tuple[dict[int, float], dict[str, torch.Tensor]], seed: int
) -> None:
    dice = random.Random(seed)
    run_dir, place = tmp_path / "run", tmp_path / "place"
    spec = spec_in(place, every_steps=7)
    killed_at = dice.randrange(1, STEPS - 10)  # on a busy machine the last steps are over before a kill comes
    pid = runs.start(run_dir, spec)
    when_step(run_dir, killed_at, pid)
    time.sleep(dice.random() * 0.004)  # into a step, a copy, or a file that is being written
    os.kill(pid, signal.SIGKILL)
    assert runs.end() == -signal.SIGKILL
    whole = [int(each.name.rsplit("-", 1)[1]) for each in place.glob("0*-step-*")] if place.exists() else []
    before = losses(run_dir)
    runs.start(run_dir, spec)
    assert runs.end() == 0, (run_dir / "log").read_text()
    after = losses(run_dir)[len(before) :]
    expected, state = straight
    assert after[0][0] == max(whole, default=0) + 1
    assert before[-1][0] - max(whole, default=0) <= 7 + 7, "a checkpoint each 7 steps; one may be in writing"
    assert [step for step, _ in after] == list(range(after[0][0], STEPS + 1))
    assert all(expected[step] == loss for step, loss in before + after)
    found_step, found = last_state(place)
    assert found_step == STEPS
    assert all(torch.equal(state[path], found[path]) for path in state)
    assert not list(place.glob(".draft-*"))
    if whole:
        assert events(run_dir, "resumed")[-1]["reason"] == f"goes on after step {max(whole)} of {STEPS}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["xla", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_compiled_run_that_is_killed_again_and_again_is_the_run_that_nobody_killed(
    tmp_path: Path, runs: Runs, backend: str
) -> None:
    """Ten kills in a row, while it starts, reads a checkpoint, loads its program, steps, copies or writes."""
    dice = random.Random(f"kills, {backend}")
    compiled = {"backend": backend, "cache_dir": str(tmp_path / "cache")}

    def spec(place: Path) -> dict[str, Any]:
        return {**spec_in(place, every_steps=7), "compile": compiled, "train": {"steps": 200, "eval_batches": 1}}

    runs.start(tmp_path / "straight", spec(tmp_path / "straight-place"))
    assert runs.end() == 0, (tmp_path / "straight/log").read_text()
    run_dir, place = tmp_path / "run", tmp_path / "place"
    for kill in range(10):
        before = losses(run_dir)[-1][0] if run_dir.exists() and losses(run_dir) else 0
        pid = runs.start(run_dir, spec(place))
        if kill % 3:
            when_step(run_dir, min(before + dice.randrange(1, 20), 190), pid)
            time.sleep(dice.random() * 0.02)
        else:
            time.sleep(dice.random() * 3.0)
        os.kill(pid, signal.SIGKILL)
        assert runs.end() == -signal.SIGKILL, (run_dir / "log").read_text()
    runs.start(run_dir, spec(place))
    assert runs.end() == 0, (run_dir / "log").read_text()
    expected, found = dict(losses(tmp_path / "straight")), losses(run_dir)
    assert all(expected[step] == loss for step, loss in found)
    assert {step for step, _ in found} == set(expected)
    (step, state), (end, same) = last_state(tmp_path / "straight-place"), last_state(place)
    assert step == end == 200
    assert all(torch.equal(state[path], same[path]) for path in state)
    assert not list(place.glob(".draft-*"))


WAITS = [("starting", 1), ("training", 3), ("evaluating", 1), ("evaluating", 2)]


@pytest.mark.parametrize(("phase", "times"), WAITS)
def test_sigterm_in_any_phase_and_again_meanwhile_loses_no_step(
    tmp_path: Path, runs: Runs, straight: tuple[dict[int, float], dict[str, torch.Tensor]], phase: str, times: int
) -> None:
    """Each step is saved, so that a file is being written whenever the signal comes."""
    run_dir, place = tmp_path / "run", tmp_path / "place"
    spec = {**spec_in(place, every_steps=1), "train": {"steps": STEPS, "eval_batches": 1, "eval_every": 3}}
    pid = runs.start(run_dir, spec)
    end = time.monotonic() + 120
    while phase != "starting" and time.monotonic() < end:
        told = (run_dir / "heartbeat").read_bytes() if (run_dir / "heartbeat").exists() else b""
        if told and json.loads(told)["phase"] == phase:
            break
    for _ in range(times):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)
    # Before Python runs at all, a signal is what the kernel makes of it.
    assert runs.end() in ((75, -signal.SIGTERM) if phase == "starting" else (75,)), (run_dir / "log").read_text()
    done = losses(run_dir)[-1][0] if losses(run_dir) else 0
    assert (last_state(place)[0] if list(place.glob("*-step-*")) else 0) == done, "not one step is lost"
    runs.start(run_dir, spec)
    assert runs.end() == 0, (run_dir / "log").read_text()
    assert dict(losses(run_dir)) == straight[0]
    assert not list(place.glob(".draft-*"))


def test_sigterm_saves_and_says_that_it_is_no_failure_however_often_it_comes(
    tmp_path: Path, runs: Runs, straight: tuple[dict[int, float], dict[str, torch.Tensor]]
) -> None:
    run_dir, place = tmp_path / "run", tmp_path / "place"
    pid = runs.start(run_dir, spec_in(place))
    when_step(run_dir, 5, pid)
    for _ in range(3):
        os.kill(pid, signal.SIGTERM)
    assert runs.end() == 75, (run_dir / "log").read_text()
    step, _ = last_state(place)
    assert step == losses(run_dir)[-1][0], "not one step is lost"
    assert events(run_dir, "stopped")[-1]["data"]["step"] == step
    runs.start(run_dir, spec_in(place))
    assert runs.end() == 0
    assert dict(losses(run_dir)) == straight[0]


def test_ctrl_c_saves_as_sigterm_does_and_goes_on_from_there(
    tmp_path: Path, runs: Runs, straight: tuple[dict[int, float], dict[str, torch.Tensor]]
) -> None:
    run_dir, place = tmp_path / "run", tmp_path / "place"
    pid = runs.start(run_dir, spec_in(place))
    when_step(run_dir, 5, pid)
    for _ in range(2):  # one press: from the terminal, and from a launcher that passes it on
        os.kill(pid, signal.SIGINT)
    assert runs.end() == 130, (run_dir / "log").read_text()
    step, _ = last_state(place)
    assert step == losses(run_dir)[-1][0], "not one step is lost"
    assert events(run_dir, "stopped")[-1]["reason"] == f"stopped from the keyboard after step {step}"
    said = (run_dir / "log").read_text()
    assert "Ctrl-C again ends at once" in said
    assert f"stopped after step {step}; step {step} is saved in {place}" in said
    runs.start(run_dir, spec_in(place))
    assert runs.end() == 0
    assert dict(losses(run_dir)) == straight[0]


def test_a_second_ctrl_c_ends_a_run_that_does_not_come_to_the_end_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_module, "ONE_PRESS", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.listen()
    try:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        assert stop.exit_code(75) == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.listen_no_more()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "nothing is saved, since checkpoint.path names no place"),
        (("/there", None), "nothing is saved yet in /there: started again, it begins anew"),
        (("/there", 9), "step 9 is saved in /there: started again, it goes on from there"),
        (("/there", 7), "step 7 is saved in /there: started again, it goes on from there, and does 2 steps again"),
    ],
)
def test_the_last_words_of_a_stopped_run_say_what_is_lost(kept: tuple[str, int | None] | None, said: str) -> None:
    assert last_words(9, kept) == f"stopped after step 9; {said}"


def test_without_a_place_sigterm_is_what_it_was(tmp_path: Path, runs: Runs) -> None:
    pid = runs.start(tmp_path / "run", SPEC)
    when_step(tmp_path / "run", 5, pid)
    os.kill(pid, signal.SIGTERM)
    assert runs.end() == 143


def test_a_second_run_on_one_place_is_refused_and_the_first_goes_on(tmp_path: Path, runs: Runs) -> None:
    second = Runs()
    spec = {**spec_in(tmp_path / "place", every_steps=7), "train": {"steps": 100_000, "eval_batches": 1}}
    pid = runs.start(tmp_path / "one", spec)
    when_step(tmp_path / "one", 3, pid)
    second.start(tmp_path / "two", spec)
    assert second.end() != 0
    second.close()
    assert "written by run run-a on" in events(tmp_path / "two", "failed")[0]["reason"]
    os.kill(pid, signal.SIGTERM)
    assert runs.end() == 75
