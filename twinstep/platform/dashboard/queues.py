"""What waits, for what and in what order, and what is in use meanwhile, queue by queue. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.platform.store.records import Job

HERE = "this machine"
"""Where jobs wait for a slot of the control plane's own."""
NO_QUEUE = "no queue"
"""Jobs for a cluster that no queue admits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLine:
    """One queue and the jobs of one project in it."""

    queue: str
    project: str
    waiting: int = 0
    chips_wanted: int = 0
    active: int = 0
    chips_used: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Waiting, for so many chips; active, on so many."""
        return self.waiting, self.chips_wanted, self.active, self.chips_used


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingJob:
    """A job that waits."""

    id: str
    name: str
    queue: str
    project: str
    machine: str
    since: float
    """When its newest run was made, Unix seconds."""
    place: int
    """In its queue, by age; a queue may let others go first."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueView:
    """All queues."""

    lines: tuple[QueueLine, ...]
    waiting: tuple[WaitingJob, ...]
    active: int
    chips_used: int
    chips_wanted: int
    slots: int
    """Of this machine."""
    slots_used: int


def queue_of(job: Job) -> str:
    """Return where a job waits."""
    return HERE if job.accelerator == "cpu" else job.queue or NO_QUEUE


def queue_view(waiting: Sequence[Job], active: Sequence[Job], *, slots: int) -> QueueView:
    """Return the queues of jobs that wait and that are active, the oldest first each."""
    lines: dict[tuple[str, str], list[int]] = {}
    for jobs, at in ((waiting, 0), (active, 2)):
        for job in jobs:
            line = lines.setdefault((queue_of(job), job.project), [0, 0, 0, 0])
            line[at] += 1
            line[at + 1] += job.chips
    places: dict[str, int] = {}
    rows: list[WaitingJob] = []
    for job in waiting:
        queue = queue_of(job)
        places[queue] = places.get(queue, 0) + 1
        rows.append(
            WaitingJob(
                id=job.id,
                name=job.name,
                queue=queue,
                project=job.project,
                machine=job.machine,
                since=job.run_created_at,
                place=places[queue],
                reason=job.reason,
            )
        )
    return QueueView(
        lines=tuple(
            QueueLine(queue=queue, project=project, waiting=n, chips_wanted=wanted, active=m, chips_used=used)
            for (queue, project), (n, wanted, m, used) in sorted(lines.items())
        ),
        waiting=tuple(rows),
        active=len(active),
        chips_used=sum(job.chips for job in active),
        chips_wanted=sum(job.chips for job in waiting),
        slots=slots,
        slots_used=sum(queue_of(job) == HERE for job in active),
    )
