"""Files of a dataset, in a local folder or behind any fsspec URI; one that changes while it is read is refused.

Readers ask for a `Folder`, then for its files by name or pattern. Nothing here knows a format.
"""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from twinstep.spec.errors import DataError

SHOWN = 8  # names of what a folder holds, in an error
_STAMPS = ("size", "mtime", "created", "LastModified", "last_modified", "updated", "ETag", "etag", "generation")
"""Keys of `info()` that tell versions of a file apart; each file system has some of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DataFile:
    """One file."""

    name: str
    """Name below the folder, for people."""
    path: str
    """Path on its file system."""
    fs: fsspec.AbstractFileSystem

    def version(self) -> tuple[Any, ...]:
        """Return what changes when the file is written: size, times, tags, as far as its file system knows them."""
        self.fs.invalidate_cache()
        info = self.fs.info(self.path)
        return tuple(info.get(key) for key in _STAMPS)

    @contextmanager
    def reading(self, *, unpack: bool = True) -> Iterator[BinaryIO]:
        """Open the file to read bytes; one whose name ends in .gz is unpacked on the way, if `unpack`.

        Raises:
            DataError: it cannot be read, is cut off within its compression, or changed until the end of the block.
        """
        try:
            before = self.version()
            with self.fs.open(self.path, "rb", compression="infer" if unpack else None) as stream:
                plain = unpack and fsspec.utils.infer_compression(self.path) is None
                yield cast(BinaryIO, _Bounded(stream, before[0]) if plain and isinstance(before[0], int) else stream)
            after = self.version()
        except EOFError:
            raise DataError(
                f"{self.name} ends within its compressed data", remedy="copy the whole file again"
            ) from None
        except (OSError, zlib.error) as error:
            raise DataError(
                f"{self.name} cannot be read: {error}", remedy="see that it is whole and readable"
            ) from None
        if before != after:
            raise DataError(
                f"{self.name} changed while it was read: {before[0]} bytes before, {after[0]} after",
                remedy="wait until whoever writes it has finished, then start again",
            )


class _Bounded:
    """What a file held when it was opened: one that grows as fast as it is read would have no end."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, count: int) -> bytes:
        piece = self._stream.read(min(count, self._left))
        self._left -= len(piece)
        return piece


def natural(name: str) -> tuple[list[str | int], str]:
    """Return what names are sorted by: digits within them count as numbers, so that day_2 comes before day_10."""
    parts = re.split("([0-9]+)", name)  # texts at even places, digits at odd ones
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _home(name: str) -> str:
    return name.rpartition("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Folder:
    """Where `data.path` points: a folder, or one file, which is then all it holds."""

    called: str
    """What it is called in errors: `data.path 'ratings/'`."""
    names: tuple[str, ...]
    """Names of all files below it, `/` between folders, in the order of `natural`."""
    root: str
    fs: fsspec.AbstractFileSystem

    def file(self, name: str, *, layout: str = "") -> DataFile:
        """Return the file of this name; see `files`.

        Raises:
            DataError: there is none, or both it and a compressed copy.
        """
        return self.files(name, layout=layout)[0]

    def files(self, *patterns: str, layout: str = "") -> list[DataFile]:
        """Return the files whose names fit one of the shell patterns, plain or with .gz, in the order of `natural`.

        They may stand in a folder below; of several the first and least deep one counts, so that a copy of the data
        beside it is not read as more of it.

        Raises:
            DataError: there is none (the message says what is expected, `layout`, and what was found), or one of them
                stands there twice, compressed and not.
        """
        wanted = [each for pattern in patterns for each in (pattern, f"{pattern}.gz")]
        fitting = [each for each in self.names if any(fnmatch.fnmatchcase(_last(each), one) for one in wanted)]
        if not fitting:
            raise self.lacks(" or ".join(patterns), layout=layout)
        home = _home(min(fitting, key=lambda each: (each.count("/"), natural(_home(each)))))
        found = [each for each in fitting if _home(each) == home]
        twice = [each for each in found if f"{each}.gz" in found]
        if twice:
            raise DataError(
                f"{self.called} holds both {twice[0]} and {twice[0]}.gz", remedy="remove one: they are read alike"
            )
        return [self._open(each) for each in found]

    def all_files(self, *endings: str) -> list[DataFile]:
        """Return all files at any depth whose names have one of these endings; hidden ones are left out."""
        hidden = {each for each in self.names if any(part[:1] in "._" for part in each.split("/"))}
        return [self._open(each) for each in self.names if each.endswith(endings) and each not in hidden]

    def _open(self, name: str) -> DataFile:
        return DataFile(name=name, path=f"{self.root.rstrip('/')}/{name}", fs=self.fs)

    def lacks(self, name: str, *, layout: str = "") -> DataError:
        """Return the error that says which file is missing, what is expected, and what was found."""
        found = ", ".join(self.names[:SHOWN]) or "no files"
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        expected = f"; expected: {layout}" if layout else ""
        return DataError(
            f"{name} is missing from {self.called}{expected}; found: {found}{more}",
            remedy="put the files there, or let data.path name the folder that holds them",
        )


def local_folder(path: str, *, called: str) -> Path:
    """Return a folder on this machine's disk; `~` is the home folder of whoever the worker runs as.

    Raises:
        DataError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(
            f"{called} {path!r} begins in a home folder, and there is none here", remedy="give the whole path"
        ) from None


def open_folder(path: str, *, called: str = "data.path") -> Folder:
    """Look into the folder or file that `data.path` names: a local path, or a URI that fsspec knows.

    Args:
        called: what an error calls the path.

    Raises:
        DataError: it does not exist, cannot be listed, or no installed package speaks its protocol.
    """
    where = f"{called} {path!r}"
    try:
        fs, root = fsspec.core.url_to_fs(path)
        root = root.rstrip("/") or "/"
        if fs.isdir(root):
            found = [name.removeprefix(root).lstrip("/") for name in fs.find(root)]
        elif fs.exists(root):
            root, _, single = root.rpartition("/")
            found = [single]
        else:
            raise DataError(
                f"{where} does not exist: {fs.unstrip_protocol(root)}",
                remedy="give the whole path of the folder that holds the files; a worker starts in its run's folder",
            )
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{where} cannot be opened: {error}",
            remedy="give a local path, or a URI whose fsspec package is installed (gs: gcsfs, s3: s3fs)",
        ) from None
    except OSError as error:
        raise DataError(f"{where} cannot be listed: {error}", remedy="see that it can be read") from None
    return Folder(called=where, names=tuple(sorted(found, key=natural)), root=root, fs=fs)
