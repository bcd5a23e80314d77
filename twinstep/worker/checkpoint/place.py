"""Where checkpoints lie: a local directory, or whatever fsspec reaches by a URI. Named files, no knowledge of content.

A checkpoint is there iff its manifest is: it is written last, and removed first. A local one is also written under a
name that no reader looks at and renamed when all of it is on the disk; object stores have no rename and need none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from twinstep.spec.errors import UnavailableError
from twinstep.worker.checkpoint.disk import Blocks, Buffer, write_file

DRAFT = ".draft-"
"""Beginning of the name of a local checkpoint that is not whole yet; what a killed writer left is swept by the next."""


class Place(Protocol):
    """A directory of checkpoints, each a flat directory of files. Methods raise OSError."""

    url: str

    def names(self) -> list[str]:
        """Return the names of the directories there, whole or not, in no order."""

    def begin(self, name: str) -> None:
        """Make ready for the files of a new checkpoint."""

    def write(self, name: str, file: str, parts: Iterable[Buffer]) -> None:
        """Write a file of a checkpoint that was begun, each part as it comes; when this returns, it is durable."""

    def commit(self, name: str, file: str, content: bytes) -> None:
        """Write the one file that makes the checkpoint count; when this returns, it does, and survives a crash."""

    def remove(self, name: str, first: str) -> None:
        """Remove a checkpoint, its file `first` before the others; one that is not there is removed already."""

    def abandon(self, name: str, last: str, prefix: str) -> None:
        """Remove what was written of a checkpoint that was begun, by whoever gave its files this prefix.

        Where others may write under the same name, theirs stay; and ours too where the file `last` speaks of them.
        """

    def read(self, name: str, file: str) -> bytes:
        """Return a whole file."""

    def read_into(self, name: str, file: str, offset: int, into: memoryview) -> int:
        """Fill `into` from byte `offset` of a file; return the bytes there were, fewer at the file's end."""

    def put(self, file: str, content: bytes) -> None:
        """Write a small file beside the checkpoints."""

    def get(self, file: str) -> bytes | None:
        """Return a small file beside the checkpoints, None where there is none."""


