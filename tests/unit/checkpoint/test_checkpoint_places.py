"""A place that others want too, or that does not answer: what is whole stays, and what is wrong is said."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from twinstep.spec.errors import TwinstepError, UnavailableError
from twinstep.worker.checkpoint import lease as leases
from twinstep.worker.checkpoint.errors import TakenError
from twinstep.worker.checkpoint.lease import LEASE, Lease
from twinstep.worker.checkpoint.place import UriPlace, open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.checkpoint.saver import Checkpoints


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "SETTLE_S", 0.05)


def save(checkpoints: Checkpoints, step: int, value: float, scores: dict[str, float] | None = None) -> None:
    tensors = {"parameter:w": torch.full((8,), value), "parameter:v": torch.full((8,), value)}
    checkpoints.save(tensors, step=step, about={}, scores=scores)
    checkpoints.finish()


def told(checkpoints: Checkpoints) -> list[str]:
    return [note.name for note in checkpoints.notes()]


@pytest.mark.parametrize("moment", ["before", "data", "manifest"])
def test_a_superseded_writer_leaves_its_successors_checkpoint_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The successor takes over and commits a checkpoint of the same number and step at any moment of the other's."""
    url = f"memory://zombie-{tmp_path.name}-{moment}"
    start = Checkpoints(url, lineage="job", attempt=0)
    save(start, 400, 0.0)
    start.close()
    zombie = Checkpoints(url, lineage="job", attempt=1)
    successors: list[Checkpoints] = []

    def taken_over() -> None:
        if not successors:
            successors.append(Checkpoints(url, lineage="job", attempt=2))
            save(successors[0], 500, 2.0)

    written, checked = UriPlace.write, zombie._hold.check
    checks: list[None] = []

    def write(place: UriPlace, name: str, file: str, parts: Any) -> None:
        if moment == "data" and place is zombie.place:
            taken_over()
        written(place, name, file, parts)

    def check() -> None:
        checks.append(None)
        checked()
        if moment == "manifest" and len(checks) == 2:  # it is held still, and lost before the manifest is there
            taken_over()

    monkeypatch.setattr(UriPlace, "write", write)
    monkeypatch.setattr(zombie._hold, "check", check)
    if moment == "before":
        taken_over()
    save(zombie, 500, 1.0)
    (successor,) = successors
    assert told(zombie) == ["checkpoint_saved" if moment == "manifest" else "checkpoint_lost"]
    mine = [name for name in successor.place.names() if name.endswith(successor._hold.writer)]
    assert len(mine) == 1
    reader = Reader(successor.place, mine[0])
    reader.verify()
    assert reader.rows("parameter:w").tolist() == [2.0] * 8
    assert any(name.startswith("000001-step-400") for name in successor.place.names()), "nothing else is removed"
    zombie.close()
    successor.close()


def test_of_two_that_start_at_once_one_gets_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "SETTLE_S", 0.5)
    url = f"memory://at-once-{tmp_path.name}"
    both_looked = threading.Barrier(2, timeout=60)
    get, looked = UriPlace.get, threading.local()

    def get_together(place: UriPlace, file: str) -> bytes | None:
        found = get(place, file)
        if not getattr(looked, "once", False):
            looked.once = True
            both_looked.wait()
        return found

    held: list[Lease] = []
    refused: list[TakenError] = []

    def start(owner: str) -> None:
        try:
            held.append(Lease(open_place(url), owner))
        except TakenError as error:
            refused.append(error)

    monkeypatch.setattr(UriPlace, "get", get_together)
    threads = [threading.Thread(target=start, args=(owner,)) for owner in ("run-a", "run-b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 1)
    monkeypatch.undo()  # the barrier was for the first look
    held[0].check()
    held[0].release()


@pytest.mark.parametrize("attempt", ["one", None, -1, 1.5, "9" * 5000, {}, "²"])
def test_a_lease_with_a_malformed_attempt_is_waited_for(tmp_path: Path, attempt: object) -> None:
    place = open_place(f"memory://malformed-{tmp_path.name}")
    place.put(LEASE, json.dumps({"owner": "run-a", "nonce": "n", "lineage": "job", "attempt": attempt}).encode())
    slept: list[float] = []
    lease = Lease(place, "run-b", lineage="job", attempt=2, sleep=slept.append)
    assert sum(slept) >= leases.LEASE_S
    lease.release()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/x", "sftp://127.0.0.1:1/x", "nosuch://x/y", "http://127.0.0.1:1/x"])
def test_a_place_that_does_not_answer_is_an_error_in_words(url: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        Checkpoints(url)
    assert url in caught.value.problem
    assert caught.value.remedy


FAULTS = [ConnectionResetError(104, "Connection reset by peer"), PermissionError("Anonymous caller"), KeyError("token")]


@pytest.mark.parametrize("method", ["ls", "cat_file", "open", "makedirs"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_a_client_raises_at_the_start_is_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fault: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise fault

    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, fails)
        with pytest.raises(TwinstepError) as caught:
            Checkpoints(f"memory://fails-{tmp_path.name}")
    assert isinstance(caught.value, UnavailableError)
    assert threading.active_count() == threads, "no lease beats on"
    assert f"fails-{tmp_path.name}" in caught.value.problem
