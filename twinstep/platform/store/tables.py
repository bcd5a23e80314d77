"""The tables, as SQLAlchemy sees them. migrations/ makes them; a test holds the two together.

Times are Unix seconds (double precision). Columns keep to what SQLite and PostgreSQL both have.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from twinstep.spec.roles import DEFAULT_PROJECT, LOCAL_USER

# SQLite counts up only columns of type INTEGER; PostgreSQL needs 64 bits.
_COUNTER = BigInteger().with_variant(Integer, "sqlite")
_JSON = JSON(none_as_null=True)


class Base(DeclarativeBase):
    """Base of all tables; constraints have names so that migrations can speak of them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class JobRow(Base):
    """What a user submitted."""

    __tablename__ = "jobs"
    __table_args__ = (Index(None, "name", "id"), Index(None, "project", "id"))
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    spec: Mapped[dict[str, Any]] = mapped_column(_JSON)
    created_at: Mapped[float]
    project: Mapped[str] = mapped_column(String(63), server_default=DEFAULT_PROJECT)
    submitted_by: Mapped[str] = mapped_column(String(32), server_default=LOCAL_USER)


class RunRow(Base):
    """One attempt to execute a job. `version` grows with every guarded change."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("job_id", "attempt"), Index(None, "state", "job_id"))
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    backend: Mapped[str] = mapped_column(String(16), server_default="local")
    """local or kubernetes."""
    spec: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    """The JobSpec of this attempt; null: the job's."""
    resumed_from: Mapped[str | None] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    version: Mapped[int]
    restarts: Mapped[int] = mapped_column(server_default="0")
    cluster: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    """The workload: null before anything was sent, without a uid before the cluster is known to have it."""
    diagnosis: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    home: Mapped[str | None] = mapped_column(String(32))
    """The data directory whose control plane started it on its own machine."""
    token_hash: Mapped[str | None] = mapped_column(String(64))
    spare_token_hash: Mapped[str | None] = mapped_column(String(64))
    """Of the launch before, which may be the one whose token the pods have."""
    cancel_requested_at: Mapped[float | None]
    suspend_requested_at: Mapped[float | None]
    suspended_at: Mapped[float | None]
    """When the cluster was told to suspend it; null once it was told to go on."""
    waiting_since: Mapped[float | None]
    """Since when it is pending or queued; null while it is active, and once it has ended."""
    active_since: Mapped[float | None]
    active_seconds: Mapped[float] = mapped_column(server_default="0")
    """Spent active before `active_since`."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    progress: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    summary: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    acked_seq: Mapped[int] = mapped_column(BigInteger)


class IdempotencyRow(Base):
    """A key that a user's submit came with, so that the same submit again finds its job."""

    __tablename__ = "idempotency_keys"
    owner: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    """Of the spec and the project that came with it."""
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[float]


class EventRow(Base):
    """Something that happened once, to a job or to one of its runs."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    time: Mapped[float]
    name: Mapped[str] = mapped_column(String(64))
    actor: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(_JSON)


class WebhookRow(Base):
    """Somebody who is told of what happens."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    types: Mapped[str] = mapped_column(Text)
    """Between commas, also at both ends; empty: of everything."""
    secret: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[float]
    due_at: Mapped[float]
    """Nothing is sent before, after a failure."""
    failures: Mapped[int]
    """One after another, up to now."""
    failing_since: Mapped[float | None]
    last_error: Mapped[str | None] = mapped_column(Text)
    delivered_at: Mapped[float | None]
    disabled_at: Mapped[float | None]
    disabled_reason: Mapped[str | None] = mapped_column(Text)


