"""What lies in a compile cache, for people: list it, hold it to its sums, make room, empty it.

All of it is safe beside processes that compile or read programs: see `store.remove`. What backends keep for themselves
in the same directory (Inductor's and XLA's own caches, kernels) is measured and left alone: they may be in the midst
of reading it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinstep.spec.errors import UnavailableError
from twinstep.worker.compile.store import file_name, not_private, read_file, read_header, remove, sweep, unpack

ENTRY = "*.program"


@dataclass(frozen=True, slots=True)
class Entry:
    """One program on disk."""

    path: Path
    kind: str
    """The folder it lies in: `programs` for what training compiled."""
    bytes: int
    used: float
    """When it was last used, Unix seconds."""
    parts: int = 0
    key: str = ""
    """16 hex digits, as events and logs give it; empty where the key cannot be read."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What the key says: backend, sizes, devices, strategies, versions."""
    fault: str = ""
    """What is wrong with it; empty: nothing was found."""

    def as_json(self, now: float) -> dict[str, Any]:
        """Return the entry as JSON values; `now` in Unix seconds gives its age."""
        return {
            "name": self.path.name.removesuffix(".program"),
            "kind": self.kind,
            "key": self.key,
            "bytes": self.bytes,
            "used": self.used,
            "age_s": max(now - self.used, 0.0),
            "parts": self.parts,
            **self.summary,
            "fault": self.fault or None,
        }


def list_entries(directory: Path) -> list[Entry]:
    """Return the programs below a cache directory, the one used last first; only headers are read.

    Raises:
        UnavailableError: the directory cannot be read, or others could have put programs there.
    """
    return sorted((_look(path) for path in _paths(directory)), key=lambda entry: -entry.used)


def verify(directory: Path) -> list[Entry]:
    """Return the programs below a cache directory as `list_entries` does, each read whole and held to its sums.

    Raises:
        UnavailableError: as `list_entries`.
    """
    return sorted((_look(path, whole=True) for path in _paths(directory)), key=lambda entry: -entry.used)


def prune(
    directory: Path, *, max_bytes: int | None = None, older_than: float | None = None, dry_run: bool = False
) -> list[Entry]:
    """Remove what was not used for long, then what was used longest ago until the rest fits; return what went.

    Args:
        max_bytes: what may be left, in bytes.
        older_than: seconds since the last use from which an entry goes.
        dry_run: remove nothing.

    Raises:
        UnavailableError: as `list_entries`.
    """
    entries, now = list_entries(directory), time.time()
    gone = [] if older_than is None else [entry for entry in entries if now - entry.used > older_than]
    left = [entry for entry in entries if entry not in gone]
    total = sum(entry.bytes for entry in left)
    while max_bytes is not None and total > max_bytes:
        gone.append(left.pop())
        total -= gone[-1].bytes
    return gone if dry_run else _remove(directory, gone)


def clear(directory: Path) -> list[Entry]:
    """Remove every program; return what went.

    Raises:
        UnavailableError: as `list_entries`.
    """
    return _remove(directory, list_entries(directory))


def drop(directory: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Remove these; return what went."""
    return _remove(directory, entries)


def besides(directory: Path) -> dict[str, int]:
    """Return the bytes of each folder in which backends keep what is theirs."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in sorted(directory.iterdir()):
            if folder.is_dir() and not folder.is_symlink() and next(folder.glob(ENTRY), None) is None:
                found[folder.name] = sum(_sizes(folder))
    return {name: size for name, size in found.items() if size}


def _paths(directory: Path) -> Iterator[Path]:
    if not directory.exists():
        return
    try:
        folders = [each for each in directory.iterdir() if each.is_dir() and not each.is_symlink()]
        for place in (directory, *folders):
            problem = not_private(place.stat())
            if problem is not None and (place == directory or next(place.glob(ENTRY), None) is not None):
                raise UnavailableError(
                    f"the compile cache {place} {problem}: what lies there cannot be trusted, and no run reads it",
                    remedy=f"rm -r {place}, or chmod go-w it if all in it is yours",
                )
        yield from [path for folder in folders for path in folder.glob(ENTRY)]
    except OSError as error:
        raise UnavailableError(
            f"the compile cache {directory} cannot be read: {error.strerror or error}",
            remedy="give a directory that you can read with --dir",
        ) from error


def _look(path: Path, *, whole: bool = False) -> Entry:
    """Return what a file says of itself; one that went in the meantime is empty and at fault."""
    size, used = 0, 0.0
    try:
        status = path.stat(follow_symlinks=False)
        size, used = status.st_size, status.st_mtime
        header = read_header(path)
        fault = "" if header is not None else "torn, damaged, or of another version of Twinstep"
        if header is not None and path.name != file_name(header["key"]):
            fault = "holds another key's program"
        elif header is not None and whole and unpack(read_file(path), header["key"]) is None:
            fault = "damaged: a sum is wrong"
    except FileNotFoundError:
        header, fault = None, "removed in the meantime"
    except OSError as error:
        header, fault = None, error.strerror or str(error)
    key = "" if header is None else header["key"]
    return Entry(
        path,
        path.parent.name,
        size,
        used,
        parts=0 if header is None else len(header["parts"]),
        key=hashlib.sha256(key.encode()).hexdigest()[:16] if key else "",
        summary=summarise(key),
        fault=fault,
    )


def summarise(key: str) -> dict[str, Any]:
    """Return what the text of a CompileKey says to people; {} for the text of another key."""
    try:
        call = ast.parse(key, mode="eval").body
        if not isinstance(call, ast.Call):
            return {}
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg in _SHOWN}
        batch = [f"{path} {list(shape)} {kind}" for path, shape, kind in named["batch"]]
        return {
            "backend": named["backend"],
            "sizes": dict(named["sizes"]),
            "batch": batch,
            "devices": named["devices"],
            "strategies": list(named["strategies"]),
            "threads": named["threads"],
            "versions": dict(named["versions"]),
        }
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
        return {}


_SHOWN = frozenset({"backend", "sizes", "batch", "devices", "strategies", "threads", "versions"})


def _remove(directory: Path, entries: Sequence[Entry]) -> list[Entry]:
    gone = [entry for entry in entries if remove(entry.path)]
    for folder in {entry.path.parent for entry in entries} | {directory / "programs"}:
        sweep(folder)
    return gone


def _sizes(folder: Path) -> Iterator[int]:
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield (Path(place) / name).stat(follow_symlinks=False).st_size
