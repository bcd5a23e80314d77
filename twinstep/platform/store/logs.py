"""Logs of runs in a cluster: kept here when the pods are gone, each line once, whoever collects them.

How far a container's log was read is stored in the transaction that stores what was read: a collector that is killed,
or two that collect at once, neither lose a line nor store one twice. Of a log that grows past its bound the beginning
and the end are kept; a cursor counts every byte, so that one from before still fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from twinstep.platform.store.changes import Changes
from twinstep.platform.store.database import Database
from twinstep.platform.store.records import LogFilter, LogPart, LogSpan
from twinstep.platform.store.tables import LogPartRow, LogSourceRow, RunLogRow, RunRow

KEEP_BYTES = 64 * 1024 * 1024  # of one run's log
HEAD_SHARE = 4  # a fourth of them from its beginning, the rest from its end
PART_BYTES = 64 * 1024
SPARE_BYTES = 512 * 1024  # room is made for more than is needed, or every line would make some
TAIL_REACH = 1024 * 1024  # bytes looked back for the last lines
MAX_LOG_READ = 1024 * 1024  # bytes one answer holds at most
EVERYBODY = LogFilter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """How far a container's log was read."""

    instance: int = 0
    """Times the container was started again within its pod."""
    time: str = ""
    """Time of the line read last, as the kubelet wrote it; empty: none yet."""
    count: int = 0
    """Bytes read since the first line of that time, so that lines of one moment are told apart, and half lines."""
    ended: bool = False
    """That instance has ended and is read to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSource:
    """A container that writes to a run's log."""

    run_id: str
    pod_uid: str
    container: str
    pod: str
    role: str
    slice: int = 0
    host: int | None = None
    """None: no worker; or, where `open` is asked, the next that is free."""
    restart: int = 0
    id: int = 0
    job_id: str = ""
    place: Place = Place()


