"""Make the runs that exist agree with the runs that are wanted: load, decide, apply; again and again.

One thread of the control plane. What goes wrong with one run is told of and tried again at the next pass; the others
go on. Nothing waits for a process or a file inside a transaction.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import ValidationError

from twinstep.platform.logs import about
from twinstep.platform.scheduler.decide import Action, Do, Seen, Sight, Wanted, decide
from twinstep.platform.scheduler.local import LocalBackend
from twinstep.platform.scheduler.passes import Passes, trouble_with
from twinstep.platform.store.records import Run
from twinstep.platform.store.store import Store
from twinstep.spec.job import JobSpec
from twinstep.spec.module import ModuleSpec
from twinstep.spec.running import RuntimeSpec
from twinstep.spec.states import ACTIVE, RunState

GONE_S = 300.0  # a run that another control plane was asked to stop so long ago, and that is silent, has nobody
SILENCE_S = 5.0  # a worker that was not heard of for so long may not reach us: what it spooled is read instead
ACTOR = "scheduler"
_UNSEEN = Sight(seen=Seen.ABSENT)  # of a run that waits nothing is to be seen, however long the queue


@dataclass(slots=True)
class _Spool:
    """How far the spool of a run was read, in bytes."""

    size: int = -1
    """What it had when it was last looked at."""
    offset: int = 0
    """Everything before it is stored."""


class _Asks(NamedTuple):
    """What the spec of a run that waits says of its start."""

    max_wait_seconds: float | None
    own_code: bool
    """Its model is code of its submitter's own."""


