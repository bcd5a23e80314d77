"""Compiled programs on disk: one file per CompileKey, written whole or not at all, and checked before it is believed.

A program is code that will be run, so a file counts only if nobody but its owner can have written it, its own sums
agree, and it names the very key that is asked for; whatever else lies there is a miss. Nothing here unpickles or runs
anything, and nothing here raises: where the disk does not work, the step is compiled as if there were no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

MAGIC = b"twinstep-program"
FORMAT = 1
"""Raise it where a part changes its meaning: older files are then misses."""
MAX_BYTES = 10 << 30
LOCK_SECONDS = 1800.0  # how long to wait for another process that compiles the same key; a whole TPU compile fits in
STALE_SECONDS = 3600.0  # a temporary file older than this belongs to a process that was killed while it wrote
_SUM = hashlib.sha256().digest_size
_HEAD = len(MAGIC) + 2 + 8


class ProgramStore:
    """A directory of programs by key.

    Args:
        directory: made if it is not there; must be the user's own, and no one else's to write to.
        max_bytes: what all entries together may take; the least recently used go first.
        warn: called once, with what is wrong, where the directory cannot be used or written to.
    """

    def __init__(
        self, directory: Path, *, max_bytes: int = MAX_BYTES, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._warn = warn
        self._warned = False

    def get(self, key: str) -> dict[str, bytes] | None:
        """Return the parts stored under `key`, or None: there are none, or they cannot be trusted."""
        if not self._usable():
            return None
        path = self._path(key)
        try:
            content = read_file(path)
        except OSError:
            return None
        parts = unpack(content, key)
        if parts is None:
            with contextlib.suppress(OSError):
                path.unlink()  # so that it is written anew
        else:
            with contextlib.suppress(OSError):
                os.utime(path)  # the clock of least recent use
        return parts

    def put(self, key: str, parts: Mapping[str, bytes]) -> bool:
        """Store `parts` under `key` and make room for them; return whether that worked."""
        content = pack(key, parts)
        if len(content) > self._max_bytes or not self._usable(make=True):
            return False
        try:
            _write(self._path(key), content)
        except OSError as error:
            self._say(f"programs cannot be kept in {self.directory}: {error.strerror or error}")
            return False
        self._make_room(keep=self._path(key))
        return True

    def file(self, key: str) -> Path:
        """Return the file that the parts under `key` lie in, or would."""
        return self._path(key)

    def part(self, path: Path, name: str) -> bytes | None:
        """Return one part of one of `entries`, whatever its key, the others unread; None: it cannot be trusted."""
        try:
            with _open(path) as file:
                return _part(file, name)
        except OSError:
            return None

    def drop(self, key: str) -> None:
        """Forget what is stored under `key`."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one process at a time compile `key`; the others wait and then find its program.

        Where the lock cannot be had (a read-only disk, a holder that hangs), go on without: two processes that
        compile the same key are slow, not wrong.
        """
        with contextlib.ExitStack() as stack:
            if self._usable(make=True):
                with contextlib.suppress(OSError, Timeout, NotImplementedError):
                    path = self._path(key).with_suffix(".lock")
                    stack.enter_context(FileLock(path, timeout=LOCK_SECONDS, mode=0o600))
            yield

    def entries(self) -> list[tuple[Path, int, float]]:
        """Return each entry's file, bytes and time of last use, the longest unused first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.directory.glob("*.program"):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found.append((path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: each[2])

    def _path(self, key: str) -> Path:
        return self.directory / file_name(key)

    def _make_room(self, *, keep: Path) -> None:
        entries = self.entries()
        total = sum(size for _, size, _ in entries)
        for path, size, _ in entries:
            if total <= self._max_bytes:
                break
            if path != keep and remove(path):
                total -= size
        sweep(self.directory)

    def _usable(self, *, make: bool = False) -> bool:
        try:
            if make:
                self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.directory.mkdir(mode=0o700, exist_ok=True)
            for each in (self.directory, self.directory.parent):
                if (problem := not_private(each.stat())) is not None:
                    self._say(f"programs in {self.directory} are not used: {each} {problem}")
                    return False
        except FileNotFoundError:
            return False
        except OSError as error:
            self._say(f"programs cannot be kept in {self.directory}: {error.strerror or error}")
            return False
        return True

    def _say(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(problem)


def pack(key: str, parts: Mapping[str, bytes]) -> bytes:
    """Return an entry's bytes: magic, format, length of the header, header (JSON), its sum, the parts."""
    listed = [[name, len(part), hashlib.sha256(part).hexdigest()] for name, part in parts.items()]
    header = json.dumps({"key": key, "parts": listed}).encode()
    head = MAGIC + FORMAT.to_bytes(2, "big") + len(header).to_bytes(8, "big") + header
    return b"".join([head, hashlib.sha256(head).digest(), *parts.values()])


def unpack(content: bytes, key: str) -> dict[str, bytes] | None:
    """Return an entry's parts, or None if it is torn, changed, of another format or of another key."""
    if content[: len(MAGIC) + 2] != MAGIC + FORMAT.to_bytes(2, "big") or len(content) < _HEAD + _SUM:
        return None
    start = _HEAD + int.from_bytes(content[_HEAD - 8 : _HEAD], "big")
    if hashlib.sha256(content[:start]).digest() != content[start : start + _SUM]:
        return None
    header = json.loads(content[_HEAD:start])  # the sum says that pack wrote it
    if header["key"] != key:
        return None
    parts, place = {}, start + _SUM
    for name, size, wanted in header["parts"]:
        parts[name] = content[place : place + size]
        if len(parts[name]) != size or hashlib.sha256(parts[name]).hexdigest() != wanted:
            return None
        place += size
    return parts if place == len(content) else None


def read_header(path: Path) -> dict[str, Any] | None:
    """Return an entry's header, `{"key": …, "parts": [[name, bytes, SHA-256], …]}`, without reading its parts.

    None: it is no entry of this format, its header is damaged, or bytes are missing or too many.

    Raises:
        OSError: it cannot be read, is a link, or is not the user's own.
    """
    with _open(path) as file:
        return _header(file)


def _header(file: BinaryIO) -> dict[str, Any] | None:
    """Return the header of a file that is read from its start, and leave it where the parts begin."""
    head = file.read(_HEAD)
    if len(head) < _HEAD or head[: len(MAGIC) + 2] != MAGIC + FORMAT.to_bytes(2, "big"):
        return None
    size, there = int.from_bytes(head[-8:], "big"), os.fstat(file.fileno()).st_size
    if size > there:
        return None
    head += file.read(size)
    if file.read(_SUM) != hashlib.sha256(head).digest():
        return None
    header: dict[str, Any] = json.loads(head[_HEAD:])
    return header if len(head) + _SUM + sum(part for _, part, _ in header["parts"]) == there else None


def _part(file: BinaryIO, wanted: str) -> bytes | None:
    header = _header(file)
    for name, size, its_sum in () if header is None else header["parts"]:
        if name == wanted:
            content = file.read(size)
            return content if hashlib.sha256(content).hexdigest() == its_sum else None
        file.seek(size, os.SEEK_CUR)
    return None


def file_name(key: str) -> str:
    """Return the name of the file that an entry of `key` lies in."""
    return f"{hashlib.sha256(key.encode()).hexdigest()}.program"


def remove(path: Path) -> bool:
    """Remove an entry, and its lock where nobody holds it; return whether the entry is gone.

    A process that has the file open reads on; one that asks later compiles. Whoever waits for the lock in the moment it
    goes may compile beside another that took it anew: slow, not wrong.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    _remove_lock(path.with_suffix(".lock"))
    return True


def sweep(directory: Path) -> None:
    """Remove what processes left that were killed while they wrote, and locks of entries that are gone."""
    with contextlib.suppress(OSError):
        for path in directory.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
        for path in directory.glob("*.lock"):
            with contextlib.suppress(OSError):
                old = time.time() - path.stat().st_mtime > STALE_SECONDS
                if old and not path.with_suffix(".program").exists():
                    _remove_lock(path)


def _remove_lock(path: Path) -> None:
    with contextlib.suppress(OSError, Timeout, NotImplementedError):
        if path.exists():
            with FileLock(path, timeout=0, mode=0o600):
                path.unlink()


def read_file(path: Path) -> bytes:
    """Return a file's bytes; a link, or a file that someone else owns or may write to, is an OSError."""
    with _open(path) as file:
        return file.read()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not_private(status) is not None:
            raise PermissionError(f"{path} is not the user's own file")
        yield file


def _write(path: Path, content: bytes) -> None:
    """Write a file so that at any moment, also after a crash, it is there whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def not_private(status: os.stat_result) -> str | None:
    """Say why somebody else could have written here; None: nobody could."""
    if status.st_uid != os.geteuid():
        return f"belongs to another user (id {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others"
    return None
