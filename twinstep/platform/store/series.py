"""Metrics as charts want them: few points, whatever a run's length, that keep spikes, gaps and what is undefined.

What was read of a run stays in memory in few buckets (`rollup.py`), and each further look reads what is new. The first
look has the database gather a run's points; a look at a small stretch of a long run reads that stretch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sqlalchemy import BigInteger, Connection, func, literal_column, select

from twinstep.platform.store.database import Database
from twinstep.platform.store.records import MetricSeries
from twinstep.platform.store.rollup import KEPT, Bucket, Rollup, joined, point, width_for
from twinstep.platform.store.tables import MetricRow

MAX_NAMES = 200  # metrics of one run that are told apart
_KEPT_RUNS = 64
_KEPT_BUCKETS = 400_000  # of all runs together, some 100 MiB; those looked at longest ago are read anew
_NEW_POINTS = 20_000  # read at once


def last_values(connection: Connection, run_id: str, names: Sequence[str]) -> dict[str, float | None]:
    """Return the value of each metric at its last step, by index; a metric without points is left out."""
    found: dict[str, float | None] = {}
    for name in names:
        query = (
            select(MetricRow.value)
            .where(MetricRow.run_id == run_id, MetricRow.name == name)
            .order_by(MetricRow.step.desc())
            .limit(1)
        )
        row = connection.execute(query).one_or_none()
        if row is not None:
            found[name] = row.value
    return found


def metric_names(connection: Connection, run_id: str) -> list[str]:
    """Return the names of a run's metrics in order: one step through the index for each, however many points."""
    found: list[str] = []
    query = select(func.min(MetricRow.name)).where(MetricRow.run_id == run_id)
    while len(found) < MAX_NAMES:
        name = connection.execute(query.where(MetricRow.name > found[-1]) if found else query).scalar_one()
        if name is None:
            break
        found.append(name)
    return found


