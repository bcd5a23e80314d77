"""Open a database, bring its tables up to date, and hand out transactions. The one place that knows SQLite's habits.

An SQLite file is its owner's alone, and one that cannot be opened leaves nothing behind that was not there before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, IntegrityError, NoSuchModuleError, OperationalError

from twinstep.spec.errors import UnavailableError

BUSY_TIMEOUT_S = 15  # another writer holds the database for milliseconds; longer means something is wrong
_WRITES = {"twinstep_writes": True}


class Database:
    """An engine and its transactions: `read()` and `write()`."""

    def __init__(self, url: str) -> None:
        """Open the database at `url` and run the migrations.

        Raises:
            UnavailableError: the place cannot be made, read or written, or a newer Twinstep wrote the database.
        """
        self._engine, made = _engine(url)
        self._file = Path(self._engine.url.database or "") if self._engine.dialect.name == "sqlite" else None
        self._inode = None if self._file is None else _inode(self._file)
        # SQLite has one writer at a time and makes others poll; a lock of our own lets them queue instead.
        self._writer: Any = threading.Lock() if self._engine.dialect.name == "sqlite" else nullcontext()
        try:
            with self.write() as connection:
                _migrate(connection)
        except (UnavailableError, DatabaseError) as error:
            self._engine.dispose()
            _unmake(made)
            problem = error.problem if isinstance(error, UnavailableError) else _said(error)
            remedy = error.remedy if isinstance(error, UnavailableError) else "give another data directory (--data-dir)"
            where = self._engine.url.database or url
            raise UnavailableError(f"the database {where} cannot be used: {problem}", remedy=remedy) from None

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a connection that sees one consistent state, and writes nothing."""
        self._check_file()
        with _translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection inside a transaction that is committed at the end, or rolled back by an exception."""
        self._check_file()
        with _translated(), self._writer, self._engine.execution_options(**_WRITES).begin() as connection:
            yield connection

    def _check_file(self) -> None:
        """Refuse to go on in a file that was taken away: SQLite would, and lose with the process what it is told."""
        if self._file is not None and _inode(self._file) != self._inode:
            raise UnavailableError(
                f"the database {self._file} was taken away or replaced while it was in use; "
                f"look at the data directory {self._file.parent}",
                remedy="put the directory back, or start the control plane again",
            )

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise  # ours: a broken invariant, not the user's disk
    except OperationalError as error:
        raise UnavailableError(
            f"the database does not answer: {_said(error)}",
            remedy="check that its directory is writable and its disk has room",
        ) from error


def _said(error: DatabaseError) -> str:
    return " ".join(str(error.orig).split())


def _engine(url: str) -> tuple[Engine, list[Path]]:
    """Return an engine, and the paths that were made for it: directories from the outermost on, then the file."""
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_pre_ping=True), []
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UnavailableError(f"the database URL is not usable: {error}", remedy="give sqlite:///PATH") from None
    if not parsed.database or parsed.database == ":memory:":
        raise UnavailableError("a database in memory is lost with the process", remedy="name a file: sqlite:///PATH")
    made = _make_private(Path(parsed.database))
    engine = create_engine(
        parsed, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}, pool_size=10, max_overflow=40
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine, made


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
        _unmake(made)
        raise UnavailableError(
            f"the data directory {path.parent} cannot be used: {error.strerror or error}",
            remedy="set TWINSTEP_DATA_DIR (or --data-dir) to a directory you can write",
        ) from None
    return made


def _unmake(made: list[Path]) -> None:
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


def _migrate(connection: Connection) -> None:
    config = Config()
    scripts = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", scripts.replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise UnavailableError(
            f"its tables are not ones this version knows ({error})",
            remedy="start the newer Twinstep that wrote it, or set another data directory",
        ) from None
