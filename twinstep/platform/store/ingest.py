"""Take in a worker's records: each exactly once, in order, whatever way they were split, doubled or mixed up.

The rule is the count: a record is stored iff its `seq` is the next the run has not seen, and the count moves in the
same transaction. A final run still takes late records; they never move its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from twinstep.platform.store.moves import Move, guarded_moves
from twinstep.platform.store.tables import EventRow, MetricRow, RunRow
from twinstep.spec.errors import NotFoundError
from twinstep.spec.report import EventRecord, MetricRecord, ProgressRecord, Record, ResultRecord
from twinstep.spec.states import RunState

MAX_PARTS, MAX_PART = 32, 64  # of what time went to; characters of a name
MAX_WHOLE = 2**64 - 1
MAX_NAME = 200  # characters of a metric's name, as its column has it
_ADD_POINTS = sqlite_insert(MetricRow).on_conflict_do_nothing()
# One statement for a whole batch: PostgreSQL takes a row by itself ten times slower. Ids follow the order of the rows.
_ADD_ALL_POINTS = text(
    "INSERT INTO metrics (run_id, step, time, name, value) "
    "SELECT :run_id, step, time, name, value FROM unnest(CAST(:step AS bigint[]), CAST(:time AS double precision[]), "
    "CAST(:name AS text[]), CAST(:value AS double precision[])) "
    "WITH ORDINALITY AS point (step, time, name, value, place) ORDER BY place ON CONFLICT DO NOTHING"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """What became of a batch."""

    job_id: str
    acked: int
    """Every record up to this seq is stored."""
    stored: int
    """Records of this batch that were new."""
    lost: tuple[tuple[int, int], ...] = ()
    """First and last seq of each gap that was skipped."""


@dataclass(slots=True)
class _Rows:
    """What a batch comes to, before it is written."""

    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)


def ingest(
    connection: Connection,
    run_id: str,
    records: Sequence[Record],
    *,
    now: float,
    skip_gaps: bool,
    dialect: str,
) -> Ingested:
    """Store those of `records` that are next in line, in the caller's transaction.

    A record already stored is passed over. At a gap the batch ends and the sender is told where to go on; with
    `skip_gaps` (the sender is gone for good) the gap is left behind and told of in an event.

    Raises:
        NotFoundError: no such run.
    """
    run = connection.execute(
        select(RunRow.job_id, RunRow.state, RunRow.version, RunRow.acked_seq)
        .where(RunRow.id == run_id)
        .with_for_update()
    ).one_or_none()
    if run is None:
        raise NotFoundError(f"there is no run {run_id!r}", remedy="report with the id the worker was started with")
    acked, stored, rows, lost = run.acked_seq, 0, _Rows(), []
    for record in records:
        if record.seq <= acked:
            continue
        if record.seq > acked + 1:
            if not skip_gaps:
                break
            lost.append((acked + 1, record.seq - 1))
        acked, stored = record.seq, stored + 1
        _collect(record, rows, run_id=run_id, job_id=run.job_id)
    if stored:
        rows.events.extend(_lost_event(run.job_id, run_id, now, gap) for gap in lost)
        if RunState(run.state) in (RunState.STARTING, RunState.RESTARTING):
            move = Move(
                run_id=run_id, path=[RunState.RUNNING], if_version=run.version, reason="its worker reports"
            )  # fmt: skip
            guarded_moves(connection, [move], actor="worker", time=now)
        _write(connection, run_id, rows, acked=acked, now=now, dialect=dialect)
    return Ingested(
        job_id=run.job_id,
        acked=acked,
        stored=stored,
        lost=tuple(lost),
    )


def _collect(record: Record, rows: _Rows, *, run_id: str, job_id: str) -> None:
    if isinstance(record, MetricRecord):
        for name, value in record.values.items():
            rows.metrics.append(
                {
                    "run_id": run_id,
                    "step": record.step,
                    "time": record.time,
                    "name": clean(name[:MAX_NAME]),
                    "value": _finite(value),
                }
            )
    elif isinstance(record, EventRecord):
        rows.events.append(
            {
                "job_id": job_id,
                "run_id": run_id,
                "time": record.time,
                "name": clean(record.name),
                "actor": "worker",
                "reason": clean(record.reason),
                "data": clean(record.data),
            }
        )
    elif isinstance(record, ProgressRecord):
        told = record.model_dump(exclude={"kind", "seq"})
        told["time_s"] = _few(told["time_s"])
        rows.run["progress"] = clean(told)
    elif isinstance(record, ResultRecord):
        rows.run["summary"] = _clean_summary(record.summary.model_dump())


def _write(connection: Connection, run_id: str, rows: _Rows, *, acked: int, now: float, dialect: str) -> None:
    connection.execute(update(RunRow).where(RunRow.id == run_id).values(acked_seq=acked, heartbeat_at=now, **rows.run))
    if rows.events:
        connection.execute(insert(EventRow), rows.events)
    if rows.metrics:
        # A step told twice (a worker that went back to a checkpoint) keeps its first number: cursors only go forward.
        if dialect == "sqlite":
            connection.execute(_ADD_POINTS, rows.metrics)
        else:
            columns = {name: [row[name] for row in rows.metrics] for name in ("step", "time", "name", "value")}
            connection.execute(_ADD_ALL_POINTS, {"run_id": run_id, **columns})


def _lost_event(job_id: str, run_id: str, now: float, gap: tuple[int, int]) -> dict[str, Any]:
    first, last = gap
    return {
        "job_id": job_id,
        "run_id": run_id,
        "time": now,
        "name": "reports_lost",
        "actor": "scheduler",
        "reason": f"reports {first} to {last} are not in the run's spool file",
        "data": {"first": first, "last": last},
    }


def clean(value: Any) -> Any:
    """Return plain data with every number that JSON, or 64 bits, cannot hold as null, and no NUL characters in text."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, int):
        return value if -MAX_WHOLE <= value <= MAX_WHOLE else None  # others cannot be counted with, or even shown
    if isinstance(value, str):
        return value.replace("\0", "")  # PostgreSQL stores none
    if isinstance(value, dict):
        return {key.replace("\0", ""): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _clean_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Clean a summary; what may not be null there (a rate over no time at all, say) becomes 0."""
    nullable = ("final_loss", "auc", "ne")
    found = {
        name: 0.0 if value is not None and item is None and name not in nullable else item
        for (name, value), item in zip(summary.items(), clean(summary).values(), strict=True)
    }
    return found | {"time_s": {part: each for part, each in _few(found["time_s"]).items() if each is not None}}


def _few(seconds: Any) -> dict[str, float | None]:
    """Return what a worker's time went to, of few parts with short names: a newer worker may know more of them."""
    return {part[:MAX_PART]: each for part, each in list(seconds.items())[:MAX_PARTS]}
