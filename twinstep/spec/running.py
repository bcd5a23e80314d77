"""How closely a run is looked at, and within which bounds it runs: the parts `debug` and `runtime` of a JobSpec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from twinstep.spec.base import INT32_MAX, Number, Spec


class ProfileSpec(Spec):
    """Steps of which a trace is written into the run's directory."""

    start: Annotated[StrictInt, Field(ge=1, le=INT32_MAX)] = 10
    """First step that is traced, counted from 1; the first few compile."""
    steps: Annotated[StrictInt, Field(ge=1, le=100)] = 5
    """Steps that are traced; a trace grows with each."""

    @property
    def last(self) -> int:
        """The last step that is traced."""
        return self.start + self.steps - 1


class DebugSpec(Spec):
    """Switches for looking closer."""

    stop_on_nonfinite: StrictBool = True
    """Fail the run when a number of a batch, or a loss, is NaN or infinite, naming the field or the step."""
    save_graph: StrictBool = False
    """Write the captured graph as text beside the run's files."""
    preflight: Literal["refuse", "warn"] = "refuse"
    """What becomes of a job that does not fit its accelerator by the model of `twinstep preflight`: it is refused, or
    let go with a warning."""
    profile: ProfileSpec | None = None
    """Trace some steps, and say what their time went to; null: none."""


class RuntimeSpec(Spec):
    """Where and within which bounds the worker runs."""

    threads: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """CPU threads of a process; null: an even part of the processors it may run on, all of them where it is alone."""
    processes: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Processes on this machine that a cpu job's batch and tables are divided over, for embedding.engine torchrec."""
    peer_seconds: Annotated[Number, Field(ge=1)] = 600.0
    """Seconds that one process waits for another, a compile of the other's included, before it gives the run up."""
    max_seconds: Annotated[Number, Field(gt=0)] | None = None
    """Wall-clock limit of a run, in seconds; null: none."""
    max_wait_seconds: Annotated[Number, Field(gt=0)] | None = None
    """Limit of a wait in a queue, in seconds: a run that is not started by then fails, and leaves it; null: none."""
    stop_grace_seconds: Annotated[Number, Field(gt=0, le=3600)] = 10.0
    """Seconds between asking a worker to stop and killing it: time to save a checkpoint."""
    restarts: Annotated[StrictInt, Field(ge=0, le=100)] = 0
    """Times that a worker on this machine is started again after it was killed, hung or failed."""
    hang_seconds: Annotated[Number, Field(gt=0)] | None = None
    """A worker on this machine that ends no training step for so long counts as hung, and is stopped; null: never."""
