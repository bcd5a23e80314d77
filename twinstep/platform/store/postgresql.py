"""PostgreSQL's habits: a server that several control planes share, a pool of connections, limits that end a wait.

Writers read committed rows and lock those they change (`FOR UPDATE`, or a guard by version in the `WHERE`); readers
see one moment. Nobody waits for ever: for a lock, a statement, or a transaction that a dead process left open.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, text

from twinstep.platform.store.written import read_json, write_json

POOL = 10
POOL_MORE = 10  # connections beyond it, while many ask at once
WAIT_FOR_ONE_S = 15
CONNECT_S = 5
LIMITS_MS = {"lock_timeout": 15_000, "statement_timeout": 60_000, "idle_in_transaction_session_timeout": 60_000}
DRIVER = "postgresql+psycopg"
MIGRATION_LOCK = 0x7477696E  # an advisory lock's number: one control plane at a time brings the tables up to date


def open_server(url: URL) -> Engine:
    """Return an engine on a server; connects to nothing yet."""
    engine = create_engine(
        with_driver(url),
        pool_size=POOL,
        max_overflow=POOL_MORE,
        pool_timeout=WAIT_FOR_ONE_S,
        pool_pre_ping=True,  # a server that was started again has forgotten its connections
        pool_recycle=1800,
        connect_args={"connect_timeout": CONNECT_S, "application_name": "twinstep"},
        json_serializer=write_json,
        json_deserializer=read_json,
    )
    event.listen(engine, "connect", _on_connect)
    return engine


def with_driver(url: URL) -> URL:
    """Return a URL that names the one driver there is: `postgresql://` is anybody's way to write it."""
    return url.set(drivername=DRIVER)


def reads(engine: Engine) -> Engine:
    """Return the engine for transactions that see one moment and write nothing."""
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def wait_to_migrate(connection: Connection) -> None:
    """Wait until no other control plane brings the tables up to date; holds until the transaction ends."""
    connection.execute(text("SET LOCAL lock_timeout = '10min'"))
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": MIGRATION_LOCK})


def _on_connect(connection: Any, _record: Any) -> None:
    connection.autocommit = True
    for name, value in LIMITS_MS.items():
        connection.execute(f"SET {name} = {value}")
    connection.autocommit = False
