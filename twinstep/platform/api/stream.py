"""A job, live: server-sent events of its state, events, metrics and log, resumable at any point.

Each message's id holds the whole cursor, so a reader that comes back with Last-Event-ID misses nothing and sees
nothing twice. A follower holds one page at a time and asks the database only when something changed, so many are
cheap. The stream closes after `end`; a stream that closes without it wants to be taken up again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from twinstep.platform.api.access import still_reads
from twinstep.platform.api.jobs import Asked, JobId
from twinstep.platform.api.problems import RequestError, responses
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.records import JobDetail
from twinstep.spec.errors import Fault, UnavailableError

router = APIRouter(prefix="/v1", tags=["jobs"])

Kind = Literal["state", "event", "metrics", "log"]
KINDS: tuple[Kind, ...] = ("state", "event", "metrics", "log")
# What one message or one look holds at most. Whoever reads slowly keeps one in memory: 1,000 points are a megabyte.
EVENTS, POINTS, LOG_BYTES = 100, 200, 32768
LOOK_ANYWAY_S = 5.0  # writes of another process make no change count here


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a follower has read."""

    event: int = 0
    metric: int = 0
    run_id: str = ""
    """Run that `metric` and `offset` are about."""
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.event}.{self.metric}.{self.run_id}.{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor `str` made, or raise RequestError."""
        try:
            event, metric, run_id, offset = text.split(".")
            numbers = [int(event), int(metric), int(offset)]
            if not all(0 <= number < 2**63 for number in numbers) or len(run_id) > 64:
                raise ValueError
        except ValueError:
            fault = Fault(
                field="Last-Event-ID",
                problem="is not the id of a message of this stream",
                given=text[:120],
                remedy="send the id as it came, or none to begin at the beginning",
            )
            raise RequestError("the Last-Event-ID is not valid", remedy=fault.remedy, faults=(fault,)) from None
        return cls(numbers[0], numbers[1], run_id, numbers[2])


class Follower:
    """One reader's place in a job."""

    def __init__(
        self,
        service: Service,
        job: JobDetail,
        cursor: Cursor,
        kinds: frozenset[Kind],
        may_read: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_read` says whether the reader may go on: a token can be revoked while it follows."""
        self._service = service
        self._may_read = may_read
        self._job_id = job.id
        self._cursor = cursor
        self._kinds = kinds
        self._shown: JobDetail | None = None
        self._count: int | None = None
        self._looked_at = 0.0
        self._log_of_run = service.log_of(job.run_id)  # never the cursor's, which came over HTTP
        self._log_seen = 0
        self.ended = False

    def idle(self) -> bool:
        """Say whether there is nothing new, so far as a counter and the log's size can tell; blocks nobody."""
        return (
            self._count == self._service.change_count(self._job_id)
            and time.monotonic() - self._looked_at < LOOK_ANYWAY_S
            and ("log" not in self._kinds or self._log_of_run.log_size() <= self._log_seen)
        )

    def look(self) -> list[ServerSentEvent]:
        """Return what is new, one page at most; empty where nothing is."""
        if not self._may_read():
            self.ended = True
            return []
        count, self._looked_at = self._service.change_count(self._job_id), time.monotonic()
        job = self._service.get_job(self._job_id)
        if job.run_id != self._cursor.run_id:
            self._cursor = replace(self._cursor, run_id=job.run_id, metric=0, offset=0)
            self._log_of_run = self._service.log_of(job.run_id)
        messages = [*self._state(job), *self._events(), *self._metrics(job), *self._log(job)]
        if not messages:
            # Only now: while pages were full there was more to come, whatever the count says.
            self._count = count
            if job.is_final:
                self.ended = True
                return [self._message("end", {"state": job.state, "reason": job.reason})]
        return messages

    def _message(self, event: str, data: object) -> ServerSentEvent:
        return ServerSentEvent(event=event, data=data, id=str(self._cursor))

    def _state(self, job: JobDetail) -> Iterator[ServerSentEvent]:
        if job != self._shown:
            self._shown = job
            if "state" in self._kinds:
                yield self._message("state", job.model_dump(mode="json", exclude={"spec"}))

    def _events(self) -> Iterator[ServerSentEvent]:
        if "event" in self._kinds:
            for event in self._service.list_events(self._job_id, after=self._cursor.event, limit=EVENTS).items:
                self._cursor = replace(self._cursor, event=event.id)
                yield self._message("event", event)

    def _metrics(self, job: JobDetail) -> Iterator[ServerSentEvent]:
        if "metrics" in self._kinds:
            page = self._service.list_metrics(self._job_id, after=self._cursor.metric, limit=POINTS, run_id=job.run_id)
            if page.items:
                self._cursor = replace(self._cursor, metric=page.next_after)
                yield self._message("metrics", page)

    def _log(self, job: JobDetail) -> Iterator[ServerSentEvent]:
        if "log" in self._kinds:
            part = self._log_of_run.read_log(offset=self._cursor.offset, limit=LOG_BYTES, final=job.is_final)
            # Half a character at its end counts as seen: there is nothing new until more comes.
            self._log_seen = part.next_offset if part.next_offset > part.offset else part.size
            if part.next_offset > part.offset:
                self._cursor = replace(self._cursor, offset=part.next_offset)
                yield self._message("log", part)


# After the class it names, which FastAPI looks up when the route is made.
def begin(
    request: Request,
    service: Asked,
    job_id: JobId,
    kinds: Annotated[list[Kind] | None, Query(description="Only messages of these kinds; `end` always comes.")] = None,
    last_event_id: Annotated[str | None, Header(description="Id of the last message seen.")] = None,
) -> Follower:
    """Return a follower at its place; what is wrong is told before the stream opens."""
    job = service.get_job(job_id)
    cursor = Cursor.parse(last_event_id) if last_event_id else Cursor()
    if cursor.run_id not in ("", job.run_id) and all(run.id != cursor.run_id for run in service.list_runs(job.id)):
        fault = Fault(
            field="Last-Event-ID",
            problem=f"is of another job than {job.id}, which the path names by now",
            given=str(cursor)[:120],
            remedy="follow a job by its id, or send none to begin at this one's beginning",
        )
        raise RequestError("the Last-Event-ID is not of this job", remedy=fault.remedy, faults=(fault,))
    return Follower(service, job, cursor, frozenset(kinds or KINDS), still_reads(request, job.id))


@router.get(
    "/jobs/{job_id}/stream", response_class=EventSourceResponse, responses=responses(404), summary="Follow a job"
)
async def stream(service: Asked, follower: Annotated[Follower, Depends(begin)]) -> AsyncIterator[ServerSentEvent]:
    """Send `state` (the job without its spec, whenever it changes), `event`, `metrics`, `log`, and `end` at the end.

    A reader that comes back with `Last-Event-ID` goes on where it was. A stream that closes without `end` wants to be
    taken up again.
    """
    yield ServerSentEvent(comment="following", retry=1000)
    while not service.closing.is_set():
        if follower.idle():
            await asyncio.sleep(service.settings.stream_seconds)
            continue
        try:
            messages = await run_in_threadpool(follower.look)
        except UnavailableError:
            return  # the database is away: whoever comes back is told so, and goes on from its place later
        for message in messages:
            yield message
        if follower.ended:
            return