class _Known:
    """What is in memory of one run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.cursor = 0
        self.rollups: dict[str, Rollup] = {}
        self.buckets = 0
        """Of all of them, as of the last look."""


class SeriesReader:
    """Reads series out of one database; one for all who look."""

    def __init__(self, database: Database, *, kept: int = KEPT, kept_in_all: int = _KEPT_BUCKETS) -> None:
        self._database, self._kept, self._in_all = database, kept, kept_in_all
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, _Known] = OrderedDict()

    def names(self, run_id: str) -> list[str]:
        """Return the names of a run's metrics, in order."""
        with self._database.read() as connection:
            return metric_names(connection, run_id)

    def series(
        self,
        run_id: str,
        names: Sequence[str],
        *,
        max_points: int,
        from_step: int | None = None,
        to_step: int | None = None,
        width: int = 1,
    ) -> list[MetricSeries]:
        """Return a series per name that the run has points of; see `MetricSeries`.

        `width` is the least one wanted: with that of an answer before, buckets are the same as there.
        """
        known = self._known(run_id)
        with known.lock, self._database.read() as connection:
            self._catch_up(connection, run_id, known)
            found: list[MetricSeries] = []
            for name in dict.fromkeys(names):
                rollup = known.rollups.get(name)
                if rollup is None:
                    rollup = self._first_look(connection, run_id, name, known)
                buckets = rollup.buckets()
                if not buckets:
                    continue
                first = buckets[0].first if from_step is None else from_step
                last = buckets[-1].last if to_step is None else to_step
                wanted = width_for(first, max(first, last), max_points)
                while wanted < width:
                    wanted *= 2
                if wanted < rollup.width:
                    stretch: Sequence[Bucket] = list(_gathered(connection, run_id, name, wanted, first, last))
                else:
                    stretch = [bucket for bucket in buckets if bucket.last >= first and bucket.first <= last]
                found.append(_series(name, wanted, joined(stretch, wanted)))
            known.buckets = sum(map(len, known.rollups.values()))
        self._make_room()
        return found

    def _make_room(self) -> None:
        """Forget runs while there is too much in memory: a run may have any number of metrics."""
        with self._lock:
            held = sum(known.buckets for known in self._runs.values())
            while held > self._in_all:
                held -= self._runs.popitem(last=False)[1].buckets

    def _known(self, run_id: str) -> _Known:
        with self._lock:
            known = self._runs.setdefault(run_id, _Known())
            self._runs.move_to_end(run_id)
            if len(self._runs) > _KEPT_RUNS:
                self._runs.popitem(last=False)
            return known

    def _first_look(self, connection: Connection, run_id: str, name: str, known: _Known) -> Rollup:
        """Have the database gather what there is of a metric up to the cursor."""
        edges = select(MetricRow.step).where(MetricRow.run_id == run_id, MetricRow.name == name).limit(1)
        first = connection.execute(edges.order_by(MetricRow.step)).scalar_one_or_none()
        rollup = Rollup(kept=self._kept)
        if first is None:
            return rollup  # not kept: names that no run has must not fill the memory
        last = connection.execute(edges.order_by(MetricRow.step.desc())).scalar_one()
        rollup.widen(width_for(first, last, self._kept))
        rollup.add(_gathered(connection, run_id, name, rollup.width, first, last, up_to=known.cursor))
        known.rollups[name] = rollup
        return rollup

    @staticmethod
    def _catch_up(connection: Connection, run_id: str, known: _Known) -> None:
        """Read the points after the cursor. A run's reports are stored one after the other: no lower id comes later."""
        columns = (MetricRow.id, MetricRow.name, MetricRow.step, MetricRow.time, MetricRow.value)
        if not known.rollups:
            newest = select(func.max(MetricRow.id)).where(MetricRow.run_id == run_id)
            known.cursor = connection.execute(newest).scalar_one() or 0
            return
        while True:
            query = (
                select(*columns)
                .where(MetricRow.run_id == run_id, MetricRow.id > known.cursor)
                .order_by(MetricRow.id)
                .limit(_NEW_POINTS)
            )
            rows = connection.execute(query).all()
            for row in rows:
                if row.name in known.rollups:
                    known.rollups[row.name].add((point(row.step, row.time, row.value),))
            if rows:
                known.cursor = rows[-1].id
            if len(rows) < _NEW_POINTS:
                return


def _gathered(
    connection: Connection, run_id: str, name: str, width: int, first: int, last: int, *, up_to: int | None = None
) -> Iterator[Bucket]:
    """Yield the buckets of a stretch of steps, gathered by the database."""
    # Written out: a parameter in two places is two expressions to PostgreSQL.
    place = MetricRow.step // literal_column(str(int(width)), BigInteger)
    value = MetricRow.value
    query = (
        select(
            func.min(MetricRow.step),
            func.max(MetricRow.step),
            func.max(MetricRow.time),
            func.min(value),
            func.max(value),
            func.sum(value),
            func.count(value),
            func.count() - func.count(value),
        )
        .where(MetricRow.run_id == run_id, MetricRow.name == name, MetricRow.step.between(first, last))
        .group_by(place)
        .order_by(place)
    )
    if up_to is not None:
        query = query.where(MetricRow.id <= up_to)
    for first_step, last_step, time, low, high, total, count, undefined in connection.execute(query):
        yield Bucket(first_step, last_step, time, low, high, float(total or 0.0), count, undefined)


def _series(name: str, width: int, buckets: Sequence[Bucket]) -> MetricSeries:
    return MetricSeries.model_construct(
        name=name,
        width=width,
        first_steps=[bucket.first for bucket in buckets],
        steps=[bucket.last for bucket in buckets],
        times=[bucket.time for bucket in buckets],
        means=[bucket.mean for bucket in buckets],
        lows=[bucket.low for bucket in buckets],
        highs=[bucket.high for bucket in buckets],
        undefined=[bucket.undefined for bucket in buckets],
    )
