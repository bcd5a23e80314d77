"""Find jobs: by state, accelerator, backend, attempt, name, id or any text of their specs; a page at a time.

A page costs the same however many jobs there are. States and names go by an index; what no index knows (a text, a
backend) is looked for in `SCANNED` jobs at most, and a page that ends there says where to go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, and_, cast, func, or_, select, tuple_

from twinstep.platform.store.records import Job, JobPage, Run
from twinstep.platform.store.tables import JobRow, RunRow
from twinstep.spec.machine import machine_words
from twinstep.spec.states import RunState

SCANNED = 20_000
"""Jobs that a page looks through at most for what no index knows: some 100 ms."""
MAX_WORDS = 8
OWN = frozenset({"id", "backend", "created_at"})
STANDING = [getattr(RunRow, name) for name in Job.model_fields if name in Run.model_fields and name not in OWN]
"""What a job shows of its newest run. Its backend is the spec's, which is not what a run means by it, and it is as old
as its first run."""


class JobSort(StrEnum):
    """Orders of a list of jobs."""

    NEWEST = "newest"
    """The one submitted last comes first."""
    OLDEST = "oldest"
    NAME = "name"
    """By name, of one name the oldest first."""
    NAME_BACKWARDS = "-name"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """Which jobs are wanted: those that fit all that is given."""

    states: tuple[RunState, ...] = ()
    """Any of these; none given: any."""
    accelerators: tuple[str, ...] = ()
    """cpu, tpu, gpu."""
    backends: tuple[str, ...] = ()
    """The spec's compile.backend."""
    min_attempt: int = 1
    """The newest run is this attempt, or a later one."""
    name: str | None = None
    """The whole name."""
    id_prefix: str | None = None
    """How the id begins."""
    text: str = ""
    """Words that each stand in the name, the id or the spec; `lr=0.01` is a field of the spec and its value."""

    projects: frozenset[str] | None = None
    """Only jobs of these projects; None: of any."""

    @property
    def scans(self) -> bool:
        """Whether something is wanted that no index knows."""
        return self.projects is not None or bool(
            self.accelerators or self.backends or self.min_attempt > 1 or self.text.split()
        )


def newest_run() -> ColumnElement[bool]:
    """Return that a row of runs is the newest of its job; for use beside a join with jobs."""
    newest = select(func.max(RunRow.attempt)).where(RunRow.job_id == JobRow.id).correlate(JobRow).scalar_subquery()
    return and_(RunRow.job_id == JobRow.id, RunRow.attempt == newest)


def select_jobs() -> Select[Any]:
    """Return the query of every job with the standing of its newest run and its spec."""
    about = (JobRow.id, JobRow.name, JobRow.project, JobRow.submitted_by, JobRow.created_at)
    of_run = (RunRow.id.label("run_id"), RunRow.created_at.label("run_created_at"), spec_of_run().label("spec"))
    return select(*about, *of_run, *STANDING).join(RunRow, newest_run())


def spec_of_run() -> ColumnElement[Any]:
    """Return the spec of a row of runs: its own where an attempt was changed, else its job's."""
    return func.coalesce(RunRow.spec, JobRow.spec, type_=JobRow.spec.type)


def job_fields(row: Row[Any]) -> dict[str, Any]:
    """Return the fields of a Job out of a row of `select_jobs`."""
    fields = row._asdict()
    return fields | spec_fields(fields.pop("spec"))


