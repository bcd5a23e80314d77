"""Bytes past the page cache: the file is what was given, whatever the disk says of blocks, and memory is used again."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinstep.worker.checkpoint.disk import BLOCK, Blocks, write_file

CONTENT = random.Random(5).randbytes(2 * BLOCK + 5001)


def parts(size: int, *, cuts: int) -> Iterator[memoryview]:
    """Give the first bytes of CONTENT in `cuts` parts of uneven lengths, some of them empty."""
    places = sorted(random.Random(size + cuts).randint(0, size) for _ in range(cuts - 1))
    for start, stop in zip([0, *places], [*places, size], strict=True):
        yield memoryview(CONTENT)[start:stop]


def past_cache(path: Path) -> bool:
    """Say whether files here may be written past the cache."""
    fd = os.open(path / "trial", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@pytest.mark.parametrize("size", [0, 1, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len(CONTENT)])
@pytest.mark.parametrize("cuts", [1, 7])
def test_a_file_is_what_its_parts_are_end_to_end(tmp_path: Path, size: int, cuts: int) -> None:
    write_file(tmp_path / "file", parts(size, cuts=cuts), Blocks())
    assert (tmp_path / "file").read_bytes() == CONTENT[:size]


def test_a_shorter_file_takes_the_place_of_a_longer_one(tmp_path: Path) -> None:
    for size in (len(CONTENT), BLOCK + 3):
        write_file(tmp_path / "file", parts(size, cuts=3), Blocks())
    assert (tmp_path / "file").read_bytes() == CONTENT[: BLOCK + 3]


def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not past_cache(tmp_path):
        pytest.skip("the file system of the temporary directory takes nothing past the cache")
    seen: list[tuple[int, bool]] = []
    write = os.write

    def spy(fd: int, data: Any) -> int:
        seen.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", spy)
    write_file(tmp_path / "file", parts(len(CONTENT), cuts=5), Blocks())
    assert seen == [(BLOCK, True), (BLOCK, True), (5001, False)]


def refuses_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, *more: Any) -> Any:
        if command == fcntl.F_SETFL and more[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, *more)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def refuses_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def refuse(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)


def takes_part_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100_003]))


@pytest.mark.parametrize("disk", [refuses_the_flag, refuses_the_block, takes_part_of_a_block])
def test_a_disk_that_takes_no_blocks_gets_the_same_bytes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Any
) -> None:
    disk(monkeypatch)
    write_file(tmp_path / "file", parts(len(CONTENT), cuts=4), Blocks())
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_full_disk_is_an_error_and_the_next_file_uses_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    with blocks.one() as first:
        pass

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            write_file(tmp_path / "file", parts(len(CONTENT), cuts=2), blocks)
    write_file(tmp_path / "file", parts(len(CONTENT), cuts=2), blocks)
    with blocks.one() as last, blocks.one() as other:
        assert last.obj is first.obj
        assert other.obj is not first.obj


def test_a_file_is_on_the_disk_before_it_is_said_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        fsync(fd)
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", spy)
    write_file(tmp_path / "file", parts(BLOCK + 9, cuts=2), Blocks())
    assert sizes == [BLOCK + 9]
