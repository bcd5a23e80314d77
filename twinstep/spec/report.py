"""What a worker reports: records numbered per run, sent in batches, stored exactly once.

A worker appends each record to its spool file (one JSON line each) before anything is sent, so a control plane that
is away loses nothing. `seq` counts from 1 within a run without gaps; the receiver stores a record iff its `seq` is
the next one it has not seen, and answers with the highest it holds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_RECORDS_PER_POST = 1000
MAX_COUNT = 2**53 - 1  # the largest whole number that JSON readers agree on; databases hold it too
MAX_TEXT = 4096  # characters; a reason or message longer than this is cut by the worker

MAX_TIME = 1e11  # Unix seconds: the year 5138, which calendars still know
UnixTime = Annotated[float, Field(ge=0, le=MAX_TIME, allow_inf_nan=False)]

TIME_PARTS = ("step", "input_wait", "compile", "checkpoint", "evaluate", "restart", "redone", "start", "other")
"""What a run's wall time goes to; `step` is what is useful. `restart`: from the checkpoint that an attempt goes on from
to its own start; `start`: from there to its first batch; `redone`: steps that dropped batches made vain or be done
again; `other`: reports, and whatever nothing else names."""

PROFILE_PARTS = ("tensorcore", "sparsecore", "compute", "collectives", "host_input", "idle")
"""What the time of traced steps goes to: each moment counts for the first of these that does something in it. `compute`
stands for both kinds of cores where the machine is no TPU."""

_FROZEN = ConfigDict(frozen=True, extra="ignore")  # newer workers may say more than an older control plane knows


class MetricRecord(BaseModel):
    """Numbers of one step. A value that is undefined (AUC of one class) or not finite is null."""

    model_config = _FROZEN
    kind: Literal["metric"] = "metric"
    seq: int = Field(ge=1, le=MAX_COUNT)
    time: UnixTime = Field(description="Unix seconds on the worker's clock")
    step: int = Field(ge=0, le=MAX_COUNT)
    values: dict[str, float | None]


class EventRecord(BaseModel):
    """Something that happened once: a compile, a recompile, an evaluation, the end."""

    model_config = _FROZEN
    kind: Literal["event"] = "event"
    seq: int = Field(ge=1, le=MAX_COUNT)
    time: UnixTime
    name: str = Field(max_length=64, description="snake_case: compiled, recompiled, evaluated, stopped")
    reason: str = Field(max_length=MAX_TEXT, description="one sentence for people")
    data: dict[str, Any] = Field(default_factory=dict)


class ProgressRecord(BaseModel):
    """Heartbeat: where the worker is now. Only the newest one counts."""

    model_config = _FROZEN
    kind: Literal["progress"] = "progress"
    seq: int = Field(ge=1, le=MAX_COUNT)
    time: UnixTime
    phase: Literal["starting", "compiling", "training", "evaluating", "done"]
    step: int = Field(ge=0, le=MAX_COUNT)
    total_steps: int = Field(ge=0, le=MAX_COUNT)
    examples_per_s: float | None = None
    eta_s: float | None = Field(default=None, description="seconds to the last step, compile not counted")
    tokens_per_s: float | None = Field(default=None, description="history tokens that fill a slot, a second, lately")
    goodput: float | None = Field(default=None, description="useful step time over wall time so far, all attempts")
    chip_hours: float | None = Field(default=None, description="chips (devices on a CPU) × hours of wall time so far")
    time_s: dict[str, float | None] = Field(
        default_factory=dict, description="wall seconds so far by what they went to: step, input_wait, compile, …"
    )


class ResultRecord(BaseModel):
    """Summary of a finished run; see `RunSummary` for its keys."""

    model_config = _FROZEN
    kind: Literal["result"] = "result"
    seq: int = Field(ge=1, le=MAX_COUNT)
    time: UnixTime
    summary: RunSummary


class BaselineScore(BaseModel):
    """Held-out score of a model without parameters."""

    model_config = _FROZEN
    auc: float | None


class RunSummary(BaseModel):
    """What a finished run says of itself."""

    model_config = _FROZEN
    backend: str
    steps: int
    examples: int = Field(description="training examples (candidates with weight > 0) consumed")
    examples_per_s: float = Field(
        description="over whole iterations: waiting for data and reporting counted, compiling and evaluating not"
    )
    tokens: int | None = Field(default=None, description="history tokens that filled a slot")
    tokens_per_s: float | None = Field(default=None, description="history tokens a second, over the same iterations")
    compile_s: float = Field(description="seconds spent capturing and lowering, all compiles together")
    train_s: float = Field(description="seconds of all iterations; compiling and evaluating not counted")
    eval_s: float
    final_loss: float | None
    auc: float | None = Field(description="held-out AUC of the first task; null where only one class was seen")
    ne: float | None = Field(description="held-out normalised entropy of the first task")
    eval_examples: int
    baselines: dict[str, BaselineScore] = Field(default_factory=dict)
    parameters: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    goodput: float | None = Field(default=None, description="useful step time over wall time, all attempts together")
    chip_hours: float | None = Field(default=None, description="chips (devices on a CPU) × hours of wall time")
    time_s: dict[str, float] = Field(
        default_factory=dict, description="wall seconds by what they went to: step, input_wait, compile, checkpoint, …"
    )


Record = Annotated[MetricRecord | EventRecord | ProgressRecord | ResultRecord, Field(discriminator="kind")]


class ReportBatch(BaseModel):
    """Body of `POST /v1/runs/{run_id}/reports`."""

    model_config = _FROZEN
    records: list[Record] = Field(max_length=MAX_RECORDS_PER_POST)


class ReportAck(BaseModel):
    """Answer to a batch."""

    model_config = _FROZEN
    acked: int = Field(description="every record up to this seq is stored; send from the next one on")


ResultRecord.model_rebuild()
