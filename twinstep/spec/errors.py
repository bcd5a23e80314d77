"""One tree of errors; each says what is wrong, where, what was given, what is allowed and what to do.

    TwinstepError
    ├── SpecError            a job spec, or a file that should hold one, is not valid
    ├── DataError            a dataset is missing, or a row of it breaks its format
    ├── CompileError         a step cannot be captured or lowered
    │   └── CaptureError     the user's step does what one graph cannot hold
    ├── TrainError           a run cannot go on (a loss that is not finite, say)
    │   └── PeerLostError    another process of the run is gone, or does not answer
    ├── StateError           a move that the table of states does not know
    ├── NotFoundError        no job, run or page of that name
    ├── ConflictError        the request does not fit the state a thing is in
    ├── AuthError            a token is missing or wrong
    ├── ForbiddenError       the token is right, and what it allows does not reach so far
    └── UnavailableError     a port, a directory or the control plane cannot be used

`assert` stays for Twinstep's own bugs; whatever a user can cause is one of these. ToldToStop is no error: by it a
signal ends what goes on, and whoever catches SystemExit of somebody's code lets it through.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is wrong, named by field."""

    field: str
    """Dotted path of the field, as the user wrote it: `data.batch_size`."""
    problem: str
    """What is wrong, in one sentence without a full stop."""
    given: str = ""
    """What was given, as it was written, cut to 120 characters; empty where nothing was given."""
    allowed: str = ""
    """What is allowed: a range, a list, a form."""
    remedy: str = ""
    """What to do, the nearest valid value first."""

    def line(self) -> str:
        """Return the fault as one line for a terminal."""
        parts = [f"{self.field}: {self.problem}" if self.field else self.problem]
        if self.given:
            parts.append(f"given: {self.given}")
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.remedy:
            parts.append(f"fix: {self.remedy}")
        return "; ".join(parts)


class TwinstepError(Exception):
    """Root of the tree. `problem` says what is wrong, `remedy` what to do about it."""

    code = "error"
    """Machine name of the kind: stable, used in problem details and in `--json` output."""

    def __init__(self, problem: str, *, remedy: str, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.faults = faults

    def __str__(self) -> str:
        return f"{self.problem} (fix: {self.remedy})" if self.remedy else self.problem


class SpecError(TwinstepError):
    """A job spec is not valid; `faults` names each field."""

    code = "invalid_spec"


class DataError(TwinstepError):
    """A dataset is missing, or a row of it breaks its format."""

    code = "invalid_data"


class CompileError(TwinstepError):
    """A step cannot be compiled."""

    code = "compile_failed"


class CaptureError(CompileError):
    """The user's step does what one graph cannot hold: control flow on data, for one."""

    code = "capture_failed"


class TrainError(TwinstepError):
    """A run cannot go on."""

    code = "train_failed"


class PeerLostError(TrainError):
    """Another process of the run is gone, or did not answer in time."""

    code = "peer_lost"


class StateError(TwinstepError):
    """A move between states that the table does not know."""

    code = "invalid_move"


class NotFoundError(TwinstepError):
    """No such job, run or page."""

    code = "not_found"


class ConflictError(TwinstepError):
    """The request does not fit the state a thing is in."""

    code = "conflict"


class AuthError(TwinstepError):
    """A token is missing or wrong."""

    code = "unauthorized"


class ForbiddenError(TwinstepError):
    """Who asks is known, and may not do this."""

    code = "forbidden"


class UnavailableError(TwinstepError):
    """A port, a directory or the control plane cannot be used."""

    code = "unavailable"


class ToldToStop(SystemExit):
    """A signal told this process to stop; a plain SystemExit is of code that ends the process by itself."""
