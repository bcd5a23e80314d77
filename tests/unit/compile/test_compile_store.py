"""The store of programs on disk: what is damaged, foreign or half written is a miss; nothing is ever half read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinstep.worker.compile import store as store_module
from twinstep.worker.compile.store import ProgramStore, pack, unpack

PARTS = {"source": b"print('a')\n" * 20, "kernel/0": bytes(range(256)), "empty": b""}
KEY = "CompileKey(sizes=(('batch_size', 4),))"
ENTRY = pack(KEY, PARTS)


def test_what_is_put_is_got_and_nothing_else() -> None:
    assert unpack(ENTRY, KEY) == PARTS
    assert unpack(ENTRY, KEY + " ") is None


@given(offset=st.integers(0, len(ENTRY) - 1), flip=st.integers(1, 255))
def test_a_flipped_bit_anywhere_is_a_miss(offset: int, flip: int) -> None:
    damaged = bytearray(ENTRY)
    damaged[offset] ^= flip
    assert unpack(bytes(damaged), KEY) is None


def test_a_torn_entry_is_a_miss_wherever_it_was_torn() -> None:
    assert all(unpack(ENTRY[:length], KEY) is None for length in range(len(ENTRY)))
    assert unpack(ENTRY + b"\0", KEY) is None


@given(content=st.binary(max_size=200))
def test_foreign_bytes_are_a_miss(content: bytes) -> None:
    assert unpack(content, KEY) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(parts=st.dictionaries(st.text(max_size=8), st.binary(max_size=64), max_size=4), key=st.text(max_size=64))
def test_any_parts_come_back_as_they_were(parts: dict[str, bytes], key: str, tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs")
    assert store.put(key, parts)
    assert store.get(key) == parts


def file_of(store: ProgramStore) -> Path:
    (path,) = store.directory.glob("*.program")
    return path


def test_a_damaged_entry_is_removed_and_written_anew(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs")
    assert store.get(KEY) is None
    store.put(KEY, PARTS)
    file_of(store).write_bytes(ENTRY[:-1])
    assert store.get(KEY) is None
    assert store.entries() == []
    store.put(KEY, PARTS)
    assert store.get(KEY) == PARTS


def test_an_entry_of_another_key_under_this_ones_name_is_a_miss(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs")
    store.put(KEY, PARTS)
    file_of(store).write_bytes(pack("another key", PARTS))
    assert store.get(KEY) is None


def test_an_older_format_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs")
    store.put(KEY, PARTS)
    monkeypatch.setattr("twinstep.worker.compile.store.FORMAT", 2)
    assert store.get(KEY) is None


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o707])
@pytest.mark.parametrize("which", ["programs", "cache"])
def test_a_directory_that_others_can_write_to_is_not_believed_and_said_once(
    mode: int, which: str, tmp_path: Path
) -> None:
    said: list[str] = []
    store = ProgramStore(tmp_path / "cache" / "programs", warn=said.append)
    store.put(KEY, PARTS)
    (store.directory if which == "programs" else store.directory.parent).chmod(mode)
    assert store.get(KEY) is None
    assert not store.put(KEY, PARTS)
    assert len(said) == 1
    assert "others" in said[0]


def test_a_file_that_others_can_write_to_or_a_link_is_not_believed(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs")
    store.put(KEY, PARTS)
    path = file_of(store)
    path.chmod(0o666)
    assert store.get(KEY) is None
    path.chmod(0o600)
    assert store.get(KEY) == PARTS
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert store.get(KEY) is None


def test_directories_are_made_for_the_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = ProgramStore(tmp_path / "cache" / "programs")
        assert store.put(KEY, PARTS)
    finally:
        os.umask(before)
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert store.directory.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs", max_bytes=3 * len(pack("a", PARTS)))
    for number, key in enumerate("abc"):
        store.put(key, PARTS)
        os.utime(store._path(key), (number, number))
    assert store.get("a") is not None  # used now
    store.put("d", PARTS)
    assert [key for key in "abcd" if store.get(key)] == ["a", "c", "d"]


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs", max_bytes=len(ENTRY) - 1)
    assert not store.put(KEY, PARTS)
    assert store.entries() == []


def test_a_full_disk_is_said_once_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    store = ProgramStore(tmp_path / "cache" / "programs", warn=said.append)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store.put(KEY, PARTS)
    assert not store.put(KEY, PARTS)
    assert len(said) == 1
    assert "No space left" in said[0]
    assert list(store.directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    store = ProgramStore(tmp_path / "file" / "programs", warn=said.append)
    with store.lock(KEY):
        assert store.get(KEY) is None
        assert not store.put(KEY, PARTS)
    assert len(said) == 1


WRITER = """
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("store", sys.argv[3])  # alone: the package would load torch
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
store = module.ProgramStore(Path(sys.argv[1]))
parts = {"part": os.urandom(1 << 16) * 64}
print("ready", flush=True)
while True:
    store.put(sys.argv[2], parts)
    print("written", flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_entry_or_none(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "cache" / "programs")
    seen = set()
    command = [sys.executable, "-c", WRITER, str(store.directory), KEY, str(Path(store_module.__file__))]
    for lines, wait in ((1, 0.0), (1, 0.003), (1, 0.01), (2, 0.002), (3, 0.005)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(lines):
                child.stdout.readline()
            time.sleep(wait)
            child.send_signal(signal.SIGKILL)
        found = store.get(KEY)
        assert found is None or len(found["part"]) == 64 << 16
        seen.add(found is not None)
    assert True in seen, "no process lived to write one"
    for path in store.directory.glob("*.part"):  # what the killed ones left, once it is old
        os.utime(path, (0, 0))
    store.put("another", PARTS)
    assert list(store.directory.glob("*.part")) == []


def test_one_at_a_time_holds_the_lock_of_a_key(tmp_path: Path) -> None:
    stores = [ProgramStore(tmp_path / "cache" / "programs") for _ in range(4)]
    inside, most, compiled = [0], [0], []

    def work(store: ProgramStore) -> None:
        with store.lock(KEY):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if store.get(KEY) is None:
                time.sleep(0.05)
                compiled.append(store)
                store.put(KEY, PARTS)
            inside[0] -= 1

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(compiled) == 1
