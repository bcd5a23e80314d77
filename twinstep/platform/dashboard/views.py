"""What the pages show, as plain data. `reader.py` fills these from the service; pages know nothing of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinstep.platform.dashboard.hosts import Grid
from twinstep.platform.dashboard.shares import Shares
from twinstep.spec.states import FINAL, RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLine:
    """One job in the list. Times are Unix seconds."""

    id: str
    name: str
    state: str
    reason: str = ""
    """Why the newest run is in this state, in one sentence; may be empty."""
    machine: str
    """What it asks to run on, in words: cpu, v5p 4x4x8, 128 × h100."""
    model: str
    dataset: str
    backend: str
    attempt: int = 1
    phase: str = ""
    """What the worker does now: starting, compiling, training, evaluating, done; empty before its first report."""
    step: int = 0
    total_steps: int = 0
    examples_per_s: float | None = None
    eta_s: float | None = None
    loss: float | None = None
    auc: float | None = None
    created: float
    """When it was submitted."""
    run_created: float
    """When its newest run was made."""
    started: float | None = None
    ended: float | None = None
    cancel_requested: bool = False

    @property
    def final(self) -> bool:
        """Whether nothing will change any more."""
        return RunState(self.state) in FINAL

    def seconds(self, now: float) -> float | None:
        """Seconds the newest run has taken so far, or took; None before it started."""
        if self.started is None:
            return None
        return (self.ended if self.ended is not None else now) - self.started


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLines:
    """One page of the list, newest first."""

    rows: tuple[JobLine, ...]
    next_cursor: str | None
    """Where the next page begins; None on the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLine:
    """One run of a job. Times are Unix seconds."""

    id: str
    number: int
    state: str
    reason: str
    created: float
    started: float | None
    ended: float | None
    restarts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWithRuns:
    """A job with all its runs, the newest last."""

    row: JobLine
    run_id: str
    """The newest run."""
    spec: dict[str, Any]
    spec_yaml: str
    runs: tuple[RunLine, ...]
    hosts: Grid
    """Of the newest run."""
    in_cluster: bool
    """Whether its newest run is a cluster's, not this machine's."""
    suspended: bool
    """Whether it is suspended, or somebody asked for it to be."""
    heard: float | None
    """When its worker was last heard of."""
    may_steer: bool = False
    """Whether whoever looks may cancel it, or do else to it."""
    summary: dict[str, Any] | None = None
    """RunSummary of the newest run, once it has one."""
    goodput: Shares = field(default_factory=Shares)
    """Where the newest run's time went; without parts before its first report."""

    @property
    def examples_per_step(self) -> float:
        """Training examples of one step: as the run counted them, else as many as its spec has room for."""
        if self.summary is not None and self.summary.get("steps") and self.summary.get("examples"):
            return float(self.summary["examples"]) / float(self.summary["steps"])
        data = self.spec["data"]
        return float(data["batch_size"]) * float(data["num_candidates"])


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLine:
    """Something that happened, and who did it."""

    time: float
    name: str
    reason: str
    actor: str = ""
    run_id: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPiece:
    """Part of a log: what follows `start`, and where the next part begins, in bytes."""

    text: str
    next: int
    skipped: int = 0
    """Bytes between the cursor asked for and this text, left out to keep the page small."""
    at_end: bool = True
    """Whether nothing follows at present."""