def spec_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a Job shows of its spec."""
    machine = machine_words(spec["accelerator"])
    return {
        "machine": machine.name,
        "chips": machine.chips,
        "queue": (spec.get("kubernetes") or {}).get("queue"),
        "backend": spec["compile"]["backend"],
        "accelerator": spec["accelerator"]["kind"],
        "model": spec["model"]["kind"],
        "factory": spec["model"].get("factory"),
        "dataset": spec["data"]["dataset"],
    }


def newest_of_name(connection: Connection, name: str, projects: frozenset[str] | None) -> str | None:
    """Return the id of the newest job of a name among the jobs of these projects (None: of all); None where none is."""
    query = select(JobRow.id).where(JobRow.name == name).order_by(JobRow.id.desc()).limit(1)
    if projects is not None:
        query = query.where(JobRow.project.in_(projects))
    return connection.execute(query).scalar_one_or_none()


def find_jobs(
    connection: Connection, wanted: JobFilter, *, sort: JobSort, limit: int, cursor: str | None, scanned: int = SCANNED
) -> JobPage:
    """Return one page of the jobs that fit; `cursor` is a page's `next_cursor`.

    A page may hold fewer than `limit`, or none, and have a next one: the jobs looked through had no more.
    """
    order = _Order(sort, cursor)
    # By id, each state is a walk of its own along one index: a handful of running jobs among a million are found so.
    splits = len(wanted.states) > 0 and order.by_id
    parts = [(state,) for state in wanted.states] if splits else [wanted.states]
    rows: list[Row[Any]] = []
    ends: list[tuple[str, ...]] = []
    for states in parts:
        found, end = _walk(connection, wanted, states, order, limit=limit, scanned=scanned)
        rows += found
        ends += [end] if end is not None else []
    rows.sort(key=order.key, reverse=order.backwards)
    # What lies beyond the nearest end of a walk was not looked at by that walk: it belongs to the next page.
    nearest = (max if order.backwards else min)(ends) if ends else None
    if nearest is not None:
        rows = [row for row in rows if order.before(order.key(row), nearest)]
    more = len(rows) > limit
    last = order.key(rows[limit - 1]) if more else nearest
    items = [Job.model_validate(job_fields(row)) for row in rows[:limit]]
    return JobPage(items=items, next_cursor=None if last is None else order.say(last))


def _walk(
    connection: Connection, wanted: JobFilter, states: Sequence[RunState], order: _Order, *, limit: int, scanned: int
) -> tuple[list[Row[Any]], tuple[str, ...] | None]:
    """Return up to `limit` + 1 rows, and where the walk ended if it did so before the last job."""
    # With a state the id is taken from runs, whose index has the state before it.
    columns = order.columns(by_run=bool(states) and order.by_id)
    base = order.after(select_jobs(), columns)
    if states:
        base = base.where(RunRow.state.in_(sorted(states)) if len(states) > 1 else RunRow.state == states[0])
    if wanted.name is not None:
        base = base.where(JobRow.name == wanted.name)
    if wanted.id_prefix is not None:
        base = base.where(func.substr(JobRow.id, 1, len(wanted.id_prefix)) == wanted.id_prefix)
    end = None
    if wanted.scans:
        place = base.with_only_columns(*columns, maintain_column_froms=True).offset(scanned - 1).limit(1)
        row = connection.execute(place).one_or_none()
        end = None if row is None else tuple(map(str, row))
    query = base.where(*_unindexed(wanted)).limit(limit + 1)
    if end is not None:
        query = query.where(order.until(columns, end))
    return list(connection.execute(query).all()), end


class _Order:
    """An order of jobs, and how a cursor says where in it one is: `ID`, or `NAME/ID`."""

    def __init__(self, sort: JobSort, cursor: str | None) -> None:
        self.by_id = sort in (JobSort.NEWEST, JobSort.OLDEST)
        self.backwards = sort in (JobSort.NEWEST, JobSort.NAME_BACKWARDS)
        self.place: tuple[str, ...] | None = None
        if cursor is not None:
            name, _, job_id = cursor.replace("\0", "").rpartition("/")  # PostgreSQL takes no NUL
            self.place = (job_id,) if self.by_id else (name, job_id)

    def columns(self, *, by_run: bool) -> list[Any]:
        """Return the columns to go by."""
        job_id = RunRow.job_id if by_run else JobRow.id
        return [job_id] if self.by_id else [JobRow.name, job_id]

    def after(self, query: Select[Any], columns: list[Any]) -> Select[Any]:
        """Return the query in this order, from the cursor on."""
        query = query.order_by(*(column.desc() if self.backwards else column for column in columns))
        if self.place is None:
            return query
        where = tuple_(*columns)
        return query.where(where < self.place if self.backwards else where > self.place)

    def until(self, columns: list[Any], end: tuple[str, ...]) -> ColumnElement[bool]:
        """Return that a row does not lie beyond `end`."""
        where = tuple_(*columns)
        return where >= end if self.backwards else where <= end

    def key(self, row: Row[Any]) -> tuple[str, ...]:
        """Return where a row lies."""
        return (row.id,) if self.by_id else (row.name, row.id)

    def before(self, place: tuple[str, ...], end: tuple[str, ...]) -> bool:
        """Say whether a place does not lie beyond `end`."""
        return place >= end if self.backwards else place <= end

    def say(self, place: tuple[str, ...]) -> str:
        """Return the cursor of a place."""
        return "/".join(place)


def _unindexed(wanted: JobFilter) -> Iterator[ColumnElement[bool]]:
    spec = spec_of_run()
    if wanted.projects is not None:
        yield JobRow.project.in_(sorted(wanted.projects))
    if wanted.accelerators:
        yield spec["accelerator"]["kind"].as_string().in_(wanted.accelerators)
    if wanted.backends:
        yield spec["compile"]["backend"].as_string().in_(wanted.backends)
    if wanted.min_attempt > 1:
        yield RunRow.attempt >= wanted.min_attempt
    written = cast(spec, Text)
    for word in wanted.text.replace("\0", " ").split()[:MAX_WORDS]:
        field = re.fullmatch(r"(?:[\w.]+\.)?(\w+)[=:](.+)", word)
        told = [f'"{field[1]}": {field[2]}', f'"{field[1]}": "{field[2]}'] if field else [word]
        places = [JobRow.name, JobRow.id] if not field else []
        yield or_(
            *(place.icontains(word, autoescape=True) for place in places),
            *(written.icontains(text, autoescape=True) for text in told),
        )


def count_states(connection: Connection, projects: frozenset[str] | None = None) -> dict[RunState, int]:
    """Return how many jobs of these projects (None: of all) are in each state; a state that none is in is left out."""
    query = select(RunRow.state, func.count()).join(JobRow, newest_run()).group_by(RunRow.state)
    if projects is not None:
        query = query.where(JobRow.project.in_(sorted(projects)))
    return {RunState(state): count for state, count in connection.execute(query)}
