"""Checkpoints that several processes write: each its own rows, whole or not at all, and like any other to a reader."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.checkpoint.crew import Member
from twinstep.worker.checkpoint.manifest import Piece, TensorEntry, merged
from twinstep.worker.checkpoint.place import LocalPlace, open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.checkpoint.saver import Checkpoints
from twinstep.worker.checkpoint.shares import SPLIT_BYTES, shares


class Threads:
    """Processes that are threads of this one; what they tell each other goes through a list, behind a barrier."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.said: list[Any] = [None] * count

    def of(self, rank: int) -> Any:
        return _Thread(self, rank)


class _Thread:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.count = threads, rank, threads.count

    def _all(self, value: Any) -> list[Any]:
        self._threads.said[self.rank] = value
        self._threads.barrier.wait()
        found = list(self._threads.said)
        self._threads.barrier.wait()
        return found

    def of_first(self, value: Any) -> Any:
        return self._all(value)[0]

    def to_first(self, value: Any) -> list[Any]:
        found = self._all(value)
        return found if self.rank == 0 else []

    def check(self) -> None:
        pass


class Run:
    """A run of several processes that saves into one place; tensors of row ranges stand for divided tables."""

    def __init__(self, where: str | Path, count: int = 3) -> None:
        self.threads = Threads(count)
        self.first = Checkpoints(where)
        self.first.crew = self.threads.of(0)
        self.others = [Member(open_place(where), self.threads.of(rank), only_finite=True) for rank in range(1, count)]

    def save(self, step: int, tensors: list[dict[str, Tensor]], held: Any) -> None:
        for member, own in zip(self.others, tensors[1:], strict=True):
            member.save(own, held)
        self.first.save(tensors[0], step=step, about={}, held=held)
        self.first.finish()
        for member in self.others:
            member.finish()

    def notes(self) -> list[tuple[str, str]]:
        return [(note.name, note.reason) for note in self.first.notes()]


