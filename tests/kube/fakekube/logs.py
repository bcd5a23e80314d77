"""What containers wrote, as the kubelet keeps it: lines with times, parts of lines, until the pod is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

Key = tuple[str, str, int]
"""(pod uid, container, times it was started again)."""


@dataclass(slots=True)
class _Log:
    entries: list[tuple[float, bytes]] = field(default_factory=list)
    """(when, what): each entry is a line with its end, or a part of one."""
    ended: bool = False


class Logs:
    """Logs of all containers. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: dict[Key, _Log] = {}
        self._lock = threading.Lock()

    def write(self, uid: str, container: str, text: bytes | str, *, restart: int = 0, at: float | None = None) -> None:
        """Add what a container wrote. Without a newline at its end it is a part of a line; the next call goes on."""
        raw = text.encode() if isinstance(text, str) else text
        when = self._clock() if at is None else at
        lines = raw.splitlines(keepends=True) if b"\r" not in raw else _lines(raw)
        with self._lock:
            self._all.setdefault((uid, container, restart), _Log()).entries.extend((when, line) for line in lines)

    def end(self, uid: str, container: str, *, restart: int = 0) -> None:
        """A container has ended: whoever follows its log comes to its end."""
        with self._lock:
            self._all.setdefault((uid, container, restart), _Log()).ended = True

    def keep(self, uids: set[str]) -> None:
        """Keep logs of these pods only: the others are gone."""
        with self._lock:
            for key in [key for key in self._all if key[0] not in uids]:
                del self._all[key]

    def read(self, key: Key, at: int) -> tuple[list[tuple[float, bytes]], bool]:
        """Return entries from number `at` on, and whether there will be no more."""
        with self._lock:
            log = self._all.get(key)
            return (log.entries[at:], log.ended) if log else ([], True)

    def known(self, key: Key) -> bool:
        """Say whether a container has ever written or ended."""
        with self._lock:
            return key in self._all


def _lines(raw: bytes) -> list[bytes]:
    """Split at newlines only: a carriage return ends no line of a log."""
    parts = raw.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def stamp(when: float) -> bytes:
    """Return a time as the kubelet writes it before a line, to the nanosecond."""
    whole = datetime.fromtimestamp(when, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{whole.microsecond * 1000:09d}Z ".encode()


class Shown:
    """Entries as one request wants them: from a time on, with times, up to a number of bytes."""

    def __init__(self, *, since: float | None, timestamps: bool, limit: int | None) -> None:
        self._since = since
        self._timestamps = timestamps
        self.left = limit
        self._starts = True

    def bytes(self, entries: list[tuple[float, bytes]]) -> bytes:
        """Return what is sent of `entries`."""
        found = bytearray()
        for when, text in entries:
            if self._since is not None and when < self._since:
                continue
            if self._timestamps and self._starts:
                found += stamp(when)
            found += text
            self._starts = text.endswith(b"\n")
        if self.left is not None:
            del found[self.left :]
            self.left -= len(found)
        return bytes(found)


def tail(entries: list[tuple[float, bytes]], lines: int) -> list[tuple[float, bytes]]:
    """Return the entries of the last `lines` lines."""
    count = 0
    for index in range(len(entries) - 1, -1, -1):
        ends = entries[index][1].endswith(b"\n")
        if ends and count == lines:
            return entries[index + 1 :]
        count += ends or index == len(entries) - 1
    return entries if lines else []
