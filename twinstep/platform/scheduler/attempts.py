"""What a user may ask of a job that is there, beside cancelling it: try it again, suspend it, go on, change its size.

Each is safe to ask again: what is so already changes nothing, and where a run is made, a key of the user's own keeps a
request that is sent twice from making two. What makes no sense is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, StrictInt

from twinstep.platform.scheduler.cluster.causes import held_back
from twinstep.platform.scheduler.explain import goes_on_from
from twinstep.platform.scheduler.runnable import check_runnable
from twinstep.platform.settings import Settings
from twinstep.platform.store.attempts import Attempts, NewAttempt
from twinstep.platform.store.records import JobDetail, Run, View
from twinstep.platform.store.store import Store
from twinstep.spec.errors import ConflictError, Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.spec.states import RunState


class Resize(View, extra="forbid"):
    """Another size of a job; what is left out stays as it is."""

    topology: str | None = Field(default=None, max_length=20)
    """Of a TPU slice: 2x2x2."""
    slices: StrictInt | None = None
    """TPU slices."""
    chips_per_host: StrictInt | None = None
    """Chips of one TPU host, where a topology comes with several."""
    gpus: StrictInt | None = None
    """GPUs in all."""
    devices: StrictInt | None = None
    """Devices of a CPU job."""
    batch_size: StrictInt | None = None
    """data.batch_size: samples per step, over all devices."""


FIELDS = {
    "topology": ("tpu", ("accelerator", "topology")),
    "slices": ("tpu", ("accelerator", "slices")),
    "chips_per_host": ("tpu", ("accelerator", "chips_per_host")),
    "gpus": ("gpu", ("accelerator", "count")),
    "devices": ("cpu", ("accelerator", "devices")),
    "batch_size": ("", ("data", "batch_size")),
}
"""What a resize may change: which accelerator it is for, and where it stands in a spec."""


HOW_ENDED = {
    RunState.SUCCEEDED: "has succeeded",
    RunState.FAILED: "has failed",
    RunState.CANCELLED: "was cancelled",
}


class Verbs:
    """Retry, suspend, resume, resize."""

    def __init__(self, store: Store, settings: Settings, *, nudge: Callable[[], None]) -> None:
        """`nudge` makes the reconcilers look at once."""
        self._store = store
        self._settings = settings
        self._nudge = nudge
        self._attempts = Attempts(store.database, changed=store.changes.bump)

    def retry(self, job_id: str, *, actor: str, key: str | None = None) -> tuple[JobDetail, bool]:
        """Run a job that failed or was cancelled again, from its last checkpoint; return it, and whether that is new.

        Raises:
            NotFoundError: no such job.
            ConflictError: it has not ended, or it has succeeded.
            SpecError: it cannot run here any more.
        """
        return self._once(job_id, {"verb": "retry"}, actor, key, self._retry)

    def _retry(self, job: JobDetail) -> NewAttempt:
        run = self._newest(job)
        if not run.is_final:
            raise ConflictError(
                f"job {job.id} has not ended: attempt {run.attempt} is {run.state}",
                remedy=f"wait for its end, or cancel it first: twinstep cancel {job.id}",
            )
        self._not_succeeded(job, "retry")
        warnings = self._runs_here(job)
        says = ", " + goes_on_from(self._store.saved_step(job.id))
        return NewAttempt(verb="retried", after=run.id, version=run.version, says=says, warnings=warnings)

    def _runs_here(self, job: JobDetail) -> tuple[str, ...]:
        """Return what speaks against the job's spec here; raise SpecError where it cannot run."""
        return check_runnable(validate_spec(job.spec, source="the job's spec"), self._settings)

    def resume(self, job_id: str, *, actor: str, key: str | None = None) -> tuple[JobDetail, bool]:
        """Let a suspended job go on, or one that failed or was cancelled, by a new run from where it came to.

        Asking it of a job that is not suspended and has not ended changes nothing.

        Raises:
            NotFoundError: no such job.
            ConflictError: it has succeeded, or is being cancelled.
            SpecError: it cannot run here any more.
        """
        return self._once(job_id, {"verb": "resume"}, actor, key, lambda job: self._resume(job, actor))

    def _resume(self, job: JobDetail, actor: str) -> NewAttempt | None:
        run = self._newest(job)
        if not run.is_final:
            self._not_cancelled(run)
            wish = self._attempts.wish(run.id, suspended=False, actor=actor)
            # Somebody may have suspended it by other means, with kubectl or as the queue's admin.
            if wish or (held_back(run.diagnosis) and self._attempts.free(run.id, actor=actor)):
                self._nudge()
            return None
        self._not_succeeded(job, "resume")
        warnings = self._runs_here(job)
        return NewAttempt(
            verb="resumed",
            warnings=warnings,
            after=run.id,
            version=run.version,
            resumed_from=run.id,
            says=f", going on from attempt {run.attempt}, " + goes_on_from(self._store.saved_step(job.id)),
        )

    def suspend(self, job_id: str, *, actor: str) -> JobDetail:
        """Give a job's nodes back until it is resumed. Asking again changes nothing.

        Raises:
            NotFoundError: no such job.
            ConflictError: it has ended, is being cancelled, or runs on this machine.
        """
        job = self._store.job(job_id)
        run = self._newest(job)
        if run.backend == "local":
            raise ConflictError(
                f"job {job_id} runs on the control plane's own machine, where no run is suspended",
                remedy=f"cancel it, and retry it later: twinstep cancel {job_id}",
            )
        if run.is_final:
            raise ConflictError(
                f"job {job_id} {HOW_ENDED[run.state]} already: there is nothing to suspend",
                remedy="nothing to do: it holds no resources any more",
            )
        self._not_cancelled(run)
        if self._attempts.wish(run.id, suspended=True, actor=actor):
            self._nudge()
        return self._store.job(job_id)

    def resize(self, job_id: str, size: Resize, *, actor: str, key: str | None = None) -> tuple[JobDetail, bool]:
        """Run a job on another number of chips: a new run with the changed spec, once the one before has stopped.

        Asking for the size it has changes nothing, as long as it has not ended.

        Raises:
            NotFoundError: no such job.
            ConflictError: it has succeeded, or is being cancelled.
            SpecError: there is no such size, or the cluster would refuse it; the job goes on as it is.
        """
        told = size.model_dump(exclude_none=True)
        return self._once(job_id, {"verb": "resize", **told}, actor, key, lambda job: self._resize(job, told))

    def _resize(self, job: JobDetail, told: dict[str, Any]) -> NewAttempt | None:
        run = self._newest(job)
        self._not_succeeded(job, "resize")
        spec = resized(job.spec, told)
        warnings = check_runnable(spec, self._settings)
        body = spec.model_dump(mode="json")
        if body == job.spec and not run.is_final:
            return None
        if not run.is_final:
            self._not_cancelled(run)
        return NewAttempt(
            verb="resized",
            warnings=warnings,
            after=run.id,
            version=run.version,
            spec=body,
            resumed_from=run.id,
            says=" with " + ", ".join(f"{name} {value}" for name, value in told.items()),
        )

    def _once(
        self,
        job_id: str,
        asked: dict[str, Any],
        actor: str,
        key: str | None,
        decide: Callable[[JobDetail], NewAttempt | None],
    ) -> tuple[JobDetail, bool]:
        """Make the run that `decide` says there is to be, unless this request has made it before.

        Two that ask at once with one key both get the one run: who is late sees a job that does not fit any more.
        """
        job = self._store.job(job_id)

        def known() -> bool:
            return key is not None and self._attempts.known(job_id, actor=actor, key=key, asked=asked)

        if known():
            return job, False
        try:
            wanted = decide(job)
            new = wanted is not None and self._attempts.add(job_id, wanted, actor=actor, key=key, asked=asked)
        except ConflictError:
            if not known():
                raise
            new = False
        if new:
            self._nudge()
        return self._store.job(job_id), new

    def _newest(self, job: JobDetail) -> Run:
        return self._store.run(job.run_id)

    def _not_succeeded(self, job: JobDetail, verb: str) -> None:
        if job.state is RunState.SUCCEEDED:
            raise ConflictError(
                f"job {job.id} has succeeded: there is nothing to {verb}", remedy="submit its spec again to run it anew"
            )

    def _not_cancelled(self, run: Run) -> None:
        if run.cancel_requested_at is not None:
            raise ConflictError(
                f"attempt {run.attempt} of job {run.job_id} is being cancelled",
                remedy=f"wait for its end, then: twinstep retry {run.job_id}",
            )


def resized(spec: dict[str, Any], told: dict[str, Any]) -> JobSpec:
    """Return a spec of another size.

    Raises:
        SpecError: nothing is told, what is told is not for its accelerator, or there is no such size.
    """
    kind = spec["accelerator"]["kind"]
    foreign = [name for name in told if FIELDS[name][0] not in ("", kind)]
    if foreign or not told:
        names = [name for name, (only, _) in FIELDS.items() if only in ("", kind)]
        faults = tuple(
            Fault(field=name, problem=f"is not for a job on {kind}", given=str(told[name]), allowed=", ".join(names))
            for name in foreign
        )
        what = ", ".join(foreign) if foreign else "no field is given"
        raise SpecError(f"the resize is not valid: {what}", remedy=f"give {', '.join(names)}", faults=faults)
    changed: dict[str, Any] = {**spec, "accelerator": dict(spec["accelerator"]), "data": dict(spec["data"])}
    if "topology" in told and "chips_per_host" not in told:
        changed["accelerator"]["chips_per_host"] = None  # what fitted the old one
    for name, value in told.items():
        part, field = FIELDS[name][1]
        changed[part][field] = value
    return validate_spec(changed, source="the resized spec")
