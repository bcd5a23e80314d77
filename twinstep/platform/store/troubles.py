"""What a database says when it cannot do its work, as the error a user is told; and work done again where that helps.

A transaction that the database rolled back through no fault of its own (a deadlock, a conflict, a connection that went
before the commit was sent) is done again from its beginning, a few times, with a pause that grows and is never the
same twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from twinstep.platform.backoff import backoff
from twinstep.spec.errors import NotFoundError, UnavailableError

P = ParamSpec("P")
T = TypeVar("T")

TRIES = 4
FIRST_PAUSE_S = 0.05
PATIENCE_S = 2.0  # a try that took longer (a server that does not answer) is not followed by another
ROLLED_BACK = ("40001", "40P01")  # serialization failure, deadlock: PostgreSQL asks for the work again

REMEDIES = {
    "08": "see that the server runs and can be reached from here",
    "25006": "point the database URL at the primary: this server only reads",
    "28": "give the right user and password in the database URL (TWINSTEP_DATABASE_URL)",
    "3D": "make the database first (CREATE DATABASE), or give the name of one that is there",
    "42501": "let the database's user own the database: it makes tables",
    "42P01": "put the tables back, or start the control plane again: it makes those that are missing",
    "42703": "start the control plane again: the tables are of another version",
    "53100": "make room on the database server's disk",
    "53300": "raise the server's max_connections: each control plane takes up to 20",
    "53": "give the database server more memory or disk",
    "55P03": "look for a transaction that holds the table: SELECT * FROM pg_stat_activity",
    "57014": "look for what slows the server: SELECT * FROM pg_stat_activity",
    "57P": "wait until the server is up again",
}
"""What to do, by PostgreSQL's code of the error: by all of it, else by how it begins."""
_SQLITE_REMEDY = "check that its directory is writable and its disk has room"


class TransientError(UnavailableError):
    """A transaction was rolled back and nothing of it is stored: the same work may succeed at once."""


@dataclass(slots=True)
class Reached:
    """How far a transaction has come."""

    committing: bool = False
    """Its work is done, and the commit was sent: whether that arrived may never be known."""


@contextmanager
def translated(dialect: str, *, writes: bool) -> Iterator[Reached]:
    """Raise what the database could not do as UnavailableError; a broken invariant stays what it is: ours.

    Raises:
        NotFoundError: what was looked for can be nowhere.
        TransientError: nothing was stored, and the work may be done again.
        UnavailableError: the database cannot be used now.
    """
    reached = Reached()
    try:
        yield reached
    except IntegrityError:
        raise
    except DataError as error:
        if writes:
            raise
        # PostgreSQL refuses to look for text that it could not hold (a NUL): nothing can have such a name.
        raise NotFoundError("there is nothing of that name", remedy="give an id or a name as it was shown") from error
    except DBAPIError as error:
        code = sqlstate(error)
        if isinstance(error, ProgrammingError) and code not in ("42501", "42P01", "42703"):
            raise
        lost = dialect == "postgresql" and (
            error.connection_invalidated or code is None or code.startswith(("08", "57P"))
        )
        again = code in ROLLED_BACK or (lost and not reached.committing)
        kind = TransientError if again else UnavailableError
        raise kind(f"the database does not answer: {said(error)}", remedy=remedy(dialect, code)) from error
    except PoolTimeoutError as error:
        raise UnavailableError(
            "the database does not answer: every connection to it has been busy for too long",
            remedy="look for what slows it, or start another control plane",
        ) from error


# libpq gives no code where the server turns a connection away, only its words (in English, as servers mostly are).
_TURNED_AWAY = {
    "does not exist": "3D000",
    "password": "28P01",
    "no pg_hba.conf entry": "28000",
    "too many clients": "53300",
    "remaining connection slots": "53300",
    "starting up": "57P03",
    "shutting down": "57P03",
}


def sqlstate(error: DBAPIError) -> str | None:
    """Return PostgreSQL's five-character code of an error; None where it has none, as when nobody answered."""
    code = getattr(error.orig, "sqlstate", None)
    if isinstance(code, str):
        return code
    words = str(error.orig)
    return next((code for part, code in _TURNED_AWAY.items() if "FATAL" in words and part in words), None)


def remedy(dialect: str, code: str | None) -> str:
    """Return what to do about an error."""
    if dialect == "sqlite":
        return _SQLITE_REMEDY
    for length in (5, 3, 2):
        if found := REMEDIES.get((code or "08")[:length]):
            return found
    return "look into the database server's log"


def said(error: DatabaseError | DBAPIError) -> str:
    """Return the database's own words on one line."""
    return " ".join(str(error.orig).split())


def again(method: Callable[P, T]) -> Callable[P, T]:
    """Do a method's work again, from its beginning, where its transaction was rolled back.

    For methods that do all they do in one transaction, or whose transactions before it change nothing.
    """

    @functools.wraps(method)
    def tried(*args: P.args, **kwargs: P.kwargs) -> T:
        for number in range(1, TRIES):
            started = time.monotonic()
            try:
                return method(*args, **kwargs)
            except TransientError:
                if time.monotonic() - started > PATIENCE_S:
                    raise
                time.sleep(backoff(number, first=FIRST_PAUSE_S, longest=PATIENCE_S, spread=(0.5, 1.5)))
        return method(*args, **kwargs)

    return tried
