"""Checkpoint files: every tensor back bit for bit, any rows alone, no damage unseen, the last good one always there."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from twinstep.worker.checkpoint import manifest as layout
from twinstep.worker.checkpoint.errors import DamagedError, ForeignError, MisfitError, TakenError
from twinstep.worker.checkpoint.keep import Keep, to_remove
from twinstep.worker.checkpoint.lease import Lease
from twinstep.worker.checkpoint.manifest import MANIFEST, Manifest
from twinstep.worker.checkpoint.place import LocalPlace, UriPlace, open_place
from twinstep.worker.checkpoint.read import Reader, SavedRows
from twinstep.worker.checkpoint.saver import Checkpoints

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, generator=generator).to(dtype)


def saved(place: Any, tensors: dict[str, Tensor], step: int = 3, **more: Any) -> Checkpoints:
    checkpoints = Checkpoints(place, **more)
    checkpoints.save(tensors, step=step, about={"spec": {"name": "t"}})
    checkpoints.finish()
    return checkpoints


def whole(checkpoints: Checkpoints) -> list[str]:
    return sorted(name for name in checkpoints.place.names() if not name.startswith("."))


def same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and bool(torch.equal(first, second))


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    piece=st.integers(1, 200),
    file=st.integers(1, 400),
)
def test_any_tensors_come_back_bit_for_bit_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], seed: int, piece: int, file: int
) -> None:
    place = tmp_path_factory.mktemp("place")
    tensors = {
        f"parameter:{index}": filled(shape, DTYPES[(index + seed) % len(DTYPES)], seed + index)
        for index, shape in enumerate(shapes)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PIECE_BYTES", piece)
        patch.setattr(layout, "FILE_BYTES", file)
        checkpoints = saved(place, tensors)
    (name,) = whole(checkpoints)
    reader = Reader(checkpoints.place, name)
    reader.verify()
    found = reader.tensors()
    assert found.keys() == tensors.keys()
    for path, tensor in tensors.items():
        assert same(found[path], tensor)
        if tensor.dim():
            start, stop = sorted(((seed * 7) % (len(tensor) + 1), (seed * 3) % (len(tensor) + 1)))
            assert same(reader.rows(path, start, stop), tensor[start:stop])
    on_disk = {each.name: each.stat().st_size for each in (place / name).glob("data-*")}
    assert on_disk == reader.manifest.files
    assert sum(on_disk.values()) == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    checkpoints.close()


def test_a_reader_of_some_rows_reads_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", 4096)
    table = torch.arange(64 * 1024, dtype=torch.float32).reshape(4096, 16)
    checkpoints = saved(tmp_path, {"parameter:table": table, "parameter:other": torch.zeros(4096)})
    reader = Reader(checkpoints.place, whole(checkpoints)[0])
    shard = reader.rows("parameter:table", 1024, 2048)  # the second of four devices
    assert same(shard, table[1024:2048])
    assert reader.bytes_read <= shard.numel() * 4 + 2 * 4096
    checkpoints.close()


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 4095), max_size=40))
def test_single_rows_read_each_piece_that_holds_some_once(
    tmp_path_factory: pytest.TempPathFactory, ids: set[int]
) -> None:
    table = torch.arange(64 * 1024, dtype=torch.float32).reshape(4096, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PIECE_BYTES", 4096)  # 64 rows
        checkpoints = saved(tmp_path_factory.mktemp("place"), {"parameter:table": table})
    reader, picked = Reader(checkpoints.place, whole(checkpoints)[0]), np.array(sorted(ids), np.int64)
    assert same(SavedRows(reader, "parameter:table").pick(picked), table[torch.from_numpy(picked)])
    assert reader.bytes_read == 4096 * len({each // 64 for each in ids})
    checkpoints.close()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 300), piece=st.integers(1, 40), step=st.integers(1, 9), chunk=st.integers(1, 9))
def test_readers_that_take_turns_in_chunks_of_rows_read_each_piece_once(
    tmp_path_factory: pytest.TempPathFactory, rows: int, piece: int, step: int, chunk: int
) -> None:
    table = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PIECE_BYTES", piece * 12)
        checkpoints = saved(tmp_path_factory.mktemp("place"), {"parameter:table": table})
    reader = Reader(checkpoints.place, whole(checkpoints)[0])
    for start in range(0, rows, chunk * step):
        stop = min(start + chunk * step, rows)
        for turn in range(start, start + step):
            assert same(SavedRows(reader, "parameter:table").rows(turn, stop, step), table[turn:stop:step])
    assert reader.bytes_read == rows * 12
    checkpoints.close()


def test_pieces_are_verified_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, {"parameter:a": torch.ones(3), "parameter:b": torch.ones(3)})
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    both, read = threading.Barrier(2), LocalPlace.read_into

    def read_together(*arguments: Any) -> int:
        both.wait(timeout=60)  # one alone would break it
        return read(*arguments)

    monkeypatch.setattr(LocalPlace, "read_into", read_together)
    reader = Reader(checkpoints.place, whole(checkpoints)[0])
    reader.verify()
    assert reader.bytes_read == 24
    checkpoints.close()


@pytest.mark.parametrize("where", ["local", "memory"])
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, where: str) -> None:
    place: Any = tmp_path if where == "local" else f"memory://flip-{tmp_path.name}"
    checkpoints = saved(place, {"parameter:w": filled((37, 5), torch.float32, 1), "buffer:n": torch.tensor(7)})
    (name,) = whole(checkpoints)
    files = [*Reader(checkpoints.place, name).manifest.files, MANIFEST]
    generator = torch.Generator().manual_seed(4)
    for file in files:
        good = checkpoints.place.read(name, file)
        for place_of_bit in torch.randint(0, 8 * len(good), (24,), generator=generator).tolist():
            bad = bytearray(good)
            bad[place_of_bit // 8] ^= 1 << (place_of_bit % 8)
            _overwrite(checkpoints, name, file, bytes(bad))
            with pytest.raises(DamagedError):
                Reader(checkpoints.place, name).verify()
        for bad_content in (good[:-1], b""):
            _overwrite(checkpoints, name, file, bad_content)
            with pytest.raises(DamagedError):
                Reader(checkpoints.place, name).verify()
        _overwrite(checkpoints, name, file, good)
        Reader(checkpoints.place, name).verify()
    checkpoints.close()


def _overwrite(checkpoints: Checkpoints, name: str, file: str, content: bytes) -> None:
    place = checkpoints.place
    if isinstance(place, LocalPlace):
        (place.path / name / file).write_bytes(content)
    else:
        place.write(name, file, [content])


def model_of(width: int = 4, rows: int = 6) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(rows, width), nn.Linear(width, 2))
    return model, {"dense": torch.optim.Adam(model.parameters())}


def stepped(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    optimizers["dense"].zero_grad()
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizers["dense"].step()


def live(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    from twinstep.worker.checkpoint.content import live_tensors

    return live_tensors(model, optimizers)


def test_paths_are_those_of_the_compilers_slots() -> None:
    from twinstep.worker.compile.state import TrainState

    model, optimizers = model_of()
    state = TrainState(model, optimizers)
    found = live(model, optimizers)
    assert list(found) == [slot.path for slot in state.slots]
    assert all(first is second for first, second in zip(found.values(), state.live(), strict=True))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    model, optimizers = model_of()
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        stepped(model, optimizers)
        checkpoints.save(live(model, optimizers), step=step, about={})
    checkpoints.close()
    newest = tmp_path / "000002-step-2" / "data-00000"
    content = bytearray(newest.read_bytes())
    content[17] ^= 4
    newest.write_bytes(content)
    (tmp_path / "000009-step-9").mkdir()  # half an upload
    again, optimizers_again = model_of()
    checkpoints = Checkpoints(tmp_path)
    found = checkpoints.restore(again, optimizers_again)
    assert found is not None
    assert found[0].step == 1
    (note,) = checkpoints.notes()
    assert note.name == "checkpoint_damaged"
    assert "step-2" in note.reason
    checkpoints.save(live(again, optimizers_again), step=2, about={})
    checkpoints.finish()
    assert whole(checkpoints) == ["000001-step-1", "000010-step-2"], "what is broken goes once a newer one is whole"
    checkpoints.close()


def test_where_none_is_whole_nothing_is_started_anew_in_silence(tmp_path: Path) -> None:
    model, optimizers = model_of()
    saved(tmp_path, live(model, optimizers)).close()
    (tmp_path / "000001-step-3" / "data-00000").unlink()
    checkpoints = Checkpoints(tmp_path)
    before = {path: tensor.clone() for path, tensor in live(model, optimizers).items()}
    with pytest.raises(DamagedError, match="is whole"):
        checkpoints.restore(model, optimizers)
    assert all(same(before[path], tensor) for path, tensor in live(model, optimizers).items() if path in before)
    checkpoints.close()


def test_another_model_is_refused_by_the_name_of_each_tensor_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizers = model_of()
    stepped(model, optimizers)
    saved(tmp_path, live(model, optimizers)).close()
    other = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 1)).bfloat16()
    wanted = {"dense": torch.optim.SGD(other.parameters(), momentum=0.9)}
    before = {name: each.clone() for name, each in other.state_dict().items()}
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(MisfitError) as refused:
        checkpoints.restore(other, wanted)
    faults = {fault.field: fault.problem for fault in refused.value.faults}
    assert faults["parameter:0.weight"] == "is [8, 4] bfloat16, in the checkpoint [6, 4] float32"
    assert faults["parameter:2.weight"] == "is not in the checkpoint"
    assert faults["parameter:1.bias"] == "is in the checkpoint alone"
    assert "optimizer:dense/exp_avg/0.weight" in faults
    assert "optimizer:dense/momentum_buffer/0.weight" in faults
    assert all(torch.equal(before[name], each) for name, each in other.state_dict().items())
    checkpoints.close()


def test_a_state_that_is_not_finite_is_never_the_newest_checkpoint(tmp_path: Path) -> None:
    model, optimizers = model_of()
    checkpoints = saved(tmp_path, live(model, optimizers), step=1)
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan  # type: ignore[index, union-attr, operator]
    checkpoints.save(live(model, optimizers), step=2, about={})
    checkpoints.finish()
    assert whole(checkpoints) == ["000001-step-1"]
    assert [(note.name, "1.weight holds NaN" in note.reason) for note in checkpoints.notes()][1:] == [
        ("checkpoint_failed", True)
    ]
    checkpoints.close()


def test_a_full_disk_leaves_the_last_good_one_and_the_next_try_works(tmp_path: Path) -> None:
    """A file size limit of the kernel's, as a full disk would: in a child, since it is the process's."""
    import subprocess
    import sys

    code = """