class Reconciler(Passes):
    """The loop over the runs of this machine, and one pass of it."""

    def __init__(
        self,
        store: Store,
        backend: LocalBackend,
        *,
        max_parallel_runs: int,
        runs_modules: bool,
        every_seconds: float,
    ) -> None:
        """`runs_modules` says whether jobs of their submitters' own code are started here; see Settings."""
        super().__init__("reconciler", every_seconds=every_seconds)
        self._store = store
        self._backend = backend
        self._slots = max_parallel_runs
        self._runs_modules = runs_modules
        self._spools: dict[str, _Spool] = {}
        """Per live run; lost at a restart, after which a spool is read from its beginning once more."""
        self._asks: dict[str, _Asks] = {}
        """Of each run that waits; a run's spec never changes."""
        self._waits_since: dict[str, float] = {}
        """Since when this process has seen each of them wait, of a clock that nobody sets: neither that nor a time
        without a control plane, in which nothing could start, ends a wait."""

    def run_once(self) -> None:
        """Look at every run that is not final, and do the one thing each needs."""
        everybodys = self._store.live_runs(backend="local")
        runs = [run for run in everybodys if self._ours(run)]
        held, now = sum(run.state in ACTIVE for run in runs), time.monotonic()
        waiting = {run.id for run in runs if run.state not in ACTIVE}
        self._waits_since = {run_id: self._waits_since.get(run_id, now) for run_id in waiting}
        self._asks = {run_id: asks for run_id, asks in self._asks.items() if run_id in waiting}
        # Of all control planes: each says the same of a run that waits for any of them.
        ahead, told = sum(run.state in ACTIVE for run in everybodys), []
        holders = {run.job_id for run in everybodys if run.state in ACTIVE}
        """Jobs with a run that has not ended, here or elsewhere: two runs of one would write the same checkpoints."""
        for run in runs:
            with about(run_id=run.id, job_id=run.job_id):
                try:
                    if run.state in ACTIVE:
                        self._look_after(run)
                        continue
                    asks = self._asked_by(run)
                    barred = asks.own_code and not self._runs_modules
                    slot_free = held < self._slots and run.job_id not in holders and not barred
                    wanted = replace(
                        _wanted(run, slot_free=slot_free, ahead=ahead),
                        waited_seconds=now - self._waits_since[run.id],
                        max_wait_seconds=asks.max_wait_seconds,
                        barred=barred,
                    )
                    action = decide(wanted, _UNSEEN)
                    ahead += 1
                    if action.do is Do.KEEP:
                        continue
                    if action.do is Do.EXPLAIN:
                        told.append((run, action.reason))
                        continue
                    self._apply(run, action, _UNSEEN, self._spec(run))
                    if action.do is Do.START:
                        held += 1
                        holders.add(run.job_id)
                except Exception as error:
                    told.append((run, trouble_with(run.id, error)))
                    # It may have come as far as that before it went wrong.
                    if run.state not in ACTIVE and self._store.run(run.id).state in ACTIVE:
                        held += 1
                        holders.add(run.job_id)
        self._store.set_reasons([(run, reason) for run, reason in told if run.reason != reason])
        self.passed()

    def _ours(self, run: Run) -> bool:
        """Say whether a run is this control plane's to look after: one that waits is anybody's.

        One of a control plane that is gone is given up when somebody asks for that, as nobody else ever would.
        """
        if run.home in (None, self._backend.home()) or run.state not in ACTIVE:
            return True
        asked, now = run.cancel_requested_at, time.time()
        if asked is not None and min(now - asked, now - (run.heartbeat_at or asked)) > GONE_S:
            reason = "cancelled; the control plane that started it has not stopped it, and its worker is silent"
            self._move(run, RunState.CANCELLED, reason)
        return False

    def _look_after(self, run: Run) -> None:
        spec = self._spec(run)
        sight = self._backend.observe(run.id)
        wanted = replace(_wanted(run, spec=spec), barred=_own_code(spec) and not self._runs_modules)
        self._apply(run, decide(wanted, sight), sight, spec)

    def _asked_by(self, run: Run) -> _Asks:
        """Return what a waiting run's spec asks, which is read once."""
        if run.id not in self._asks:
            spec = self._spec(run)
            self._asks[run.id] = _Asks(None if spec is None else spec.runtime.max_wait_seconds, _own_code(spec))
        return self._asks[run.id]

    def _spec(self, run: Run) -> JobSpec | None:
        """Return a run's spec; None where an older or newer version wrote it, and this one cannot read it."""
        try:
            return JobSpec.model_validate(self._store.job(run.job_id).spec)
        except ValidationError:
            return None

    def _apply(self, run: Run, action: Action, sight: Sight, spec: JobSpec | None) -> None:
        match action.do:
            case Do.START | Do.LAUNCH | Do.FORBID if spec is None:
                self._finish(run, RunState.FAILED, "its spec is not one this version of Twinstep can read", sight)
            case Do.KEEP:
                if sight.seen is Seen.ALIVE:
                    self._catch_up(run)
            case Do.ENQUEUE:
                if self._move(run, RunState.QUEUED, action.reason):
                    self.nudge()  # a free slot takes it at the next pass, which need not wait
            case Do.START if spec is not None:
                token_hash = self._backend.prepare(run.id, spec)
                reason, home = "its worker is being started", self._backend.home()
                if self._move(run, RunState.STARTING, reason, token_hash=token_hash, home=home):
                    self._backend.launch(run.id, spec, job_id=run.job_id, attempt=run.attempt)
            case Do.LAUNCH if spec is not None:
                self._backend.launch(run.id, spec, job_id=run.job_id, attempt=run.attempt)
            case Do.STOP:
                self._backend.stop(run.id)
            case Do.FORBID if spec is not None:
                self._backend.forbid(run.id, spec)
                self.nudge()
            case Do.FINISH if action.to is not None:
                self._finish(run, action.to, action.reason, sight)

    def _finish(self, run: Run, to: RunState, reason: str, sight: Sight) -> None:
        if sight.seen is Seen.VANISHED:
            self._backend.sweep(run.id)
        started = run.state in ACTIVE
        if started:
            for records, _ in self._backend.spool(run.id, after=run.acked_seq, offset=self._spool(run.id).offset):
                self._store.ingest(run.id, records, skip_gaps=True)
        if to is RunState.FAILED and started and sight.stopped is None and (line := self._backend.last_line(run.id)):
            reason = f"{reason}: {line}"
        # Reports may have moved it since it was loaded (starting → running), and that is no reason to wait.
        now = self._store.run(run.id)
        if self._store.move(run.id, to=to, if_version=now.version, reason=reason, actor=ACTOR):
            self._backend.forget(run.id)
            self._spools.pop(run.id, None)
            self.nudge()

    def _catch_up(self, run: Run) -> None:
        """Read the spool of a worker that runs and is silent: it may look for us at an address we no longer have."""
        size, spool = self._backend.spool_size(run.id), self._spool(run.id)
        heard = run.heartbeat_at or run.started_at or run.created_at
        if time.time() - heard <= SILENCE_S or spool.size == size:
            return
        spool.size = size
        for records, offset in self._backend.spool(run.id, after=run.acked_seq, offset=spool.offset):
            # At a gap the rest waits: its worker may still send what is missing, and else the end skips it.
            if records and self._store.ingest(run.id, records).acked < records[-1].seq:
                return
            spool.offset = offset

    def _spool(self, run_id: str) -> _Spool:
        return self._spools.setdefault(run_id, _Spool())

    def _move(
        self, run: Run, to: RunState, reason: str, *, token_hash: str | None = None, home: str | None = None
    ) -> bool:
        return self._store.move(
            run.id,
            to=to,
            if_version=run.version,
            reason=reason,
            actor=ACTOR,
            token_hash=token_hash,
            home=home,
        )


def _own_code(spec: JobSpec | None) -> bool:
    return spec is not None and isinstance(spec.model, ModuleSpec)


def _wanted(run: Run, *, spec: JobSpec | None = None, slot_free: bool = False, ahead: int = 0) -> Wanted:
    runtime = spec.runtime if spec else RuntimeSpec()
    return Wanted(
        state=run.state,
        cancel_requested_at=run.cancel_requested_at,
        slot_free=slot_free,
        ahead=ahead,
        max_seconds=runtime.max_seconds,
        stop_grace_seconds=runtime.stop_grace_seconds,
    )
