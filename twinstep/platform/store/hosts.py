"""When each host of a run in a cluster was last heard of, as the logs collected from its pods tell."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, case, func, select

from twinstep.platform.store.records import HostHeard
from twinstep.platform.store.tables import LogPartRow, LogSourceRow

MAX_SOURCES = 2000
LINE_BYTES = 400


def heard_hosts(connection: Connection, run_id: str) -> list[HostHeard]:
    """Return the newest container of each host of a run, with when it said its last line, and the line."""
    newest = (
        select(LogPartRow.source_id, func.max(LogPartRow.id).label("part"))
        .where(LogPartRow.run_id == run_id, LogPartRow.source_id.is_not(None))
        .group_by(LogPartRow.source_id)
        .subquery()
    )
    begin = case((LogPartRow.length > LINE_BYTES, LogPartRow.length - LINE_BYTES + 1), else_=1)
    query = (
        select(
            LogSourceRow.slice,
            LogSourceRow.host,
            LogSourceRow.pod,
            LogSourceRow.restart,
            LogSourceRow.read_time,
            LogSourceRow.ended,
            func.substr(LogPartRow.data, begin).label("end"),
        )
        .outerjoin(newest, newest.c.source_id == LogSourceRow.id)
        .outerjoin(LogPartRow, LogPartRow.id == newest.c.part)
        .where(LogSourceRow.run_id == run_id, LogSourceRow.role == "worker", LogSourceRow.host.is_not(None))
        .order_by(LogSourceRow.restart.desc(), LogSourceRow.id.desc())
        .limit(MAX_SOURCES)
    )
    found: dict[tuple[int, int], HostHeard] = {}
    for row in connection.execute(query):
        place = (row.slice, row.host)
        if place not in found:
            found[place] = HostHeard(
                slice=row.slice,
                host=row.host,
                pod=row.pod,
                restart=row.restart,
                time=_seconds(row.read_time),
                line=_last_line(bytes(row.end or b"")),
                ended=row.ended,
            )
    return list(found.values())


def _seconds(text: str) -> float | None:
    """Return a kubelet's time, with its nanoseconds, as Unix seconds."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _last_line(data: bytes) -> str:
    lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