import resource, signal, sys, torch
from twinstep.worker.checkpoint.saver import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
made = Checkpoints(sys.argv[1])
tensors = {'parameter:w': torch.arange(100_000.0)}
def save(step, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    made.save(tensors, step=step, about={})
    made.finish()
save(1, resource.RLIM_INFINITY); save(2, 150_000); save(3, resource.RLIM_INFINITY)
for note in made.notes(): print(note.name, note.reason)
made.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert first.startswith("checkpoint_saved step 1")
    assert second.startswith("checkpoint_failed the checkpoint of step 2 could not be written: File too large;")
    assert second.endswith("the last good one is of step 1")
    assert third.startswith("checkpoint_saved step 3")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["000001-step-1", "000003-step-3", "lock"]


def test_a_store_that_fails_leaves_the_last_good_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoints = saved(f"memory://away-{tmp_path.name}", {"parameter:w": torch.ones(4)}, step=1)

    def away(*_: Any) -> None:
        raise ConnectionError("the bucket does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(UriPlace, "write", away)
        checkpoints.save({"parameter:w": torch.zeros(4)}, step=2, about={})
        checkpoints.finish()
    assert "the bucket does not answer; the last good one is of step 1" in checkpoints.notes()[-1].reason
    (name,) = whole(checkpoints)
    assert Reader(checkpoints.place, name).rows("parameter:w").tolist() == [1.0] * 4
    checkpoints.close()


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path, owner="run-a on host-1")
    with pytest.raises(TakenError, match="written by run-a on host-1"):
        Checkpoints(tmp_path, owner="run-b")
    first.close()
    Checkpoints(tmp_path, owner="run-b").close()


def lease_of(url: str, owner: str, **more: Any) -> Lease:
    return Lease(open_place(url), owner, beat_s=0.02, lease_s=0.2, **more)


def test_a_lease_is_kept_from_others_while_it_beats_whatever_their_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://lease-{tmp_path.name}"
    first = lease_of(url, "run-a")
    monkeypatch.setattr("time.time", lambda: 9e9)  # a host a century ahead
    with pytest.raises(TakenError, match="run-a"):
        lease_of(url, "run-b")
    first._end.set()  # as after kill -9: it beats no more
    second = lease_of(url, "run-b")
    with pytest.raises(TakenError, match="run-b"):
        first.check()
    second.release()
    lease_of(url, "run-c").release()


def test_a_later_attempt_takes_over_at_once_and_the_one_before_commits_no_more(tmp_path: Path) -> None:
    url = f"memory://attempts-{tmp_path.name}"
    first = Checkpoints(url, owner="attempt 1", lineage="job-a", attempt=1)
    second = Checkpoints(url, owner="attempt 2", lineage="job-a", attempt=2)
    first.save({"parameter:w": torch.ones(3)}, step=5, about={})
    first.finish()
    assert [note.name for note in first.notes()] == ["checkpoint_lost"]
    assert not whole(first)
    second.save({"parameter:w": torch.ones(3)}, step=5, about={})
    second.finish()
    assert len(whole(second)) == 1
    first.close()
    second.close()


def kept(number: int, **scores: float) -> Manifest:
    return Manifest(number=number, step=number, written_at=0, scores=scores, files={}, tensors={})


def test_the_last_and_the_best_are_kept() -> None:
    found = {f"n{each}": kept(each, auc=score) for each, score in enumerate([0.9, 0.5, 0.8, 0.6, math.nan])}
    found["n5"] = kept(5)
    assert to_remove(found, [(2, "half"), (9, "being-written")], Keep(last=2, best=2, metric="auc")) == [
        "n1", "half", "n3",
    ]  # fmt: skip
    found = {f"n{each}": kept(each, ne=score) for each, score in enumerate([0.9, 0.5, 0.8])}
    assert to_remove(found, [], Keep(last=1, best=1, metric="ne")) == ["n0"]
    assert to_remove(found, [], Keep(last=0)) == ["n0", "n1"], "the newest always stays"


def test_numbers_go_on_and_clocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, {"parameter:w": torch.zeros(1)}, step=50).close()
    monkeypatch.setattr("time.time", lambda: 1000.0)  # a host whose clock is decades behind
    second = saved(tmp_path, {"parameter:w": torch.ones(1)}, step=40)
    model = nn.Module()
    model.w = nn.Parameter(torch.full((1,), 5.0))
    found = second.restore(model, {})
    assert found is not None
    assert found[0].step == 40, "the one written last, by count"
    second.close()


def test_a_later_format_is_named(tmp_path: Path) -> None:
    saved(tmp_path, {"parameter:w": torch.zeros(1)}).close()
    path = tmp_path / "000001-step-3" / MANIFEST
    body = json.loads(json.loads(path.read_bytes())["manifest"])
    path.write_bytes(Manifest.model_validate({**body, "format": 9}).to_bytes())
    with pytest.raises(ForeignError, match="format 9"):
        Reader(open_place(tmp_path), "000001-step-3")
