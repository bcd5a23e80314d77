"""Bytes onto a local disk, past the page cache where the file system takes that.

A checkpoint is written, and not read before a run goes on from it. Through the cache each of its pages would be asked
of the kernel, filled by a copy, and freed with the checkpoint that is pruned: a copy of the state in memory, which
drives out what each step reads. A virtual machine may give such pages back to its host and fault them in anew for the
next checkpoint: two threads spent from 0.13 to 4.7 s writing the same 512 MiB. Past the cache a disk reads from a few
blocks that stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

Buffer = bytes | memoryview
BLOCK = 4 << 20  # bytes of one write: most of what a disk is asked for at once, and a multiple of any disk's sectors


class Blocks:
    """Memory that disks read from: whole pages, kept from one file to the next; as many as threads write at once."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[memoryview]:
        """Lend a block of BLOCK bytes."""
        try:
            block = self._free.pop()
        except IndexError:
            block = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            yield memoryview(block)
        finally:
            self._free.append(block)


def write_file(path: Path, parts: Iterable[Buffer], blocks: Blocks) -> None:
    """Write a new file, part after part as they come, and wait until the disk has it.

    Raises:
        OSError: the disk is full, or whatever else it says; what is there of the file is nobody's.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with blocks.one() as block:
            out, room, filled = _Out(fd), np.frombuffer(block, dtype=np.uint8), 0
            for part in parts:
                rest = np.frombuffer(part, dtype=np.uint8) if len(part) else room[:0]
                while len(rest):
                    count = min(len(rest), BLOCK - filled)
                    room[filled : filled + count] = rest[:count]  # NumPy copies beside Python's other threads
                    rest, filled = rest[count:], filled + count
                    if filled == BLOCK:
                        out.block(block)
                        filled = 0
            out.through_cache(block[:filled])
        os.fsync(fd)
    finally:
        os.close(fd)


class _Out:
    """A file that is written from its beginning to its end: whole blocks past the cache while that works."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._past: bool | None = None  # nobody has tried yet

    def block(self, block: memoryview) -> None:
        """Write a whole block."""
        if self._past is None:
            self._past = self._turn(os.O_DIRECT)
        done = 0
        if self._past:
            try:
                done = os.write(self._fd, block)
            except OSError as error:
                if error.errno != errno.EINVAL:  # which says that this file system wants another alignment, or none
                    raise
        if done < len(block):
            self.through_cache(block[done:])

    def through_cache(self, rest: memoryview) -> None:
        """Write what is no whole block; nothing that follows it stands where a block would."""
        if self._past:
            self._turn(0)
        self._past = False
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _turn(self, direct: int) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | direct)
        except OSError:
            return False
        return bool(direct)
