"""Upkeep of the compile cache: what is listed, checked and removed, beside processes that compile and read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from twinstep.spec.errors import UnavailableError
from twinstep.worker.compile import StepCompiler, upkeep
from twinstep.worker.compile import store as store_module
from twinstep.worker.compile.store import ProgramStore, pack

PARTS = {"code": bytes(range(256)) * 8, "plan": b"{}"}
SIZE = len(pack("a", PARTS))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of entries a (the oldest), b and c, each used a day after the one before."""
    directory = tmp_path / "cache"
    store = ProgramStore(directory / "programs")
    now = time.time()
    for number, key in enumerate("abc"):
        store.put(key, PARTS)
        used = now - (3 - number) * 86400
        os.utime(store._path(key), (used, used))
    return directory


def store_of(cache: Path) -> ProgramStore:
    return ProgramStore(cache / "programs")


def left(cache: Path) -> list[str]:
    store = store_of(cache)
    return [key for key in "abc" if store._path(key).exists()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_a_compiled_program_says_what_it_was_made_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    made = StepCompiler(
        step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla", cache_dir=tmp_path / "cache"
    )
    made(torch.ones(5, 3), sizes={"batch_size": 5})
    (entry,) = upkeep.verify(tmp_path / "cache")
    assert entry.fault == ""
    assert entry.kind == "programs"
    assert entry.key == made.key(torch.ones(5, 3), sizes={"batch_size": 5}).digest
    assert entry.summary["backend"] == "xla"
    assert entry.summary["sizes"] == {"batch_size": 5}
    assert entry.summary["batch"] == ["batch [5, 3] float32"]
    assert entry.summary["versions"]["torch"] == torch.__version__
    assert upkeep.list_entries(tmp_path / "cache") == [entry]


def test_the_one_used_last_comes_first_and_no_cache_holds_nothing(cache: Path, tmp_path: Path) -> None:
    entries = upkeep.list_entries(cache)
    assert [entry.path for entry in entries] == [store_of(cache)._path(key) for key in "cba"]
    assert {entry.bytes for entry in entries} == {SIZE}
    assert [round(entry.as_json(time.time())["age_s"] / 86400) for entry in entries] == [1, 2, 3]
    assert upkeep.list_entries(tmp_path / "nowhere") == []
    assert upkeep.clear(tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("spoil", ["torn", "flipped", "foreign", "renamed", "longer", "shared"])
def test_what_is_damaged_is_found_and_nothing_else(cache: Path, spoil: str) -> None:
    path = store_of(cache)._path("b")
    content = path.read_bytes()
    if spoil == "renamed":
        path.write_bytes(pack("another", PARTS))
    elif spoil == "shared":
        path.chmod(0o666)
    else:
        path.write_bytes(
            {
                "torn": content[:-1],
                "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
                "foreign": b"something else",
                "longer": content + b"\0",
            }[spoil]
        )
    faults = {entry.path.name: entry.fault for entry in upkeep.verify(cache)}
    assert faults.pop(path.name)
    assert set(faults.values()) == {""}
    assert upkeep.drop(cache, [entry for entry in upkeep.verify(cache) if entry.fault])
    assert left(cache) == ["a", "c"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(content=st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: pack("a", PARTS)[:60] + tail))
def test_whatever_lies_there_is_told_of_and_raises_nothing(content: bytes, cache: Path) -> None:
    path = store_of(cache)._path("a")
    path.write_bytes(content)
    for entries in (upkeep.list_entries(cache), upkeep.verify(cache)):
        assert {entry.path.name: bool(entry.fault) for entry in entries}[path.name]


@given(key=st.text(max_size=200) | st.text(max_size=100).map(lambda text: f"CompileKey(batch={text!r})"))
def test_any_text_of_a_key_is_summarised_or_left(key: str) -> None:
    assert upkeep.summarise(key) == {}


@pytest.mark.parametrize(
    ("most", "age", "kept"),
    [
        (3 * SIZE, None, "abc"),
        (3 * SIZE - 1, None, "bc"),
        (SIZE, None, "c"),
        (0, None, ""),
        (None, 4 * 86400, "abc"),
        (None, 2.5 * 86400, "bc"),
        (None, 0, ""),
        (SIZE, 2.5 * 86400, "c"),
        (2 * SIZE, 1.5 * 86400, "c"),
    ],
)
def test_pruning_takes_the_longest_unused_and_leaves_what_fits(
    cache: Path, most: int | None, age: float | None, kept: str
) -> None:
    would = upkeep.prune(cache, max_bytes=most, older_than=age, dry_run=True)
    assert left(cache) == list("abc")
    gone = upkeep.prune(cache, max_bytes=most, older_than=age)
    assert [entry.path for entry in gone] == [entry.path for entry in would]
    assert left(cache) == list(kept)
    assert all(store_of(cache).get(key) == PARTS for key in kept)


def test_clearing_leaves_what_backends_keep_and_what_is_being_written(cache: Path) -> None:
    (cache / "inductor").mkdir()
    (cache / "inductor" / "kernel.so").write_bytes(b"x" * 100)
    fresh, stale = cache / "programs" / "fresh.part", cache / "programs" / "stale.part"
    fresh.write_bytes(b"half")
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    assert upkeep.besides(cache) == {"inductor": 100}
    assert len(upkeep.clear(cache)) == 3
    assert left(cache) == []
    assert upkeep.besides(cache) == {"inductor": 100, "programs": 4}
    assert fresh.exists()
    assert not stale.exists()


def test_a_lock_that_is_held_stays_and_one_that_is_not_goes_with_its_entry(cache: Path) -> None:
    store = store_of(cache)
    for key in "ab":
        with store.lock(key):
            pass
    held, idle = (store._path(key).with_suffix(".lock") for key in "ab")
    idle.touch()
    with store.lock("a"):
        upkeep.clear(cache)
        assert held.exists()
        with pytest.raises(Timeout):
            FileLock(held, timeout=0).acquire()
    assert not idle.exists()


def test_runs_that_read_and_write_meanwhile_get_whole_entries_or_none(cache: Path) -> None:
    stop, wrong = threading.Event(), []

    def run(key: str) -> None:
        store = store_of(cache)
        while not stop.is_set():
            with store.lock(key):
                found = store.get(key)
                if found is None:
                    store.put(key, PARTS)
                elif found != PARTS:
                    wrong.append(found)

    threads = [threading.Thread(target=run, args=(key,)) for key in "abca"]
    for thread in threads:
        thread.start()
    for round_ in range(60):
        (upkeep.clear, upkeep.verify, lambda at: upkeep.prune(at, max_bytes=SIZE))[round_ % 3](cache)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(not entry.fault for entry in upkeep.verify(cache))


@pytest.mark.parametrize("which", ["cache", "programs"])
def test_a_cache_that_others_can_write_to_is_refused(cache: Path, which: str) -> None:
    (cache if which == "cache" else cache / "programs").chmod(0o777)
    for act in (upkeep.list_entries, upkeep.verify, upkeep.clear, lambda at: upkeep.prune(at, max_bytes=0)):
        with pytest.raises(UnavailableError, match="can be written by others") as caught:
            act(cache)
        assert "chmod go-w" in caught.value.remedy
    assert left(cache) == list("abc")


def test_a_file_in_place_of_the_cache_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="cannot be read"):
        upkeep.list_entries(tmp_path / "file")


def test_a_full_store_still_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "STALE_SECONDS", 0.0)
    store = ProgramStore(tmp_path / "cache" / "programs", max_bytes=2 * SIZE)
    for key in "abc":
        with store.lock(key):
            store.put(key, PARTS)
        os.utime(store._path(key), (ord(key), ord(key)))
    assert [key for key in "abc" if store.get(key)] == ["b", "c"]
