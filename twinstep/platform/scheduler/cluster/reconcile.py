"""Make the runs in a cluster agree with the runs that are wanted: load, look, decide, act; again and again.

One thread of the control plane that leads. A pass asks the store once and writes what has changed. What goes wrong
with one run is told of on the run and tried again later; the others go on.

A launch survives a crash anywhere: the token's hash and the workload's name are stored, then the objects are sent,
then the workload's uid is stored. Who finds a name without a uid asks the cluster, and adopts or sends again.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from twinstep.platform.logs import about
from twinstep.platform.scheduler.cluster.beside import Beside
from twinstep.platform.scheduler.cluster.decide import (
    ClusterAction,
    ClusterDo,
    ClusterSight,
    ClusterWanted,
    Sent,
    decide_cluster,
    path_to,
)
from twinstep.platform.scheduler.cluster.diagnose import diagnose, words_of
from twinstep.platform.scheduler.cluster.evidence import Evidence
from twinstep.platform.scheduler.cluster.lease import uptime
from twinstep.platform.scheduler.cluster.patience import Patience
from twinstep.platform.scheduler.cluster.port import Cluster, WorkloadRef
from twinstep.platform.scheduler.cluster.status import Finding, find, is_suspended
from twinstep.platform.scheduler.passes import Passes, trouble_with
from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.platform.scheduler.rundir import hash_token
from twinstep.platform.store.cluster_runs import ClusterRun, ClusterRuns, Remark
from twinstep.platform.store.moves import Move
from twinstep.platform.store.records import Diagnosis, Workload
from twinstep.spec.errors import ConflictError, NotFoundError, SpecError, TwinstepError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.states import ACTIVE, FINAL, RunState

log = logging.getLogger(__name__)

CONFLICT_S = 600.0  # a name that is taken for so long is not on its way out
SETTLE_S = 3.0  # the mirror hears of what was just sent within that; asking before is in vain
DELETE_AGAIN_S = 15.0
PASS_S = 5.0  # a pass that sends for longer goes on at the next one, so that others are looked at meanwhile
SWEEP_S = 60.0  # between two looks for workloads whose runs have ended
TOGETHER = 100  # moves that one transaction holds at most: other writers wait for it
TOGETHER_S = 0.5  # a move waits for others that long
MAX_IN_A_ROW = 3  # failures to reach the API server after which a pass asks no more
JUMP_S = 10.0  # a clock that is set by less does no harm
CONFLICT = "conflict"
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """What every run's objects are rendered with."""

    image: str | None = None
    """Where a spec names none."""
    api_url: str | None = None
    """Where workers report."""


@dataclass(slots=True)
class _Pass:
    """What one pass has come to."""

    until: float
    before: dict[str, int]
    """The earliest live attempt of each job."""
    failures: int = 0
    """To reach the API server, in a row."""
    trouble: str = ""
    left: bool = False
    """Something was left for the next pass."""
    moves: list[tuple[ClusterRun, Move]] = field(default_factory=list)
    """Decided on, and not yet written."""
    since: float = 0.0
    """When the first of them was."""
    remarks: list[Remark] = field(default_factory=list)