class OutboxRow(Base):
    """An event that a webhook is yet to be told of; gone once it was."""

    __tablename__ = "webhook_outbox"
    __table_args__ = (Index(None, "webhook_id", "job_id", "id"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    event_id: Mapped[int] = mapped_column(_COUNTER, ForeignKey("events.id", ondelete="CASCADE"))
    attempts: Mapped[int]
    first_tried_at: Mapped[float | None]
    due_at: Mapped[float]
    """Nobody tries before: another does, or it failed a moment ago."""


class MetricRow(Base):
    """One number of one step of a run; `id` is the cursor readers go by."""

    __tablename__ = "metrics"
    __table_args__ = (
        UniqueConstraint("run_id", "name", "step"),
        Index(None, "run_id", "id"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    step: Mapped[int] = mapped_column(BigInteger)
    time: Mapped[float]
    name: Mapped[str] = mapped_column(String(200))
    value: Mapped[float | None]


class TokenRow(Base):
    """A bearer token of a user: its hash, never itself."""

    __tablename__ = "tokens"
    __table_args__ = (UniqueConstraint("hash"), Index(None, "user"))
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    user: Mapped[str] = mapped_column(String(32))
    role: Mapped[str] = mapped_column(String(16))
    everywhere: Mapped[bool]
    hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(32))
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class SessionRow(Base):
    """A browser that has shown a token: the hash of its cookie."""

    __tablename__ = "sessions"
    hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_id: Mapped[str] = mapped_column(ForeignKey("tokens.id", ondelete="CASCADE"))
    created_at: Mapped[float]
    expires_at: Mapped[float]


class ProjectRow(Base):
    """Jobs that belong together: a namespace and a queue in the cluster, and members."""

    __tablename__ = "projects"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    namespace: Mapped[str] = mapped_column(String(63))
    queue: Mapped[str | None] = mapped_column(String(63))
    image: Mapped[str | None] = mapped_column(String(512))
    created_at: Mapped[float]


class MemberRow(Base):
    """What a user is in a project."""

    __tablename__ = "members"
    __table_args__ = (Index(None, "user"),)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name", ondelete="CASCADE"), primary_key=True)
    user: Mapped[str] = mapped_column(String(32), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))


class AuditRow(Base):
    """A change, or an attempt at one that was refused. Triggers keep a row as it was written."""

    __tablename__ = "audit"
    __table_args__ = ({"sqlite_autoincrement": True},)
    id: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    time: Mapped[float]
    actor: Mapped[str] = mapped_column(String(32))
    token_id: Mapped[str | None] = mapped_column(String(32))
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(255))
    project: Mapped[str | None] = mapped_column(String(63))
    outcome: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    request_id: Mapped[str] = mapped_column(String(64))
    address: Mapped[str] = mapped_column(String(64))
    data: Mapped[dict[str, Any]] = mapped_column(_JSON)


class RunLogRow(Base):
    """The log of a run in a cluster: how long it is, and which stretch of it is not kept."""

    __tablename__ = "run_logs"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    """Bytes so far, kept or not: a reader's cursor counts them all."""
    gap_begin: Mapped[int] = mapped_column(BigInteger)
    gap_end: Mapped[int] = mapped_column(BigInteger)
    """Bytes between the two were taken out to make room."""


class LogSourceRow(Base):
    """A container that writes to the log of a run, and how far it was read."""

    __tablename__ = "log_sources"
    __table_args__ = (UniqueConstraint("run_id", "pod_uid", "container"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    pod_uid: Mapped[str] = mapped_column(String(64))
    container: Mapped[str] = mapped_column(String(63))
    pod: Mapped[str] = mapped_column(String(253))
    role: Mapped[str] = mapped_column(String(16))
    slice: Mapped[int]
    host: Mapped[int | None]
    restart: Mapped[int]
    instance: Mapped[int]
    """Times the container was started again within its pod."""
    read_time: Mapped[str] = mapped_column(String(40))
    """Time of the line that was read last, as the kubelet wrote it; empty: none yet."""
    read_bytes: Mapped[int] = mapped_column(BigInteger)
    """Bytes read since the first line of that time."""
    ended: Mapped[bool]
    """That instance has ended and is read to its end."""


class LogPartRow(Base):
    """A stretch of a run's log that one container wrote."""

    __tablename__ = "log_parts"
    __table_args__ = (UniqueConstraint("run_id", "begin"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(_COUNTER, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    source_id: Mapped[int | None] = mapped_column(ForeignKey("log_sources.id", ondelete="CASCADE"))
    """None: the control plane wrote it."""
    begin: Mapped[int] = mapped_column(BigInteger)
    """Byte of the run's log at which it begins."""
    length: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)