def state(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "parameter:table": torch.rand(11, 4),
        "optimizer:sparse/sum/table": torch.rand(11, 1),
        "parameter:large": torch.rand(SPLIT_BYTES // 16, 4),
        "parameter:dense": torch.rand(3, 5),
        "optimizer:dense/step/dense": torch.tensor(7.0),
        "parameter:none": torch.rand(0, 4),
        "random:torch": torch.arange(5, dtype=torch.uint8),
    }


HELD = {"parameter:table": [(0, 4, 2), (4, 11, 1)], "optimizer:sparse/sum/table": [(0, 4, 2), (4, 11, 1)]}


def own_of(whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a process has: of what is divided, only its rows are right; its random numbers are its own."""
    found = {path: tensor.clone() for path, tensor in whole.items()}
    for path, pieces in HELD.items():
        found[path].fill_(-1)
        for start, stop, process in pieces:
            if process == rank:
                found[path][start:stop] = whole[path][start:stop]
    if rank:
        found["random:torch"].zero_()
    return found


@pytest.fixture(params=["directory", "store"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "place") if request.param == "directory" else f"memory://{tmp_path.name}"


def test_each_process_writes_its_rows_and_a_reader_finds_the_whole(where: str) -> None:
    run, whole = Run(where), state(1)
    for step in (1, 2):  # buffers of the first are used again
        whole = state(step)
        run.save(step, [own_of(whole, rank) for rank in range(3)], HELD)
    assert [name for name, _ in run.notes()] == ["checkpoint_saved", "checkpoint_saved"]
    run.first.close()
    alone = Checkpoints(where)
    reader = Reader(alone.place, max(alone.place.names()))
    found = reader.tensors()
    alone.close()
    assert sorted(found) == sorted(whole)
    assert all(torch.equal(found[path], tensor) for path, tensor in whole.items())
    writers = {piece.file[:9] for entry in reader.manifest.tensors.values() for piece in entry.pieces}
    assert writers == {"data-0000", "data-0001", "data-0002"}
    table = reader.manifest.tensors["parameter:table"].pieces
    assert [(each.start, each.stop, each.file[:9]) for each in table] == [(0, 4, "data-0002"), (4, 11, "data-0001")]
    assert torch.equal(reader.rows("parameter:table", 3, 6), whole["parameter:table"][3:6])


def _nan(tensors: list[dict[str, Tensor]]) -> None:
    tensors[2]["parameter:table"][0, 0] = math.nan


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_whose_disk_is_full_leaves_the_last_good_one_and_the_next_works(
    tmp_path: Path, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = Run(tmp_path), state(1)
    tensors = [own_of(whole, rank) for rank in range(3)]
    run.save(1, tensors, HELD)
    write: Callable[..., None] = LocalPlace.write

    def full(self: LocalPlace, name: str, file: str, parts: Any) -> None:
        if file.startswith(f"data-{who:04d}"):
            raise OSError(28, "No space left on device")
        write(self, name, file, parts)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write", full)
        run.save(2, tensors, HELD)
    notes = run.notes()
    assert [name for name, _ in notes] == ["checkpoint_saved", "checkpoint_failed"]
    assert f"process {who}: No space left on device; the last good one is of step 1" in notes[1][1]
    assert len(list(tmp_path.iterdir())) == 2  # the first one, and the lock: no draft is left
    run.save(3, tensors, HELD)
    assert [name for name, _ in run.notes()] == ["checkpoint_saved"]
    run.first.close()


def test_a_process_with_rows_that_are_not_finite_saves_nothing(tmp_path: Path) -> None:
    run, tensors = Run(tmp_path), [own_of(state(1), rank) for rank in range(3)]
    _nan(tensors)
    run.save(1, tensors, HELD)
    assert "process 2: parameter:table holds NaN or infinity" in run.notes()[0][1]
    run.first.close()


def test_a_place_that_process_0_cannot_begin_with_holds_no_process_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tensors = Run(tmp_path), [own_of(state(1), rank) for rank in range(3)]

    def fail(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(LocalPlace, "begin", fail)
    run.save(1, tensors, HELD)
    assert "Read-only file system" in run.notes()[0][1]
    run.first.close()


def test_a_process_that_outlived_its_process_0_does_not_write_into_what_the_next_attempt_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Callable[..., None] = LocalPlace.write
    begun, go_on, names = threading.Event(), threading.Event(), []
    old = Run(tmp_path, 2)
    tensors = [own_of(state(1), rank) for rank in range(2)]

    def late(self: LocalPlace, name: str, file: str, parts: Any) -> None:
        names.append(name)
        begun.set()
        go_on.wait(60)
        write(self, name, file, [b"torn"])

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write", late)
        old.others[0].save(tensors[1], {})
        thread = threading.Thread(target=lambda: old.first.save(tensors[0], step=1, about={}))
        thread.start()
        assert begun.wait(60)
    old.first._hold.release()  # as the kernel does for one that was killed
    new, whole = Run(tmp_path, 2), state(2)
    read: Callable[..., None] = LocalPlace.commit

    def commit(self: LocalPlace, name: str, file: str, content: bytes) -> None:
        names.append(name)
        go_on.set()
        old.others[0].finish(60)  # it writes, between what the new one wrote and the manifest
        read(self, name, file, content)

    monkeypatch.setattr(LocalPlace, "commit", commit)
    new.save(1, [own_of(whole, rank) | {path: whole[path] for path in HELD} for rank in range(2)], {})
    thread.join()
    assert [name for name, _ in new.notes()] == ["checkpoint_saved"]
    assert {name.rsplit("-", 1)[0] for name in names} == {"000001-step-1"}
    found = Reader(new.first.place, *new.first.place.names()).tensors()
    assert all(torch.equal(found[path], tensor) for path, tensor in whole.items())
    new.first.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_cannot_even_look_at_its_rows_holds_no_other_up(
    tmp_path: Path, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tensors = Run(tmp_path), [own_of(state(1), rank) for rank in range(3)]

    def fail(self: Any) -> None:
        raise MemoryError

    snapshot = run.others[0]._snapshot if who else run.first.snapshot
    monkeypatch.setattr(snapshot, "not_finite", fail.__get__(snapshot))
    run.save(1, tensors, HELD)
    assert f"process {who}: MemoryError" in run.notes()[0][1]
    monkeypatch.undo()
    run.save(2, tensors, HELD)
    assert [name for name, _ in run.notes()] == ["checkpoint_saved"]
    run.first.close()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    width=st.sampled_from([1, 3, SPLIT_BYTES // 40]),
    processes=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_every_row_is_written_once_whatever_is_held(
    rows: list[int], width: int, processes: int, cuts: list[int]
) -> None:
    tensors = {f"parameter:{n}": torch.empty(count, width, device="meta") for n, count in enumerate(rows)}
    tensors["optimizer:dense/step/0"] = torch.empty((), device="meta")
    edges = sorted({0, rows[0], *(cut for cut in cuts if cut < rows[0])})
    pieces = itertools.pairwise(edges)
    held = {"parameter:0": [(start, stop, n % processes) for n, (start, stop) in enumerate(pieces)]}
    found = shares(tensors, processes, held)
    entries = [
        {
            path: TensorEntry(
                shape=tuple(tensors[path].shape),
                dtype="float32",
                pieces=tuple(Piece(start=a, stop=b, file="f", offset=0, size=0) for a, b in ranges if a < b),
            )
            for path, ranges in share.items()
        }
        for share in found
    ]
    whole = merged(entries)
    assert {path for path, tensor in tensors.items() if tensor.numel()} <= set(whole)
    by_bytes = [
        sum(
            tensors[path].numel() * 4 * (stop - start) / max(1, len(tensors[path]) if tensors[path].dim() else 1)
            for path, ranges in share.items()
            for start, stop in ranges
            if path not in held
        )
        for share in found
    ]
    free = {path: tensor.numel() * 4 for path, tensor in tensors.items() if path not in held}
    if not held["parameter:0"]:  # what is held by one is not to be spread
        small = max((size for size in free.values() if size < SPLIT_BYTES), default=0)
        assert max(by_bytes) - min(by_bytes) <= max(small, SPLIT_BYTES // 2)


@pytest.mark.parametrize("ranges", [[(0, 4), (3, 8)], [(0, 4), (5, 8)], [(0, 4)], [(1, 8)]])
def test_rows_that_nobody_wrote_or_two_did_make_no_checkpoint(ranges: list[tuple[int, int]]) -> None:
    entries = [
        {
            "parameter:t": TensorEntry(
                shape=(8, 2), dtype="float32", pieces=(Piece(start=a, stop=b, file=f"{n}", offset=0, size=8 * (b - a)),)
            )
        }
        for n, (a, b) in enumerate(ranges)
    ]
    with pytest.raises(ValueError, match="written twice or by nobody"):
        merged(entries)


def _missing(newest: Path, before: Path) -> None:
    next(newest.glob("data-0001*")).unlink()


def _stale(newest: Path, before: Path) -> None:
    """What an older attempt wrote under the same name."""
    old = next(before.glob("data-0001*"))
    (newest / old.name).write_bytes(old.read_bytes())


def _flipped(newest: Path, before: Path) -> None:
    file = next(newest.glob("data-0002*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def _cut(newest: Path, before: Path) -> None:
    file = next(newest.glob("data-0000*"))
    file.write_bytes(file.read_bytes()[:-1])


def _others_manifest(newest: Path, before: Path) -> None:
    (newest / "manifest.json").write_bytes((before / "manifest.json").read_bytes())


def _half_beside(newest: Path, before: Path) -> None:
    """A later attempt was killed: one process's part is there, the others' and the manifest are not."""
    later = newest.parent / "000003-step-3-0123abcd"
    later.mkdir()
    old = next(newest.glob("data-0001*"))
    (later / old.name).write_bytes(old.read_bytes())


TEARS = {each.__name__: each for each in (_missing, _stale, _flipped, _cut, _others_manifest, _half_beside)}


@pytest.mark.parametrize("tear", TEARS)
def test_a_checkpoint_of_which_one_processs_part_is_torn_is_passed_over(tear: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    names = ("table", "large", "dense")
    wholes = {
        step: {path: each for path, each in state(step).items() if path.removeprefix("parameter:") in names}
        for step in (1, 2)
    }
    held = {"parameter:table": HELD["parameter:table"]}
    for step, whole in wholes.items():
        run.save(step, [{path: each.clone() for path, each in whole.items()} for _ in range(3)], held)
    run.first.close()
    before, newest = sorted(each for each in tmp_path.iterdir() if each.is_dir())
    TEARS[tear](newest, before)
    model = torch.nn.ParameterDict({name: torch.zeros_like(wholes[1][f"parameter:{name}"]) for name in names})
    again = Checkpoints(tmp_path)
    found = again.restore(model, {})
    assert found is not None
    want = 2 if tear == "_half_beside" else 1
    assert found[0].step == want
    assert all(torch.equal(model[name], wholes[want][f"parameter:{name}"]) for name in names)
    assert [note.name for note in again.notes()] == ([] if want == 2 else ["checkpoint_damaged"])
    again.save({f"parameter:{name}": model[name] for name in names}, step=9, about={})
    again.finish()
    left = sorted(each.name for each in tmp_path.iterdir() if each.is_dir())
    assert len(left) == 2, "what is torn goes once a newer one is whole"
    assert left[-1].split("-")[2] == "9"
    again.close()
