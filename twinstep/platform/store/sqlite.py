"""SQLite's habits: a file that is its owner's alone, one writer at a time, and a file that may be taken away.

A file that cannot be opened leaves nothing behind that was not there before.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from twinstep.platform.store.written import read_json, write_json
from twinstep.spec.errors import UnavailableError

BUSY_TIMEOUT_S = 15  # another writer holds the database for milliseconds; longer means something is wrong


def open_file(url: URL) -> tuple[Engine, list[Path]]:
    """Return an engine on a file, and the paths that were made for it: directories, outermost first, then the file.

    Raises:
        UnavailableError: no file is named, or its place cannot be made, read or written.
    """
    if not url.database or url.database == ":memory:":
        raise UnavailableError("a database in memory is lost with the process", remedy="name a file: sqlite:///PATH")
    made = _make_private(Path(url.database))
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=10,
        max_overflow=40,
        json_serializer=write_json,
        json_deserializer=read_json,
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine, made


class InPlace:
    """A file, by which it is seen whether another took its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = _inode(path)

    def check(self) -> None:
        """Refuse to go on in a file that was taken away: SQLite would, and lose with the process what it is told."""
        if _inode(self._path) != self._inode:
            raise UnavailableError(
                f"the database {self._path} was taken away or replaced while it was in use; "
                f"look at the data directory {self._path.parent}",
                remedy="put the directory back, or start the control plane again",
            )


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _files(path: Path) -> list[Path]:
    """Return the database's file and those SQLite puts beside it."""
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]


def _make_private(path: Path) -> list[Path]:
    """Make the file and its directories where missing, readable by their owner only; return what was made.

    SQLite gives the files beside it the mode of the file itself, so they need no care but where they are there already.
    """
    made: list[Path] = []
    try:
        made += [folder for folder in reversed(path.parents) if not folder.exists()]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in _files(path):
            if file.is_file() and file.stat().st_mode & 0o077:
                file.chmod(0o600)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            made.append(path)
    except OSError as error:
        unmake(made)
        raise UnavailableError(
            f"the data directory {path.parent} cannot be used: {error.strerror or error}",
            remedy="set TWINSTEP_DATA_DIR (or --data-dir) to a directory you can write",
        ) from None
    return made


def unmake(made: list[Path]) -> None:
    """Remove what was made, the innermost first; a directory that somebody has put something into stays."""
    for path in reversed(made):
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
                continue
            for file in _files(path):
                file.unlink(missing_ok=True)


def _on_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing of its own; _on_begin does
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").fetchall()


def _on_begin(connection: Connection) -> None:
    # A writer that begins as a reader can find the door shut when it first writes; IMMEDIATE waits at the start.
    writes = connection.get_execution_options().get("twinstep_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