class ClusterReconciler(Passes):
    """The loop over the runs of a cluster, and one pass of it."""

    def __init__(
        self,
        runs: ClusterRuns,
        cluster: Cluster,
        *,
        workers: Workers,
        every_seconds: float,
        leads: Callable[[], bool] = lambda: True,
        drain: Callable[[str], object] = lambda run_id: None,
        patience: Patience | None = None,
    ) -> None:
        """`leads` says whether this control plane is the one to act; one that is not looks at nothing.

        `drain` reads a run's logs up to now, before it is called ended.
        """
        super().__init__("cluster-reconciler", every_seconds=every_seconds, pause_seconds=min(0.1, every_seconds))
        self._runs = runs
        self._cluster = cluster
        self._workers = workers
        self._leads = leads
        self._drain = drain
        self._patience = patience or Patience()
        self._beside = Beside(cluster)
        self._clocks = (time.time(), uptime())
        self._swept_at = 0.0
        self._specs: dict[str, dict[str, Any]] = {}
        """Of live runs; a run's spec never changes."""

    def run_once(self) -> None:
        """Look at every live run of the cluster, and do the one thing each needs."""
        jump = self._jump()
        if not self._leads():
            self._patience.keep_only(())
            self.passed()
            return
        if jump:
            log.warning(
                "the clock was set %s by %.0f s; runs go on as they were", "ahead" if jump > 0 else "back", jump
            )
            self._runs.clock_jumped(jump)
        live = self._runs.live()
        ids = {run.id for run in live}
        self._patience.keep_only(ids)
        self._specs = {run_id: spec for run_id, spec in self._specs.items() if run_id in ids}
        now = _Pass(until=time.monotonic() + PASS_S, before={})
        for run in live:
            now.before[run.job_id] = min(run.attempt, now.before.get(run.job_id, run.attempt))
        for run in live:
            if self._leads() and (remark := self._guarded(run, now)) is not None:
                now.remarks.append(remark)
            if len(now.moves) >= TOGETHER or (now.moves and time.monotonic() - now.since > TOGETHER_S):
                self._write_moves(now)
        self._write_moves(now)
        self._runs.remark(now.remarks)
        self._beside.see_to(until=now.until if now.failures == 0 else 0.0)
        self._sweep(ids)
        if now.left:
            self.nudge()
        self.passed()

    def _jump(self) -> float:
        """Return by how many seconds the clock was set since the last pass; 0.0 where it was not."""
        wall, steady = time.time(), uptime()
        before, self._clocks = self._clocks, (wall, steady)
        jump = (wall - before[0]) - (steady - before[1])
        return jump if abs(jump) > JUMP_S else 0.0

    def _guarded(self, run: ClusterRun, now: _Pass) -> Remark | None:
        with about(run_id=run.id, job_id=run.job_id):
            try:
                return self._look_after(run, now)
            except Exception as error:
                return _remark(run, trouble_with(run.id, error), run.restarts, run.diagnosis)

    def _sweep(self, live: set[str]) -> None:
        """Delete workloads that go on though their runs have ended: who sent them was killed before it could say so.

        A run that this store does not know is another control plane's.
        """
        if time.monotonic() - self._swept_at < SWEEP_S:
            return
        self._swept_at = time.monotonic()
        left = {run_id: ref for run_id, ref in self._cluster.workloads().items() if run_id not in live}
        going = {run_id: ref for run_id, ref in left.items() if self._goes_on(self._cluster.look(run_id, ref))}
        ends = time.monotonic() + PASS_S
        for run_id in self._runs.ended(list(going)) if going else ():
            ref = going[run_id]
            try:
                if self._goes_on(self._cluster.confirm(run_id, ref)):
                    log.warning("%s has ended, and its %s %s goes on: it is deleted", run_id, ref.kind, ref.name)
                    self._cluster.delete(run_id, ref)
            except Exception as error:
                trouble_with(run_id, error)  # the next look finds it again
            if time.monotonic() > ends:
                return

    @staticmethod
    def _goes_on(seen: Evidence | None) -> bool:
        """Say whether a workload is there, has not come to its end, and is not on its way out."""
        if seen is None or seen.workload is None or seen.workload["metadata"].get("deletionTimestamp"):
            return False
        return find(seen, asked_to_stop=False).state not in FINAL

    def _look_after(self, run: ClusterRun, now: _Pass) -> Remark | None:
        wanted = self._wanted(run, now)
        evidence = None if run.cluster is None else self._cluster.look(run.id, _ref(run.cluster))
        finding = None if evidence is None else _find(evidence, run)
        action = decide_cluster(wanted, None if finding is None else _sight(evidence, finding))
        if action.do is ClusterDo.CONFIRM and run.cluster is not None:
            ref = _ref(run.cluster)
            seen, told = self._ask(run, action.do, now, lambda: self._cluster.confirm(run.id, ref))
            if seen is None:
                return told
            if seen.workload is not None:
                # The mirror does not have it, and may never (a webhook strips its labels): not at each pass.
                self._patience.hold(run.id, action.do, SETTLE_S)
            evidence, finding = seen, _find(seen, run)
            action = decide_cluster(wanted, _sight(seen, finding, confirmed=True))
        diagnosis = run.diagnosis
        if evidence is not None and finding is not None:
            diagnosis = diagnose(evidence, finding, before=run.diagnosis)
        if action.do is ClusterDo.SAY and action.to is not None and run.cluster is not None:  # it goes on as it is
            self._beside.stands(run.id, _ref(run.cluster), lambda: self._rendered(run).objects)
        return self._act(run, action, evidence, diagnosis, now)

    def _wanted(self, run: ClusterRun, now: _Pass) -> ClusterWanted:
        clock = time.time()
        active = run.active_seconds + (0.0 if run.active_since is None else max(0.0, clock - run.active_since))
        first, limits = now.before[run.job_id], self._spec(run).get("runtime", {})
        heard = max(run.heartbeat_at or 0.0, run.active_since or clock)
        return ClusterWanted(
            state=run.state,
            sent=Sent.NOTHING if run.cluster is None else Sent.SURE if run.cluster.uid else Sent.MAYBE,
            reason=run.reason,
            cancel=run.cancel_requested_at is not None,
            suspend=run.suspend_requested_at is not None,
            suspended=run.suspended_at is not None,
            restarts=run.restarts,
            before=first if first < run.attempt else None,
            active_seconds=active,
            max_seconds=limits.get("max_seconds") if run.state in ACTIVE else None,
            waited_seconds=0.0 if run.waiting_since is None else max(0.0, clock - run.waiting_since),
            max_wait_seconds=limits.get("max_wait_seconds"),
            silent_seconds=None if self._workers.api_url is None else clock - heard,
            reported=run.heartbeat_at is not None,
            met=run.phase not in (None, "starting"),
        )

    def _spec(self, run: ClusterRun) -> dict[str, Any]:
        if run.id not in self._specs:
            self._specs[run.id] = self._runs.spec(run.id)
        return self._specs[run.id]

    # ---- acting ----

    def _act(
        self,
        run: ClusterRun,
        action: ClusterAction,
        evidence: Evidence | None,
        diagnosis: dict[str, Any] | None,
        now: _Pass,
    ) -> Remark | None:
        ref = None if run.cluster is None else _ref(run.cluster)
        match action.do:
            case ClusterDo.LAUNCH:
                return self._launch(run, now)
            case ClusterDo.ADOPT if evidence is not None and evidence.workload is not None and run.cluster is not None:
                return self._finish_launch(run, run.cluster, evidence.workload["metadata"]["uid"], now)
            case ClusterDo.DELETE if ref is not None:
                asked, told = self._ask(run, action.do, now, lambda: self._cluster.delete(run.id, ref))
                if asked is not None:
                    self._patience.hold(run.id, action.do, DELETE_AGAIN_S)
                    self._patience.worked(run.id, ClusterDo.CONFIRM)  # from here on it may be gone at any time
                    self.nudge()
                return told or _remark(run, action.reason, action.restarts, diagnosis)
            case ClusterDo.SUSPEND | ClusterDo.UNSUSPEND if ref is not None:
                return self._suspend(run, action.do, ref, now)
            case ClusterDo.SAY:
                return _remark(run, action.reason, action.restarts, diagnosis)
            case ClusterDo.MOVE if action.to is not None:
                return self._move(run, action, action.to, diagnosis, now)
        return None

    def _waits(self, run: ClusterRun, do: ClusterDo, now: _Pass) -> bool:
        """Say whether the API server is not to be asked now.

        The last failure was a moment ago, it is known not to answer, or this pass has taken long enough.
        """
        if now.failures < MAX_IN_A_ROW and not self._patience.waits(run.id, do) and time.monotonic() > now.until:
            now.left = True
            return True
        return now.failures >= MAX_IN_A_ROW or self._patience.waits(run.id, do)

    def _ask(
        self, run: ClusterRun, do: ClusterDo, now: _Pass, ask: Callable[[], Answer]
    ) -> tuple[Answer | None, Remark | None]:
        """Ask the API server; return its answer, or None and what is to be said of the run where there is none."""
        if self._waits(run, do, now):
            told = now.failures >= MAX_IN_A_ROW
            return None, _remark(run, now.trouble, run.restarts, run.diagnosis) if told else None
        try:
            answer = ask()
        except UnavailableError as error:
            self._patience.failed(run.id, do)
            now.failures, now.trouble = now.failures + 1, trouble_with(run.id, error)
            return None, _remark(run, now.trouble, run.restarts, run.diagnosis)
        now.failures = 0
        self._patience.worked(run.id, do)
        return answer, None

    def _launch(self, run: ClusterRun, now: _Pass) -> Remark | None:
        """Send a run's objects. The order is what lets it crash anywhere; see above."""
        if self._waits(run, ClusterDo.LAUNCH, now):
            return self._ask(run, ClusterDo.LAUNCH, now, lambda: None)[1]
        try:
            rendered = self._rendered(run)
        except (SpecError, ValidationError) as error:
            why = error.problem if isinstance(error, SpecError) else "its spec is not one this version can read"
            self._runs.advance(run, path_to(run.state, RunState.FAILED), reason=f"it cannot be started: {why}")
            return None
        token = None if self._workers.api_url is None else secrets.token_urlsafe(32)
        planned = Workload(kind=rendered.workload["kind"], namespace=rendered.namespace, name=rendered.name)
        hashed, reason = hash_token(token or ""), "is handed to the cluster"
        version = self._runs.begin_launch(run, planned, token_hash=hashed, reason=reason)
        if version is None:
            return None  # another was first: a cancel, or another leader
        state = RunState.QUEUED if run.state is RunState.PENDING else run.state
        sent = replace(run, version=version, cluster=planned, state=state, reason=reason)
        try:
            made, told = self._ask(
                sent, ClusterDo.LAUNCH, now, lambda: self._cluster.apply(run.id, rendered.objects, token=token)
            )
        except ConflictError as error:
            return self._conflict(sent, error)
        except SpecError as error:
            return self._refused(sent, f"the cluster refused it: {error.problem}", now)
        if made is not None:
            self._patience.worked(run.id, CONFLICT)
            self._patience.hold(run.id, ClusterDo.CONFIRM, SETTLE_S)
            self._adopt(sent, planned, made.uid)
        return told

    def _rendered(self, run: ClusterRun) -> RenderedRun:
        return render(
            JobSpec.model_validate(self._spec(run)),
            default_image=self._workers.image,
            job_id=run.job_id,
            run_id=run.id,
            attempt=run.attempt,
            api_url=self._workers.api_url,
        )

    def _finish_launch(self, run: ClusterRun, workload: Workload, uid: str, now: _Pass) -> Remark | None:
        """Adopt what an earlier launch made, and let it own what that launch left beside it: else that would stay."""
        with contextlib.suppress(ConflictError, SpecError, ValidationError):  # what is there is followed all the same
            objects = self._rendered(run).objects
            made, told = self._ask(run, ClusterDo.LAUNCH, now, lambda: self._cluster.apply(run.id, objects))
            if made is None:
                return told
        self._adopt(run, workload, uid)
        return None

    def _adopt(self, run: ClusterRun, workload: Workload, uid: str) -> None:
        """Write down that the cluster has a run's workload; take that back where the run has ended meanwhile."""
        known = workload.model_copy(update={"uid": uid})
        if self._runs.note(run, cluster=known.model_dump(), reason="is in the cluster") is not None:
            self.nudge()
        elif self._runs.ended([run.id]):
            self._cluster.delete(run.id, _ref(known))

    def _conflict(self, run: ClusterRun, error: ConflictError) -> Remark | None:
        """Try again for some time: what has the name may be on its way out."""
        self._patience.failed(run.id, ClusterDo.LAUNCH)
        if self._patience.failed(run.id, CONFLICT) > CONFLICT_S:
            self._runs.advance(
                run, path_to(run.state, RunState.FAILED), reason=f"it cannot be started: {error.problem}"
            )
            return None
        return _remark(run, trouble_with(run.id, error), run.restarts, run.diagnosis)

    def _refused(self, run: ClusterRun, reason: str, now: _Pass) -> Remark | None:
        action = ClusterAction(do=ClusterDo.MOVE, to=RunState.FAILED, reason=reason, restarts=run.restarts)
        return self._move(run, action, RunState.FAILED, run.diagnosis, now)

    def _suspend(self, run: ClusterRun, do: ClusterDo, ref: WorkloadRef, now: _Pass) -> Remark | None:
        suspended = do is ClusterDo.SUSPEND

        def ask() -> bool:
            try:
                self._cluster.suspend(run.id, ref, suspended)
            except NotFoundError:
                return False  # the next look finds it gone
            return True

        done, told = self._ask(run, do, now, ask)
        if done:
            self._patience.hold(run.id, do, SETTLE_S)
            self._patience.worked(run.id, ClusterDo.UNSUSPEND if suspended else ClusterDo.SUSPEND)
            self._runs.note(run, suspended_at=time.time() if suspended else None)
        return told

    def _move(
        self, run: ClusterRun, action: ClusterAction, to: RunState, diagnosis: dict[str, Any] | None, now: _Pass
    ) -> Remark | None:
        reason = action.reason
        if to in FINAL and run.cluster is not None and not run.cluster.uid:
            ref = _ref(run.cluster)  # an unfinished launch leaves things that belong to no workload
            there, told = self._ask(run, ClusterDo.DELETE, now, lambda: self._cluster.delete(run.id, ref))
            if there is not False:
                return told
        if to is RunState.FAILED and diagnosis and (pods := Diagnosis.model_validate(diagnosis).pods):
            reason = f"{reason}; {words_of(pods[0])}"
        if to in FINAL and run.cluster is not None and run.cluster.uid and time.monotonic() < now.until:
            self._drain(run.id)  # who follows it is told of its end after its last line
        changes: dict[str, Any] = {"restarts": action.restarts, "diagnosis": diagnosis}
        if action.since is not None and run.active_since is not None:
            # What it waited before that was noticed is no time in which it was active; the cluster's clock may differ.
            waits = min(max(action.since, run.active_since), max(time.time(), run.active_since))
            changes["waiting_since"] = waits
            changes["active_seconds"] = run.active_seconds + waits - run.active_since
        path = path_to(run.state, to)
        now.since = now.since if now.moves else time.monotonic()
        now.moves.append(
            (run, Move(run_id=run.id, path=path, if_version=run.version, reason=reason, changes=changes))
        )  # fmt: skip
        return None

    def _write_moves(self, now: _Pass) -> None:
        """Write what was decided so far in one transaction. A crash before it loses nothing: it is decided again."""
        moves, now.moves = now.moves, []
        if not moves:
            return
        for (run, move), moved in zip(moves, self._runs.advance_all(moves), strict=True):
            if isinstance(moved, TwinstepError):
                remark = _remark(run, trouble_with(run.id, moved), run.restarts, run.diagnosis)
                now.remarks += [] if remark is None else [remark]
            elif moved and move.path[-1] in FINAL:
                self.nudge()  # a later attempt may be waiting for this one


def _ref(workload: Workload) -> WorkloadRef:
    return WorkloadRef(**workload.model_dump())


def _find(evidence: Evidence, run: ClusterRun) -> Finding:
    return find(evidence, asked_to_stop=run.cancel_requested_at is not None)


def _sight(evidence: Evidence | None, finding: Finding, *, confirmed: bool = False) -> ClusterSight:
    workload = None if evidence is None else evidence.workload
    deleting = workload is not None and bool(workload["metadata"].get("deletionTimestamp"))
    suspended = None if evidence is None else is_suspended(evidence)
    return ClusterSight(finding=finding, deleting=deleting, suspended=suspended, confirmed=confirmed)


def _remark(run: ClusterRun, reason: str, restarts: int, diagnosis: dict[str, Any] | None) -> Remark | None:
    """Return what is to be said anew of a run; None where it says so already."""
    if (run.reason, run.restarts, run.diagnosis) == (reason, restarts, diagnosis):
        return None
    return Remark(run=run, reason=reason, restarts=restarts, diagnosis=diagnosis)
