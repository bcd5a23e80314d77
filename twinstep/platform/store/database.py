"""Open a database, bring its tables up to date, and hand out transactions. The one place that knows SQLite's habits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
        self._engine = _engine(url)
        # SQLite has one writer at a time and makes others poll; a lock of our own lets them queue instead.
        self._writer: Any = threading.Lock() if self._engine.dialect.name == "sqlite" else nullcontext()
        try:
            with self.write() as connection:
                _migrate(connection)
        except (UnavailableError, DatabaseError) as error:
            self._engine.dispose()
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
        with _translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection inside a transaction that is committed at the end, or rolled back by an exception."""
        with _translated(), self._writer, self._engine.execution_options(**_WRITES).begin() as connection:
            yield connection

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


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


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UnavailableError(f"the database URL is not usable: {error}", remedy="leave it out for SQLite") from None
    if not parsed.database or parsed.database == ":memory:":
        raise UnavailableError("a database in memory is lost with the process", remedy="name a file: sqlite:///PATH")
    _make_directory(Path(parsed.database).parent)
    engine = create_engine(
        parsed, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}, pool_size=10, max_overflow=40
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"the data directory {path} cannot be made: {error.strerror or error}",
            remedy="set TWINSTEP_DATA_DIR (or --data-dir) to a directory you can write",
        ) from None


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
