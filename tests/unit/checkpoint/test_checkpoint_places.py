"""A place that others want too, or that does not answer: what is whole stays, and what is wrong is said."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from twinstep.spec.errors import TwinstepError, UnavailableError
from twinstep.worker.checkpoint import lease as leases
from twinstep.worker.checkpoint.errors import DamagedError, ForeignError, TakenError
from twinstep.worker.checkpoint.keep import Keep
from twinstep.worker.checkpoint.lease import LEASE, Lease
from twinstep.worker.checkpoint.manifest import MANIFEST
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


def model_of() -> nn.Module:
    model = nn.Module()
    model.w, model.v = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    return model


def steps_there(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(name.split("-")[2]) for name in checkpoints.place.names())


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("restores", [True, False])
def test_the_last_and_the_best_are_those_of_all_attempts(tmp_path: Path, where: str, restores: bool) -> None:
    place = str(tmp_path) if where == "local" else f"memory://attempts-{tmp_path.name}-{restores}"
    scores = [0.9, 0.8, 0.2, 0.7, 0.6, 0.5, 0.95, 0.4]
    for attempt in range(4):
        checkpoints = Checkpoints(place, keep=Keep(last=2, best=1, metric="ne"))
        if restores:
            checkpoints.restore(model_of(), {})
        for step in (2 * attempt + 1, 2 * attempt + 2):
            save(checkpoints, step, float(step), {"ne": scores[step - 1]})
            expected = sorted({step, max(1, step - 1), min(range(1, step + 1), key=lambda each: scores[each - 1])})
            assert steps_there(checkpoints) == expected
        checkpoints.close()
    assert steps_there(checkpoints) == [3, 7, 8]


PASSING = [
    TimeoutError(110, "Connection timed out"),
    OSError(5, "Input/output error"),
    PermissionError(13, "Permission denied"),
    RuntimeError("503 Slow Down"),
]


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("method", ["names", "read", "read_into"])
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: type(fault).__name__)
def test_a_fault_that_passes_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, method: str, fault: Exception
) -> None:
    place = str(tmp_path) if where == "local" else f"memory://passes-{tmp_path.name}"
    first = Checkpoints(place)
    save(first, 1, 1.0)
    save(first, 2, 2.0)
    first.close()
    second, model = Checkpoints(place, keep=Keep(last=9)), model_of()

    def fails(*_: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(type(second.place), method, fails)
        with pytest.raises(UnavailableError) as caught:
            second.restore(model, {})
    assert (getattr(fault, "strerror", None) or str(fault)) in caught.value.problem
    assert not second.notes()
    assert not model.w.any(), "nothing was changed"
    save(second, 3, 3.0)
    assert steps_there(second) == [1, 2, 3]
    found = second.restore(model, {})
    assert found is not None
    assert found[0].step == 3
    second.close()


@pytest.mark.parametrize("change", [{"format": 2}, {"format": None}, {"number": "later"}, {"files": 3}])
@pytest.mark.parametrize("newest", [True, False])
def test_a_foreign_format_is_refused_and_never_removed(tmp_path: Path, change: dict[str, Any], newest: bool) -> None:
    first = Checkpoints(tmp_path)
    save(first, 1, 1.0)
    save(first, 2, 2.0)
    first.close()
    path = tmp_path / ("000002-step-2" if newest else "000001-step-1") / MANIFEST
    text = json.dumps({**json.loads(json.loads(path.read_bytes())["manifest"]), **change})
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}))
    second = Checkpoints(tmp_path, keep=Keep(last=1))
    if newest:
        with pytest.raises(ForeignError, match="version of Twinstep"):
            second.restore(model_of(), {})
    else:
        assert second.restore(model_of(), {}) is not None
    save(second, 3, 3.0)
    save(second, 4, 4.0)
    assert steps_there(second) == [2 if newest else 1, 4]
    second.close()


def test_a_store_that_refuses_ranges_past_the_end_is_a_file_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(f"memory://short-{tmp_path.name}")
    save(checkpoints, 1, 1.0)
    (name,) = checkpoints.place.names()
    checkpoints.place.write(name, "data-00000", [b""])

    def refuses(*_: Any, **__: Any) -> bytes:
        raise OSError(22, "Requested Range Not Satisfiable")

    reader = Reader(checkpoints.place, name)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", refuses)
        with pytest.raises(DamagedError, match="cut short"):
            reader.verify()
    checkpoints.close()
