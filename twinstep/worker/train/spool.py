"""The run's spool file: report records, one JSON line each, numbered from 1 without a gap.

`report.py` appends and reads; docs/architecture.md says who else reads it. A file system may fail at any time (full, a
directory gone), and a run must not end for that: what cannot be written is counted and said once, and the next record
is tried anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinstep.worker.train.output import say


class Spool:
    """Appends records; never raises for what the file system does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seq = 0
        """Number of the last record that was written."""
        self.lost = 0
        """Records that could not be written; they took no number."""
        self._fd: int | None = None
        self._size = 0
        self._torn = False
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):  # the first record tries again, and says so
            self._open()

    def append(self, kind: str, content: Mapping[str, Any]) -> bool:
        """Write a record of `kind`; return whether it could be written."""
        with self._lock:
            try:
                fd = self._open() if self._fd is None else self._fd
                record = {"kind": kind, "seq": self.seq + 1, "time": time.time(), **content}
                self._write(fd, (json.dumps(finite(record), allow_nan=False, default=str) + "\n").encode())
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    say(f"a report cannot be written to {self.path} ({error.strerror}); the run goes on without it")
                return False
            return True

    def close(self) -> None:
        """Close the file, and say how many records were lost."""
        with self._lock:
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                self._fd = None
        if self.lost:
            say(f"{self.lost} reports could not be written to {self.path}")

    def _open(self) -> int:
        self.seq, self._size = _whole_records(self.path)  # pods that come back within a run count on from there
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = os.fstat(self._fd).st_size > self._size
        return self._fd

    def _write(self, fd: int, line: bytes) -> None:
        """Write a whole line, or leave the file as it was: half a line would spoil the next one."""
        if self._torn:
            os.ftruncate(fd, self._size)
        self._torn = True
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
                self._torn = False
            raise
        self._torn = False
        self._size += len(line)
        self.seq += 1


class SpoolReader:
    """Reads a spool behind its writer. Line number n holds record n, so a place is found without reading a record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 1
        self._offset = 0
        """Where record `_next` begins."""

    def after(self, acked: int, *, limit: int) -> list[bytes]:
        """Return up to `limit` whole lines behind record `acked`.

        Reading on costs what is read; only a step back (a receiver that lost records) begins at the file's start.

        Raises:
            OSError: the file cannot be read.
        """
        if acked + 1 < self._next:
            self._next, self._offset = 1, 0
        lines: list[bytes] = []
        with self._path.open("rb") as spool:
            spool.seek(self._offset)
            for line in spool:
                if not line.endswith(b"\n") or len(lines) == limit:
                    break
                if self._next <= acked:
                    self._next += 1
                    self._offset += len(line)
                else:
                    lines.append(line.rstrip(b"\n"))
        return lines


def finite(value: Any) -> Any:
    """Return plain data with null for every number that is not finite: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _whole_records(path: Path) -> tuple[int, int]:
    """Return the seq of the spool's last whole record and the offset behind it; a killed worker leaves half a line."""
    if not path.exists():
        return 0, 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(content[start:end])["seq"]), end
        end = start
    return 0, 0