class Logs:
    """All stored logs."""

    def __init__(self, database: Database, changes: Changes, *, keep_bytes: int = KEEP_BYTES) -> None:
        """`keep_bytes` is what is kept of one run's log."""
        self._database = database
        self._changes = changes
        self._keep = keep_bytes

    # ---- collecting ----

    def open(self, wanted: LogSource) -> LogSource | None:
        """Return a container's source, with the place up to which it was read; made where it is new.

        None where there is no such run: another control plane's, or one that was deleted.
        """
        try:
            return self._open(wanted)
        except IntegrityError:  # another collector made it since it was looked for
            return self._open(wanted)

    def _open(self, wanted: LogSource) -> LogSource | None:
        marked = False
        with self._database.write() as connection:
            job_id = connection.execute(select(RunRow.job_id).where(RunRow.id == wanted.run_id)).scalar_one_or_none()
            if job_id is None:
                return None
            self._lock(connection, wanted.run_id)
            query = select(LogSourceRow.__table__).where(
                LogSourceRow.run_id == wanted.run_id,
                LogSourceRow.pod_uid == wanted.pod_uid,
                LogSourceRow.container == wanted.container,
            )
            row = connection.execute(query).one_or_none()
            if row is None:
                marked = self._add(connection, wanted)
                row = connection.execute(query).one()
        if marked:
            self._changes.bump(job_id)
        return _source(row, job_id)

    def _add(self, connection: Connection, wanted: LogSource) -> bool:
        """Store a new source; where it is the first of a restart, say so in the log, and return that."""
        of_run = LogSourceRow.run_id == wanted.run_id
        host = wanted.host
        if host is None and wanted.role == "worker":
            query = select(func.max(LogSourceRow.host)).where(of_run, LogSourceRow.restart == wanted.restart)
            highest = connection.execute(query).scalar_one_or_none()
            host = 0 if highest is None else highest + 1
        seen = connection.execute(select(func.max(LogSourceRow.restart)).where(of_run)).scalar_one_or_none()
        connection.execute(
            insert(LogSourceRow).values(
                run_id=wanted.run_id,
                pod_uid=wanted.pod_uid,
                container=wanted.container,
                pod=wanted.pod,
                role=wanted.role,
                slice=wanted.slice,
                host=host,
                restart=wanted.restart,
                instance=0,
                read_time="",
                read_bytes=0,
                ended=False,
            )
        )
        marks = wanted.restart > (seen or 0)
        if marks:
            self._write(connection, wanted.run_id, None, f"--- restart {wanted.restart} ---\n".encode())
        return marks

    def append(self, source: LogSource, data: bytes, to: Place) -> LogSource | None:
        """Store what a container wrote from the source's place up to `to`; return the source at that place.

        None where it is not at that place any more, since another collector was quicker; nothing is stored then.
        """
        was = source.place
        with self._database.write() as connection:
            self._lock(connection, source.run_id)
            moved = connection.execute(
                update(LogSourceRow)
                .where(
                    LogSourceRow.id == source.id,
                    LogSourceRow.instance == was.instance,
                    LogSourceRow.read_time == was.time,
                    LogSourceRow.read_bytes == was.count,
                    LogSourceRow.ended == was.ended,
                )
                .values(instance=to.instance, read_time=to.time, read_bytes=to.count, ended=to.ended)
            ).rowcount
            if not moved:
                return None
            if data:
                self._write(connection, source.run_id, source.id, data)
        if data:
            self._changes.bump(source.job_id)
        return replace(source, place=to)

    def _lock(self, connection: Connection, run_id: str) -> None:
        """Let others who write to this log wait; make its row where it is new."""
        query = select(RunLogRow.size).where(RunLogRow.run_id == run_id).with_for_update()
        if connection.execute(query).one_or_none() is None:
            connection.execute(insert(RunLogRow).values(run_id=run_id, size=0, gap_begin=0, gap_end=0))

    def _write(self, connection: Connection, run_id: str, source_id: int | None, data: bytes) -> None:
        row = connection.execute(select(RunLogRow.__table__).where(RunLogRow.run_id == run_id)).one()
        rows, begin = [], row.size
        for part in _parts(data):
            rows.append(
                {"run_id": run_id, "source_id": source_id, "begin": begin, "length": len(part), "data": part}
            )  # fmt: skip
            begin += len(part)
        connection.execute(insert(LogPartRow), rows)
        gap = self._make_room(connection, row, begin)
        connection.execute(
            update(RunLogRow).where(RunLogRow.run_id == run_id).values(size=begin, gap_begin=gap[0], gap_end=gap[1])
        )

    def _make_room(self, connection: Connection, row: Row[Any], size: int) -> tuple[int, int]:
        """Take out the oldest parts after the beginning while too much is kept; return the gap."""
        gap = (row.gap_begin, row.gap_end)
        over = size - (gap[1] - gap[0]) - self._keep
        if over <= 0:
            return gap
        after = max(gap[1], self._keep // HEAD_SHARE)
        query = (
            select(LogPartRow.begin, LogPartRow.length)
            .where(LogPartRow.run_id == row.run_id, LogPartRow.begin >= after)
            .order_by(LogPartRow.begin)
        )
        first, cut, found = None, after, 0
        for begin, length in connection.execute(query):
            first = begin if first is None else first
            cut, found = begin + length, found + length
            if found >= over + min(SPARE_BYTES, self._keep // 8):
                break
        where = (LogPartRow.run_id == row.run_id, LogPartRow.begin >= after, LogPartRow.begin < cut)
        connection.execute(delete(LogPartRow).where(*where))
        return (gap[0] if gap[1] else first or after), cut

    # ---- reading ----

    def log(self, run_id: str) -> StoredLog:
        """Return the log of a run; empty where there is none."""
        return StoredLog(self._database, run_id)

    def dropped_bytes(self) -> int:
        """Return the bytes of all logs that are not kept any more."""
        with self._database.read() as connection:
            query = select(func.sum(RunLogRow.gap_end - RunLogRow.gap_begin))
            return int(connection.execute(query).scalar_one_or_none() or 0)


class StoredLog:
    """The log of one run, to be read as `RunDir` has a local one's."""

    def __init__(self, database: Database, run_id: str) -> None:
        self._database = database
        self._run_id = run_id

    def log_size(self) -> int:
        """Return 0: that there is more is told by the change count, and here nobody is asked."""
        return 0

    def read_log(
        self, *, offset: int = 0, limit: int = 65536, final: bool = False, wanted: LogFilter = EVERYBODY
    ) -> LogPart:
        """Return up to `limit` bytes of the log from byte `offset`, of the sources that are wanted.

        `final` is for `RunDir`, whose file may end within a character; what is stored does not.
        """
        limit = max(4, min(limit, MAX_LOG_READ))
        with self._database.read() as connection:
            log = self._row(connection)
            size = log.size if log else 0
            offset = max(0, min(offset, size))
            if log is None or offset == size:
                return LogPart(offset=offset, next_offset=offset, size=size, text="")
            taken = _Taken(offset, limit)
            if offset < log.gap_begin:
                self._take(connection, taken, wanted, until=log.gap_begin)
            if not taken.full and log.gap_begin <= taken.at < log.gap_end:
                taken.say(f"[{log.gap_end - log.gap_begin:,} bytes of the log are not kept]\n")
                taken.at = log.gap_end
            if not taken.full:
                self._take(connection, taken, wanted, until=size)
        return taken.part(offset, size)

    def tail(self, lines: int, *, final: bool = False, wanted: LogFilter = EVERYBODY) -> LogPart:
        """Return the last `lines` lines of the sources that are wanted, looking back a mebibyte at most."""
        blocks: list[tuple[int, bytes]] = []
        reach = breaks = 0
        with self._database.read() as connection:
            log = self._row(connection)
            begin = log.size if log else 0
            found = connection.execution_options(yield_per=16).execute(
                _parts_of(self._run_id, wanted).order_by(LogPartRow.begin.desc())
            )
            for row in found:
                blocks.append((row.begin, row.data))
                reach += row.length
                breaks += row.data.count(b"\n")
                if reach >= TAIL_REACH or breaks > lines:
                    break
            found.close()
        kept = b"".join(data for _, data in reversed(blocks)).splitlines(keepends=True)[-lines:] if lines > 0 else []
        left = min(sum(map(len, kept)), TAIL_REACH)
        for at, data in blocks:  # the newest first
            if left <= 0:
                break
            begin = at + max(0, len(data) - left)
            left -= len(data)
        return self.read_log(offset=begin, limit=TAIL_REACH, final=final, wanted=wanted)

    def last_line(self) -> str:
        """Return the last line of the log that says something, cut to 300 characters."""
        return meant(self.tail(50).text)

    def _row(self, connection: Connection) -> Row[Any] | None:
        return connection.execute(select(RunLogRow.__table__).where(RunLogRow.run_id == self._run_id)).one_or_none()

    def _take(self, connection: Connection, taken: _Taken, wanted: LogFilter, *, until: int) -> None:
        """Take parts from where `taken` is up to byte `until`."""
        query = (
            _parts_of(self._run_id, wanted)
            # A part has so many bytes at most: an earlier one cannot reach so far.
            .where(LogPartRow.begin > taken.at - PART_BYTES, LogPartRow.begin < until)
            .where(LogPartRow.begin + LogPartRow.length > taken.at)
            .order_by(LogPartRow.begin)
        )
        found = connection.execution_options(yield_per=16).execute(query)
        for row in found:
            taken.add(row)
            if taken.full:
                break
        found.close()
        if not taken.full:
            taken.at = until


class _Taken:
    """What one read has gathered."""

    def __init__(self, at: int, limit: int) -> None:
        self.at = at
        """Up to where the log was read."""
        self._left = limit
        self._spans: list[tuple[dict[str, Any], bytes]] = []

    @property
    def full(self) -> bool:
        return self._left <= 0

    def say(self, text: str) -> None:
        self._spans.append(({"role": "control plane", "host": None}, text.encode()))

    def add(self, row: Row[Any]) -> None:
        data = row.data[max(0, self.at - row.begin) :][: self._left]
        self.at = max(self.at, row.begin) + len(data)
        self._left -= len(data)
        whose = (
            {"role": "control plane", "host": None}
            if row.role is None
            else {"slice": row.slice, "host": row.host, "restart": row.restart, "role": row.role, "pod": row.pod}
        )
        if self._spans and self._spans[-1][0] == whose:
            self._spans[-1] = (whose, self._spans[-1][1] + data)
        else:
            self._spans.append((whose, data))

    def part(self, offset: int, size: int) -> LogPart:
        if self._spans and self.full:  # the limit may have cut a character
            whose, data = self._spans[-1]
            over = cut_character(data)
            if over:
                self._spans[-1] = (whose, data[: len(data) - over])
                self.at -= over
        texts = [(whose, data.decode("utf-8", errors="replace")) for whose, data in self._spans if data]
        return LogPart(
            offset=offset,
            next_offset=self.at,
            size=size,
            text="".join(text for _, text in texts),
            spans=[LogSpan(length=len(text), **whose) for whose, text in texts],
        )


def _parts_of(run_id: str, wanted: LogFilter) -> Any:
    query = (
        select(
            LogPartRow.begin,
            LogPartRow.length,
            LogPartRow.data,
            LogSourceRow.slice,
            LogSourceRow.host,
            LogSourceRow.restart,
            LogSourceRow.role,
            LogSourceRow.pod,
        )
        .join(LogSourceRow, LogPartRow.source_id == LogSourceRow.id, isouter=True)
        .where(LogPartRow.run_id == run_id)
    )
    for name, value in wanted.model_dump(exclude_none=True).items():
        query = query.where(getattr(LogSourceRow, name) == value)
    return query


def _source(row: Row[Any], job_id: str) -> LogSource:
    return LogSource(
        run_id=row.run_id,
        pod_uid=row.pod_uid,
        container=row.container,
        pod=row.pod,
        role=row.role,
        slice=row.slice,
        host=row.host,
        restart=row.restart,
        id=row.id,
        job_id=job_id,
        place=Place(instance=row.instance, time=row.read_time, count=row.read_bytes, ended=row.ended),
    )


def _parts(data: bytes) -> Iterator[bytes]:
    """Cut data into parts: at the end of a line where there is one, else between two characters."""
    while len(data) > PART_BYTES:
        cut = data.rfind(b"\n", PART_BYTES // 2, PART_BYTES) + 1
        if not cut:
            cut = PART_BYTES - cut_character(data[:PART_BYTES])
        yield data[:cut]
        data = data[cut:]
    yield data


def cut_character(data: bytes) -> int:
    """Return how many bytes at the end begin a UTF-8 character whose rest is missing."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # a continuation byte: the start is further back
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if 0xC0 <= byte < 0xF8 and needs > back else 0
    return 0


def meant(text: str) -> str:
    """Return the last line of `text` that says something, cut to 300 characters; a carriage return ends a line too."""
    found = [line.strip() for line in text.replace("\r", "\n").splitlines() if any(map(str.isalnum, line))]
    return found[-1][:300] if found else ""
