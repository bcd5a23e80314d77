"""How a run ends in a process that lives on, and in one that ends with it: signals, exit codes, words."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinstep.spec.errors import PeerLostError, SpecError, TrainError
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import run as run_module
from twinstep.worker.train import run_spec
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.stop import StopSignal


class Told:
    """A reporter that keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def event(self, name: str, reason: str, data: Any = None) -> None:
        self.events.append((name, reason))

    def metric(self, *_: Any) -> None:
        pass

    def progress(self, *_: Any, **__: Any) -> None:
        pass

    def result(self, summary: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    reporter = Told()
    monkeypatch.setattr(run_module, "make_reporter", lambda context: reporter)
    return reporter


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ends_process", [False, True])
def test_a_signal_after_the_end_of_a_run_is_the_callers_unless_the_process_ends_too(
    signals: None, ends_process: bool
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.listen()
    stop.listen_no_more(ends_process=ends_process)
    assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if ends_process else before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_no_python_code_is_not_given_back(signals: None) -> None:
    stop = StopSignal()
    stop.listen()
    stop._before[signal.SIGTERM] = None  # what `signal.signal` returns then, and does not take
    stop.listen_no_more()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "code", "how"), [(signal.SIGINT, 130, "from the keyboard"), (signal.SIGTERM, 143, "by SIGTERM")]
)
def test_a_run_that_was_told_to_stop_and_whose_peer_left_sooner_says_what_told_it(
    monkeypatch: pytest.MonkeyPatch, told: Told, signals: None, number: int, code: int, how: str
) -> None:
    class Left(Together):
        def join(self) -> None:
            signal.raise_signal(number)
            raise PeerLostError("process 1 is gone", remedy="see its log")

    monkeypatch.setattr(run_module, "processes", lambda spec: Left(Process()))
    with pytest.raises(SystemExit) as ended:
        run_spec(validate_spec({"name": "t", "compile": {"backend": "eager"}, "data": {"dataset": "synthetic"}}))
    assert ended.value.code == code
    assert told.events[-1] == ("stopped", f"stopped {how} after step 0")


EARLY = """
import signal, sys, threading
from twinstep.worker.train.early import EarlyStop
early = EarlyStop(place=sys.argv[1] == "place")
if sys.argv[2] == "over":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    early.over()
    early.over()
print("up", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
BLOCKED = """
import ctypes, signal, sys
from twinstep.worker.train.early import EarlyStop
EarlyStop(place=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("up", flush=True)
libc = ctypes.CDLL(None)  # lets go of the interpreter, and takes no notice of signals, as a library that waits does
left = 600
while left:
    left = libc.sleep(left)
"""


@pytest.mark.parametrize(
    ("code", "words", "ends"),
    [
        (EARLY, ("place", "early"), 75),
        (EARLY, ("nowhere", "early"), 143),
        (EARLY, ("place", "over"), 7),  # whoever listens by then has it
        (BLOCKED, (), 75),
    ],
)
def test_sigterm_before_a_run_has_begun_ends_it_at_once_and_is_no_failure(
    code: str, words: tuple[str, ...], ends: int
) -> None:
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.terminate()
            assert process.wait(60) == ends
        finally:
            process.kill()


def test_a_second_ctrl_c_leaves_the_place_to_the_next_run_of_the_process(
    monkeypatch: pytest.MonkeyPatch, told: Told, signals: None, tmp_path: Path
) -> None:
    model = {"embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8}
    spec = validate_spec(
        {
            "name": "t",
            "model": {**model, "num_layers": 1},
            "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8},
            "compile": {"backend": "eager"},
            "train": {"steps": 4, "eval_batches": 1},
            "checkpoint": {"path": str(tmp_path), "every_steps": 1},
        }
    )
    check = Trainer._check_time

    def pressed_twice(self: Trainer) -> None:
        if self.step == 2:
            raise KeyboardInterrupt
        check(self)

    monkeypatch.setattr(Trainer, "_check_time", pressed_twice)
    with pytest.raises(KeyboardInterrupt):
        run_spec(spec)
    assert told.events[-1] == ("stopped", "stopped from the keyboard after step 2")
    monkeypatch.setattr(Trainer, "_check_time", check)
    assert run_spec(spec).steps == 4


def own(tmp_path: Path, name: str, at_import: str = "", in_factory: str = "pass", in_forward: str = "pass") -> Any:
    text = f"""
import os, signal, sys
from torch import nn
{at_import}

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tables, self.table = config.embedding_collection(), config.item_features[0].table
        {in_factory}

    def forward(self, batch):
        {in_forward}
        return self.tables(self.table, batch.cand_ids[0], batch.candidates_valid()).sum(-1).unsqueeze(0)
"""
    (tmp_path / f"{name}.py").write_text(text)
    return {
        "name": "t",
        "model": {"kind": "module", "factory": f"{name}:Model", "source": str(tmp_path), "embedding_dim": 4},
        "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8},
        "compile": {"backend": "eager"},
        "train": {"steps": 1, "eval_batches": 1},
        "checkpoint": {"path": str(tmp_path / "saved"), "every_steps": 1},
    }


TOLD = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize("where", ["at_import", "in_factory"])
def test_sigterm_within_a_users_code_is_no_failure_of_it(told: Told, signals: None, tmp_path: Path, where: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_spec(validate_spec(own(tmp_path, f"told_{where}", **{where: TOLD})))
    assert ended.value.code == 75
    assert told.events[-1] == ("stopped", "stopped by SIGTERM after step 0")


@pytest.mark.parametrize("backend", ["eager", "xla"])
@pytest.mark.parametrize("where", ["at_import", "in_factory", "in_forward"])
def test_a_users_code_that_ends_the_process_is_a_failure_and_no_wish_to_stop(
    told: Told, signals: None, tmp_path: Path, where: str, backend: str
) -> None:
    given = own(tmp_path, f"ends_{where}_{backend}", **{where: "sys.exit('no weights')"})
    with pytest.raises((SpecError, TrainError), match=r"ends_\w+\.py:\d+.*no weights"):
        run_spec(validate_spec({**given, "compile": {"backend": backend, "cache": False}}))
    assert told.events[-1][0] == "failed"


def test_whatever_else_ends_the_process_within_a_run_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, told: Told, signals: None, tmp_path: Path
) -> None:
    spec = validate_spec(own(tmp_path, "plain"))
    for place in ("__init__", "train"):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, place, lambda *_, **__: sys.exit(3))
            with pytest.raises(TrainError, match="ends the process: 3"):
                run_spec(spec)
        assert told.events[-1][0] == "failed"
