"""Open a database, bring its tables up to date, and hand out transactions, on SQLite and on PostgreSQL alike.

What is peculiar to one of them is in `sqlite.py` and `postgresql.py`; how either fails, in `troubles.py`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError

from twinstep.platform.backoff import backoff
from twinstep.platform.store import postgresql, sqlite
from twinstep.platform.store.entry import kept_if_committed
from twinstep.platform.store.troubles import TransientError, said, translated
from twinstep.spec.errors import UnavailableError

log = logging.getLogger(__name__)
WAIT_S = (0.5, 5.0)  # the first and the longest pause before a server is asked again
SECRET_OPTIONS = ("password", "sslpassword", "passfile")  # of a URL's query: as secret as the password before the @


class Database:
    """An engine and its transactions: `read()` and `write()`."""

    def __init__(self, url: str, *, wait_s: float = 0.0, on_wait: Callable[[str], None] = lambda problem: None) -> None:
        """Open the database at `url` and run the migrations.

        Args:
            wait_s: how long a server that does not answer yet is waited for.
            on_wait: is told, before each pause, what keeps the server from answering.

        Raises:
            UnavailableError: the place cannot be made, read or written, or a newer Twinstep wrote the database.
        """
        self._url = parse_url(url)
        made: list[Path] = []
        if self.dialect == "sqlite":
            self._engine, made = sqlite.open_file(self._url)
            self._file = sqlite.InPlace(Path(self._url.database or ""))
            # SQLite has one writer at a time and makes others poll; a lock of our own lets them queue instead.
            self._writer: Any = threading.Lock()
            self._reads = self._engine
        else:
            self._engine, self._writer = postgresql.open_server(self._url), nullcontext()
            self._reads = postgresql.reads(self._engine)
        self._writes: Engine = self._engine.execution_options(twinstep_writes=True)
        try:
            self._bring_up_to_date(wait_s, on_wait)
        except (UnavailableError, DatabaseError) as error:
            self._engine.dispose()
            sqlite.unmake(made)
            problem = error.problem if isinstance(error, UnavailableError) else said(error)
            remedy = error.remedy if isinstance(error, UnavailableError) else "give another data directory (--data-dir)"
            raise UnavailableError(f"the database {self.where} cannot be used: {problem}", remedy=remedy) from None

    def _bring_up_to_date(self, wait_s: float, on_wait: Callable[[str], None]) -> None:
        ends = time.monotonic() + wait_s
        for failures in itertools.count(1):
            try:
                with self.write() as connection:
                    if self.dialect == "postgresql":
                        postgresql.wait_to_migrate(connection)
                    _migrate(connection)
                return
            except TransientError as error:
                pause = backoff(failures, first=WAIT_S[0], longest=WAIT_S[1])
                if self.dialect == "sqlite" or time.monotonic() + pause > ends:
                    raise
                left = ends - time.monotonic()
                on_wait(error.problem)
                log.warning("waiting for the database %s, %.0f s at most: %s", self.where, left, error.problem)
                time.sleep(pause)

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._url.get_backend_name()

    @property
    def url(self) -> URL:
        """Where it is, password and all; `where` is for people."""
        return self._url

    @property
    def where(self) -> str:
        """Where it is, without any secret: a path, or a URL."""
        return shown(self._url)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a connection that sees one consistent state, and writes nothing."""
        self._check_file()
        with translated(self.dialect, writes=False), self._reads.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection inside a transaction that is committed at the end, or rolled back by an exception."""
        self._check_file()
        with (
            kept_if_committed(),
            translated(self.dialect, writes=True) as reached,
            self._writer,
            self._writes.begin() as connection,
        ):
            yield connection
            reached.committing = True

    def _check_file(self) -> None:
        if self.dialect == "sqlite":
            self._file.check()

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


def parse_url(url: str) -> URL:
    """Return a database URL; `postgres://` and `postgresql://` are the same.

    Raises:
        UnavailableError: it is none, or of another kind of database. What was given is not repeated: it may hold a
            password.
    """
    remedy = "give postgresql://USER:PASSWORD@HOST:5432/NAME, or sqlite:///PATH"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise UnavailableError("the database URL is not one", remedy=remedy) from None
    kind = parsed.drivername.partition("+")[0]
    if kind == "postgres":
        parsed, kind = parsed.set(drivername=postgresql.DRIVER), "postgresql"
    if kind not in ("sqlite", "postgresql"):
        raise UnavailableError(f"the database URL names {kind[:40]!r}, which Twinstep does not use", remedy=remedy)
    return parsed


def shown(url: URL) -> str:
    """Return a URL as it may be printed: no password, wherever it stands."""
    if url.get_backend_name() == "sqlite":
        return url.database or ""
    plain = url.set(drivername="postgresql").difference_update_query(SECRET_OPTIONS)
    return plain.render_as_string(hide_password=True)


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
