"""What is read out of the store, frozen: jobs, runs, events, metric points. The API answers with these very models.

Times are Unix seconds. No secret is ever a field here: a run's token stays behind in its table.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from twinstep.spec.report import RunSummary
from twinstep.spec.states import FINAL, RunState


class View(BaseModel):
    """Base: frozen, and each field's docstring is its description in the API."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Progress(View):
    """Where a worker says it is."""

    time: float
    """When it said so, on the worker's clock."""
    phase: str
    """starting, compiling, training, evaluating or done."""
    step: int
    """Steps done."""
    total_steps: int
    """Steps in all."""
    examples_per_s: float | None = None
    """Training examples per second, lately."""
    eta_s: float | None = None
    """Seconds to the last step."""
    tokens_per_s: float | None = None
    """History tokens that fill a slot, a second, lately."""
    goodput: float | None = None
    """Useful step time over wall time so far, all attempts that go on from one another together."""
    chip_hours: float | None = None
    """Chips (devices on a CPU) × hours of wall time so far."""
    time_s: dict[str, float | None] = Field(default_factory=dict)
    """Wall seconds so far by what they went to: step, input_wait, compile, checkpoint, …"""


class Workload(View):
    """The JobSet or RayJob of a run in a cluster."""

    kind: str
    namespace: str
    name: str
    uid: str = ""
    """Empty as long as it is not known that the cluster has it."""


class PodTrouble(View):
    """How a container of a run in a cluster ended, or what keeps it from starting."""

    pod: str
    slice: int | None = None
    """Index of the pod's slice; null where it has none."""
    host: int | None = None
    """Index of the pod within its slice."""
    container: str = ""
    restart: int = 0
    """Of the run's restarts, the one whose pod it was."""
    exit_code: int | None = None
    reason: str = ""
    """The cluster's word: OOMKilled, Error, ImagePullBackOff, Evicted."""
    message: str = ""
    time: float | None = None
    """When it ended, in Unix seconds."""


class Diagnosis(View):
    """What a cluster says of a run beyond its state; kept when the objects are gone."""

    code: str = ""
    """The cluster's word for why it is where it is: WaitingForQuota, Unschedulable, ReachedMaxRestarts."""
    waits: str = ""
    """What the queue or the scheduler says of a run that waits."""
    pods: list[PodTrouble] = Field(default_factory=list)
    """Pods that failed or cannot start, the one that failed first before the others it took along."""


class _Standing(View):
    """What a run and its job share."""

    state: RunState
    """State of the run; of a job: of its newest run."""
    reason: str
    """Why it is in that state, in one sentence."""
    created_at: float
    """When it was made; of a job: when it was submitted."""
    started_at: float | None = None
    """When it was first started."""
    finished_at: float | None = None
    """When it came to its final state."""
    heartbeat_at: float | None = None
    """When the worker was last heard of."""
    cancel_requested_at: float | None = None
    """When somebody asked for it to stop."""
    suspend_requested_at: float | None = None
    """When somebody asked for it to be suspended; null once it may go on."""
    restarts: int = 0
    """Times the cluster has started its pods again within the run; never falls."""
    progress: Progress | None = None
    """The newest progress report."""
    summary: RunSummary | None = None
    """What the finished run said of itself."""

    @property
    def is_final(self) -> bool:
        """Say whether nothing will change any more."""
        return self.state in FINAL


class Run(_Standing):
    """One attempt to execute a job."""

    id: str
    """`run-…`."""
    job_id: str
    """The job it belongs to."""
    attempt: int
    """1 for the first start."""
    backend: str
    """Where it runs: local (this machine) or kubernetes."""
    home: str | None = None
    """Of a local run: the id of the data directory whose control plane started it, and alone looks after it."""
    spec: dict[str, Any] | None = None
    """The JobSpec of this attempt; null: the job's."""
    resumed_from: str | None = None
    """The run that this one goes on from."""
    cluster: Workload | None = None
    """What it is in the cluster; null before anything was sent there."""
    diagnosis: Diagnosis | None = None
    """What the cluster says of it; null where it said nothing yet."""
    waiting_since: float | None = None
    """Since when it waits to be started, or to go on; null while it is active, and once it has ended.
    runtime.max_wait_seconds limits a wait."""
    active_since: float | None = None
    """Since when it is started or runs; null while it waits, and once it has ended."""
    active_seconds: float = 0.0
    """Seconds it was active before that; runtime.max_seconds limits the sum."""
    version: int
    """Grows with every change of state; guards against two writers."""
    acked_seq: int = 0
    """Reports stored so far."""


