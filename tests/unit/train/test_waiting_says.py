"""What takes long is said now and then, with its seconds so far, and no more once it is over."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from twinstep.cli.live import PlainView
from twinstep.worker.train import waiting
from twinstep.worker.train.progress import ProgressView


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
