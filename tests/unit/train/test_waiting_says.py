"""What takes long is said now and then, with its seconds so far, and no more once it is over."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from twinstep.cli.live import PlainView
from twinstep.spec.parse import validate_spec
from twinstep.worker.compile import CompileEvent
from twinstep.worker.train import waiting
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.saving import Saving
from twinstep.worker.train.stop import StopSignal

SPEC: dict[str, Any] = {
    "name": "t",
    "model": {"embedding_dim": 4, "transducer_dim": 8, "hidden_dim": 8, "num_layers": 1},
    "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2},
    "compile": {"backend": "eager"},
    "train": {"steps": 2},
}
COMPILED = CompileEvent(
    name="compiled",
    reason="first compile",
    seconds=1.0,
    capture_seconds=0.5,
    backend="xla",
    cache="none",
    key="",
    nodes=1,
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST", 0.01)
    monkeypatch.setattr(waiting, "EVERY", 0.01)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def none_waits() -> bool:
    return not any(each.name == "waiting" for each in threading.enumerate())


def test_a_log_says_how_long_a_compile_has_taken_until_the_first_step() -> None:
    out = io.StringIO()
    with ProgressView(Console(file=out, width=200), 10) as view:
        view.starting("reading data")
        wait_until(lambda: "reading data: 0 s so far" in out.getvalue())
        view.compiling("first compile")
        wait_until(lambda: "compiling (first compile): 0 s so far" in out.getvalue())
        view.step(1, loss=1.0, examples_per_s=1.0, eta_s=1.0)
        wait_until(none_waits)
        view.compiling("new shapes")
    wait_until(none_waits)


def test_a_run_waits_for_what_it_does_and_for_nothing_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, opened = io.StringIO(), Saving.__init__

    def slow(*args: Any, **more: Any) -> None:
        wait_until(lambda: "looking for checkpoints: 0 s so far" in out.getvalue())
        opened(*args, **more)

    monkeypatch.setattr(Saving, "__init__", slow)
    spec = validate_spec(SPEC | {"checkpoint": {"path": str(tmp_path)}})
    with ProgressView(Console(file=out, width=200), 2) as view:
        work = Trainer(spec, reporter=MagicMock(), view=view, stop=StopSignal(), run_dir=None)
        work._compiling("first compile")
        assert not none_waits()
        work._compiled(COMPILED)
        wait_until(none_waits)
        work.close()
    told = out.getvalue().splitlines()
    assert (
        told.index("building the model")
        < told.index("looking for checkpoints")
        < told.index("compiling (first compile)")
    )


def test_a_follower_without_a_terminal_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    class View(PlainView):
        def say(self, line: str) -> None:
            said.append(line)

    with View() as view:
        view.progress({"progress": {"phase": "compiling", "step": 0, "total_steps": 9}})
        wait_until(lambda: "compiling: 0 s so far" in said)
        view.progress({"progress": {"phase": "training", "step": 1, "total_steps": 9}})
        wait_until(none_waits)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError("no space is left"), ValueError("it was closed")])
def test_a_reader_that_went_is_noticed_by_the_follower_itself_and_not_by_what_waits(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lines, died = list[str](), list[object]()

    def write(line: str, **_: object) -> None:
        lines.append(line)
        if len(lines) > 1:
            raise error

    monkeypatch.setattr("builtins.print", write)
    monkeypatch.setattr(threading, "excepthook", died.append)
    with PlainView() as view:
        view.progress({"progress": {"phase": "compiling", "step": 0, "total_steps": 9}})
        wait_until(lambda: len(lines) > 2)
        with pytest.raises(type(error)):
            view.say("training")
    wait_until(none_waits)
    assert died == []


def test_nobody_looks_and_nothing_waits() -> None:
    view = ProgressView(None, 10)
    view.compiling("first compile")
    assert none_waits()
