"""Processes that write checkpoints together and really meet: one that is slow, one that is gone, one that is silent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from twinstep.worker.checkpoint.crew import NotWritten
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.train import writers
from twinstep.worker.train.processes import Process
from twinstep.worker.train.writers import StoreCrew

CHILD = Path(__file__).parent / "crew_child.py"
ROOT = Path(__file__).parents[3]


def both(which: str, where: Path) -> list[tuple[int, list[str]]]:
    """Run both processes; return each one's exit code and what it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, str(CHILD), which, str(rank), str(port), str(where)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=280)[0].splitlines() for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    return [(each.returncode, lines) for each, lines in zip(running, said, strict=True)]


@pytest.mark.timeout(300)
def test_a_process_that_writes_for_longer_than_others_wait_fails_no_checkpoint(tmp_path: Path) -> None:
    first, second = both("slow", tmp_path)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert [line.split()[:2] for line in first[1]] == [["checkpoint_saved", "1"], ["checkpoint_saved", "2"], ["closed"]]
    place = open_place(tmp_path)
    names = sorted(place.names())
    assert [name.split("-")[2] for name in names] == ["1", "2"], "nor is anything left of finding out who sees what"
    for name in names:
        assert len(Reader(place, name).tensors()) == 41
    assert not list(tmp_path.glob(".draft-*"))


@pytest.mark.timeout(300)
def test_a_process_0_that_writes_all_for_longer_than_others_wait_is_not_taken_for_a_lost_one(tmp_path: Path) -> None:
    first, second = both("alone", tmp_path)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert [line.split()[:2] for line in first[1]] == [
        ["checkpoints_by_one", "None"],
        ["checkpoint_saved", "1"],
        ["checkpoint_saved", "2"],
        ["checkpoint_saved", "3"],
        ["closed,", "written"],
    ]
    assert second[1] == ["closed, written 0 0"]
    place = open_place(tmp_path)
    assert [Reader(place, name).manifest.step for name in sorted(place.names())] == [2, 3]


@pytest.mark.timeout(300)
def test_a_process_stops_writing_for_a_process_0_that_is_gone(tmp_path: Path) -> None:
    (code, _), (other, said) = both("dies", tmp_path)
    assert (code, other) == (9, 0)
    assert said[-1].startswith("gave up after ")
    assert int(said[-1].split()[-1]) <= 14  # of some twenty: what was begun, in two threads, till then


def crews(count: int = 2) -> list[StoreCrew]:
    store = distributed.HashStore()
    return [StoreCrew(Process(rank=rank, count=count), store) for rank in range(count)]


def test_a_silent_process_fails_one_checkpoint_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "BEAT_S", 0.05)
    first, other = crews()
    try:
        first.silence_s = 600.0
        told: list[Any] = []

        def save() -> None:
            told.append(other.of_first(None))
            time.sleep(1.0)  # slow, and heard of
            other.to_first("mine")
            told.append(other.of_first(None))

        for name in ("a", "b"):
            thread = threading.Thread(target=save)
            thread.start()
            first.of_first(name)
            assert first.to_first("own") == ["own", "mine"]
            first.of_first(None)
            thread.join()
        other.close()
        first.silence_s = 0.3
        first.of_first("c")
        with pytest.raises(NotWritten, match="process 1 has said nothing for"):
            first.to_first("own")
        first.of_first(None)
        thread = threading.Thread(target=save)  # late for that one, to which nobody listens any more
        thread.start()
        thread.join()
        first.silence_s = 600.0
        thread = threading.Thread(target=save)
        thread.start()
        first.of_first("d")
        assert first.to_first("own") == ["own", "mine"]
        first.of_first(None)
        thread.join()
        assert told == ["a", None, "b", None, "c", None, "d", None]
    finally:
        other.close()