class Job(_Standing):
    """What a user submitted, with the state of its newest run."""

    id: str
    """`job-…`."""
    name: str
    """The name its spec gives."""
    project: str
    """The project it belongs to."""
    submitted_by: str
    """The user who submitted it; `user` where no login is asked for."""
    run_id: str
    """Its newest run."""
    run_created_at: float
    """When that run was made: of a job that was tried again or resized, later than the job."""
    attempt: int
    """Which attempt that run is."""
    backend: str = Field(description="The spec's compile.backend.")
    accelerator: str = Field(description="The spec's accelerator.kind.")
    machine: str
    """The accelerator in words: cpu, v5p 4x4x8, 128 × h100."""
    chips: int
    """TPU chips or GPUs it asks for; 0 for host processors."""
    queue: str | None = Field(default=None, description="The spec's kubernetes.queue: what admits it in a cluster.")
    model: str = Field(description="The spec's model.kind.")
    factory: str | None = Field(default=None, description="The spec's model.factory, of a user's own module.")
    dataset: str = Field(description="The spec's data.dataset.")


class JobDetail(Job):
    """A job with its spec."""

    spec: dict[str, Any]
    """The JobSpec of its newest run, defaults filled in."""


class Event(View):
    """Something that happened once."""

    id: int
    """Cursor: ask for events after it."""
    job_id: str
    run_id: str | None
    time: float
    name: str
    """submitted, state_changed, cancel_requested; or a worker's: compiled, recompiled, evaluated, …"""
    actor: str
    """Who did it: a user by name (`user` where no login is asked for), scheduler or worker."""
    reason: str
    """One sentence for people."""
    data: dict[str, Any]
    """Details; of state_changed: `from` and `to`."""


class MetricPoint(View):
    """One number of one step."""

    id: int
    """Cursor: ask for points after it."""
    run_id: str
    step: int
    time: float
    name: str
    value: float | None
    """null where it is undefined or was not finite."""


class MetricSeries(View):
    """A metric of a run for a chart: one entry per bucket in each list, in order of steps.

    Buckets are `width` steps wide and begin at multiples of it; one without points is left out, which is a gap.
    """

    name: str
    width: int
    """Steps of a bucket, a power of two; 1: every point as it was reported."""
    first_steps: list[int]
    """First step of each bucket that has a point."""
    steps: list[int]
    """Last step of each bucket that has a point."""
    times: list[float]
    """Of that point, Unix seconds on the worker's clock."""
    means: list[float | None]
    """Mean of what is defined; null where nothing is."""
    lows: list[float | None]
    highs: list[float | None]
    undefined: list[int]
    """Points that are null: NaN, infinite, or an AUC of one class."""


class SeriesPage(View):
    """The series asked for; a metric that the run has no points of is left out."""

    run_id: str
    items: list[MetricSeries]


class MetricNames(View):
    """The metrics of a run."""

    run_id: str
    items: list[str]


class JobPage(View):
    """Some jobs, newest first."""

    items: list[Job]
    next_cursor: str | None = None
    """Give it as `cursor` for the next page; null on the last one."""


class EventPage(View):
    """Some events, oldest first."""

    items: list[Event]
    next_after: int
    """Give it as `after` to go on."""


class MetricPage(View):
    """Some metric points, in the order they were stored."""

    items: list[MetricPoint]
    next_after: int
    """Give it as `after` to go on."""


class LogSpan(View):
    """A stretch of a log's text that one process wrote."""

    length: int
    """Characters of the text, which follow on those of the piece before."""
    slice: int = 0
    """Slice of the process, from 0."""
    host: int | None = 0
    """Its host within the slice, from 0; null for a process that does no work itself (Ray's head, its submitter)."""
    restart: int = 0
    """Times that the run's processes had been started again before."""
    role: str = "worker"
    """worker, head, submitter; `control plane` where it says something between the lines."""
    pod: str = ""
    """Its pod; empty on a control plane's own machine."""


class LogPart(View):
    """A piece of a log."""

    offset: int
    """Byte at which the text begins."""
    next_offset: int
    """Give it as `offset` to go on; equal to `offset` where there is nothing new."""
    size: int
    """Bytes the log has now, with those that are not kept any more."""
    text: str
    """The text; it may end within a line, never within a character."""
    spans: list[LogSpan] = []
    """Whose text it is, in order."""


class HostHeard(View):
    """The newest that was heard of one host of a run in a cluster."""

    slice: int
    host: int
    pod: str = ""
    restart: int = 0
    time: float | None = None
    """Of its last line, in Unix seconds; null: nothing yet."""
    line: str = ""
    """The end of its last line."""
    ended: bool = False
    """Whether its container has ended."""


class LogFilter(View):
    """Whose lines of a log are wanted; None: everybody's."""

    slice: int | None = None
    host: int | None = None
    restart: int | None = None