class LocalPlace:
    """A directory of this machine, or one that is mounted."""

    def __init__(self, path: Path, *, mark: str = "") -> None:
        """`mark` ends the names of drafts: two writers of one name, each with its own, do not meet before the end."""
        self.path = path
        self.url = str(path)
        self._mark = mark
        self._blocks = Blocks()

    def names(self) -> list[str]:
        """Return the names of the directories there that are not drafts."""
        try:
            return [each.name for each in self.path.iterdir() if each.is_dir() and not each.name.startswith(".")]
        except FileNotFoundError:
            return []

    def sweep(self) -> list[str]:
        """Remove what writers left that were killed; return the names. For whoever holds the lock only."""
        left = [each for each in self.path.iterdir() if each.name.startswith(DRAFT)] if self.path.is_dir() else []
        for each in left:
            shutil.rmtree(each, ignore_errors=True)
        return [each.name for each in left]

    def begin(self, name: str) -> None:
        """Make the draft's directory."""
        draft = self._draft(name)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def write(self, name: str, file: str, parts: Iterable[Buffer]) -> None:
        """Write a file of the draft and wait until the disk has it."""
        write_file(self._draft(name) / file, parts, self._blocks)

    def commit(self, name: str, file: str, content: bytes) -> None:
        """Write the last file and give the draft its name."""
        draft, final = self._draft(name), self.path / name
        write_file(draft / file, [content], self._blocks)
        _sync_directory(draft)
        draft.rename(final)
        _sync_directory(self.path)

    def remove(self, name: str, first: str) -> None:
        """Remove a checkpoint or its draft."""
        (self.path / name / first).unlink(missing_ok=True)
        for each in (self.path / name, self._draft(name)):
            shutil.rmtree(each, ignore_errors=True)

    def abandon(self, name: str, last: str, prefix: str) -> None:
        """Remove the draft; what has the name itself was whole from the beginning."""
        shutil.rmtree(self._draft(name), ignore_errors=True)

    def read(self, name: str, file: str) -> bytes:
        """Return a whole file."""
        return (self.path / name / file).read_bytes()

    def read_into(self, name: str, file: str, offset: int, into: memoryview) -> int:
        """Fill `into` from a file."""
        fd = os.open(self.path / name / file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if not count:
                    break
                done += count
            return done
        finally:
            os.close(fd)

    def put(self, file: str, content: bytes) -> None:
        """Write a small file, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        draft = self.path / f".{file}.{os.getpid()}"
        write_file(draft, [content], self._blocks)
        draft.replace(self.path / file)

    def get(self, file: str) -> bytes | None:
        """Return a small file."""
        try:
            return (self.path / file).read_bytes()
        except FileNotFoundError:
            return None

    def _draft(self, name: str) -> Path:
        return self.path / f"{DRAFT}{name}{self._mark}"


class UriPlace:
    """A directory that fsspec reaches: s3://, gs://, abfs://, memory:// (each with the package that fsspec names)."""

    def __init__(self, url: str) -> None:
        """Open the file system.

        Raises:
            UnavailableError: fsspec knows no such scheme, lacks the package for it, or finds no way there.
        """
        self.url = url.rstrip("/")
        self._fs, self._root = _open_filesystem(self.url)

    def names(self) -> list[str]:
        """Return the names of the directories there."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [each["name"].rstrip("/").rsplit("/", 1)[-1] for each in found if each["type"] == "directory"]

    def sweep(self) -> list[str]:
        """Leave half-uploaded ones: their names are taken, and `keep` removes them once newer ones are whole."""
        return []

    def begin(self, name: str) -> None:
        """Make the directory, where the file system has such a thing."""
        self._fs.makedirs(f"{self._root}/{name}", exist_ok=True)

    def write(self, name: str, file: str, parts: Iterable[Buffer]) -> None:
        """Upload a file."""
        with self._fs.open(f"{self._root}/{name}/{file}", "wb") as out:
            for part in parts:
                out.write(part)

    def commit(self, name: str, file: str, content: bytes) -> None:
        """Upload the last file, which an object store shows whole or not at all."""
        self.write(name, file, [content])

    def remove(self, name: str, first: str) -> None:
        """Remove a checkpoint."""
        for path in (f"{self._root}/{name}/{first}", f"{self._root}/{name}"):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                continue

    def abandon(self, name: str, last: str, prefix: str) -> None:
        """Remove the files that begin so, unless the last one, whose upload may have come through, speaks of them."""
        with contextlib.suppress(FileNotFoundError):
            if f'"{prefix}-'.encode() in self.read(name, last).replace(b"\\", b""):
                return
        folder = f"{self._root}/{name}"
        with contextlib.suppress(FileNotFoundError):
            for path in self._fs.ls(folder, detail=False):
                if path.rsplit("/", 1)[-1].startswith(f"{prefix}-"):
                    self._fs.rm(path)
            self._fs.invalidate_cache()
            if not self._fs.ls(folder, detail=False):
                self._fs.rm(folder, recursive=True)

    def read(self, name: str, file: str) -> bytes:
        """Return a whole file."""
        self._fs.invalidate_cache()
        return bytes(self._fs.cat_file(f"{self._root}/{name}/{file}"))

    def read_into(self, name: str, file: str, offset: int, into: memoryview) -> int:
        """Fill `into` from a file, by a ranged read."""
        path = f"{self._root}/{name}/{file}"
        try:
            found = self._fs.cat_file(path, start=offset, end=offset + len(into))
        except FileNotFoundError:
            raise
        except Exception:
            if self._fs.size(path) > offset:
                raise
            found = b""  # stores refuse a range that begins where a file has ended
        into[: len(found)] = found
        return len(found)

    def put(self, file: str, content: bytes) -> None:
        """Upload a small file."""
        self._fs.makedirs(self._root, exist_ok=True)
        with self._fs.open(f"{self._root}/{file}", "wb") as out:
            out.write(content)

    def get(self, file: str) -> bytes | None:
        """Return a small file."""
        self._fs.invalidate_cache()
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{file}"))
        except FileNotFoundError:
            return None


def open_place(where: str | Path) -> LocalPlace | UriPlace:
    """Return the place that a path or URI names; nothing is made there yet.

    Raises:
        UnavailableError: there is no way to that URI.
    """
    parts = urlsplit(str(where))
    if not parts.scheme or parts.scheme in ("file", "local"):
        path = f"{parts.netloc}{parts.path}" if parts.scheme else str(where)
        return LocalPlace(Path(path).expanduser())
    return UriPlace(str(where))


def _open_filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UnavailableError(
            f"checkpoints cannot go to {url}: {error}",
            remedy="give a local directory, or install the fsspec file system for that scheme (s3fs, gcsfs, adlfs)",
        ) from None
    except Exception as error:  # a server that does not answer, credentials that are missing
        raise unavailable(url, error) from error
    return filesystem, str(root).rstrip("/")


def unavailable(where: str, error: Exception) -> UnavailableError:
    """Return the error that says why a place cannot be used."""
    return UnavailableError(
        f"checkpoints in {where} cannot be reached: {in_words(error)}",
        remedy="see that it is there and that this process may read and write it, or set another checkpoint.path",
    )


def in_words(error: Exception) -> str:
    """Return what a file system, or the client of a store, says is wrong."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"[:300]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
