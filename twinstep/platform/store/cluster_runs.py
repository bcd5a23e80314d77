"""Runs in a cluster, as their reconciler reads and writes them: one query for a pass, and writes guarded by version.

Two control planes may think for a moment that they lead: of two writes at one version, one happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select, update

from twinstep.platform.store.database import Database
from twinstep.platform.store.moves import Move, add_event, guarded_moves
from twinstep.platform.store.records import Workload
from twinstep.platform.store.search import spec_of_run
from twinstep.platform.store.tables import JobRow, RunRow
from twinstep.platform.store.troubles import again
from twinstep.spec.errors import NotFoundError, StateError, TwinstepError
from twinstep.spec.states import FINAL, LIVE, RunState

ACTOR = "scheduler"
_COLUMNS = (
    "id", "job_id", "attempt", "state", "reason", "version", "restarts", "cluster", "diagnosis",
    "cancel_requested_at", "suspend_requested_at", "suspended_at", "active_since", "active_seconds", "heartbeat_at",
    "waiting_since",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRun:
    """A live run in a cluster. Times are Unix seconds."""

    id: str
    job_id: str
    attempt: int
    state: RunState
    reason: str
    version: int
    restarts: int
    cluster: Workload | None
    """None: nothing was sent. Without a uid: it may have been."""
    diagnosis: dict[str, Any] | None
    cancel_requested_at: float | None
    suspend_requested_at: float | None
    suspended_at: float | None
    active_since: float | None
    active_seconds: float
    heartbeat_at: float | None
    waiting_since: float | None = None
    phase: str | None = None
    """What the worker said last that it is about; None: nothing yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """What there is to say anew of a run that stays in its state."""

    run: ClusterRun
    reason: str
    restarts: int
    diagnosis: dict[str, Any] | None


class ClusterRuns:
    """The runs of the backend `kubernetes`."""

    def __init__(self, database: Database, *, changed: Callable[[str], None]) -> None:
        """`changed` is told the id of each job about which something was written."""
        self._database = database
        self._changed = changed

    def live(self) -> list[ClusterRun]:
        """Return every run that is not final, in the order they were made."""
        query = (
            select(*(getattr(RunRow, name) for name in _COLUMNS), RunRow.progress["phase"].as_string().label("phase"))
            .where(RunRow.state.in_(sorted(LIVE)), RunRow.backend == "kubernetes")
            .order_by(RunRow.id)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [_run(row._asdict()) for row in rows]

    def spec(self, run_id: str) -> dict[str, Any]:
        """Return the JobSpec of a run that is there, as it was stored."""
        query = select(spec_of_run()).join(JobRow, RunRow.job_id == JobRow.id).where(RunRow.id == run_id)
        with self._database.read() as connection:
            found: dict[str, Any] = connection.execute(query).scalar_one()
        return found

    def ended(self, run_ids: Sequence[str]) -> dict[str, RunState]:
        """Return those of some runs that have ended, and how; a run that is not ours is in no answer."""
        query = select(RunRow.id, RunRow.state).where(RunRow.id.in_(run_ids), RunRow.state.in_(sorted(FINAL)))
        with self._database.read() as connection:
            return {run_id: RunState(state) for run_id, state in connection.execute(query)}

    def begin_launch(self, run: ClusterRun, workload: Workload, *, token_hash: str, reason: str) -> int | None:
        """Note that a run's objects are about to be sent, and the token they bring; return the run's new version.

        The hash before stays good: two launches may each have sent their token, and one of them is what the pods got.

        Returns:
            None where somebody else wrote first: nothing may be sent then.
        """
        changes: dict[str, Any] = {
            "cluster": workload.model_dump(),
            "token_hash": token_hash,
            "spare_token_hash": RunRow.token_hash,
        }
        if run.state is RunState.PENDING:
            moved = self.advance(run, [RunState.QUEUED], reason=reason, changes=changes)
            return run.version + 1 if moved else None
        return self.note(run, reason=reason, **changes)

    @again
    def clock_jumped(self, seconds: float) -> None:
        """Move the moments since which runs are active, or wait, along with a clock that was set: no time went by."""
        query = (
            update(RunRow)
            .where(RunRow.state.in_(sorted(LIVE)), RunRow.backend == "kubernetes")  # what is null stays so
            .values(active_since=RunRow.active_since + seconds, waiting_since=RunRow.waiting_since + seconds)
        )
        with self._database.write() as connection:
            connection.execute(query)

    @again
    def note(self, run: ClusterRun, *, if_version: int | None = None, **changes: Any) -> int | None:
        """Write columns of a run that stays in its state; return its new version, None where another was first."""
        version = run.version if if_version is None else if_version
        query = (
            update(RunRow)
            .where(RunRow.id == run.id, RunRow.version == version, RunRow.state.in_(sorted(LIVE)))
            .values(version=version + 1, **changes)
        )
        with self._database.write() as connection:
            if not connection.execute(query).rowcount:
                return None
        self._changed(run.job_id)
        return version + 1

    def advance(
        self, run: ClusterRun, path: Sequence[RunState], *, reason: str, changes: dict[str, Any] | None = None
    ) -> bool:
        """Move a run along a path of states, an event each; False where another was first."""
        move = Move(run_id=run.id, path=path, if_version=run.version, reason=reason, changes=changes or {})
        return self._advanced([(run, move)])[0]

    def advance_all(self, moves: Sequence[tuple[ClusterRun, Move]]) -> list[bool | TwinstepError]:
        """Move runs in one transaction; say of each whether it was moved (False: another was first), or why not.

        One that cannot be moved keeps no other from it.
        """
        try:
            return list(self._advanced(moves))
        except (StateError, NotFoundError) as error:
            if len(moves) == 1:
                return [error]
            return [answer for each in moves for answer in self.advance_all([each])]

    @again
    def _advanced(self, moves: Sequence[tuple[ClusterRun, Move]]) -> list[bool]:
        with self._database.write() as connection:
            jobs = guarded_moves(connection, [move for _, move in moves], actor=ACTOR, time=time.time())
        for job_id in jobs:
            if job_id is not None:
                self._changed(job_id)
        return [job_id is not None for job_id in jobs]

    @again
    def remark(self, remarks: Sequence[Remark]) -> None:
        """Say anew why runs are where they are; no change of state, so no new version. One transaction for all.

        A run that has moved on since it was read keeps what it says. Pods that were started again are an event.
        """
        if not remarks:
            return
        query = (
            update(RunRow)
            .where(RunRow.id == bindparam("of_run"), RunRow.version == bindparam("at_version"))
            .values(reason=bindparam("says"), restarts=bindparam("times"), diagnosis=bindparam("found"))
        )
        rows = [
            {
                "of_run": each.run.id,
                "at_version": each.run.version,
                "says": each.reason,
                "times": each.restarts,
                "found": each.diagnosis,
            }
            for each in remarks
        ]
        now = time.time()
        with self._database.write() as connection:
            connection.execute(query, rows)
            for each in remarks:
                if each.restarts > each.run.restarts:
                    add_event(
                        connection,
                        job_id=each.run.job_id,
                        run_id=each.run.id,
                        time=now,
                        name="restarted",
                        actor=ACTOR,
                        reason=each.reason,
                        data={"restarts": each.restarts},
                    )
        for each in remarks:
            self._changed(each.run.job_id)


def _run(row: dict[str, Any]) -> ClusterRun:
    workload = row.pop("cluster")
    return ClusterRun(
        **row | {"state": RunState(row["state"])}, cluster=None if workload is None else Workload(**workload)
    )
