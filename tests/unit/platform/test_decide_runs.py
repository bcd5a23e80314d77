"""The scheduler's decision, as a table."""

from __future__ import annotations

import itertools

import pytest

from twinstep.platform.scheduler.decide import KEEP, Action, Do, Seen, Sight, Wanted, decide
from twinstep.spec.states import FINAL, MOVES, RunState

S = RunState
CANCEL = 100.0
TABLE = [
    ("a new run joins the queue", S.PENDING, {"ahead": 2}, Seen.ABSENT, {}, Do.ENQUEUE, None, "waits for 2 runs ahead"),
    ("a new run with a slot free", S.PENDING, {"slot_free": True}, Seen.ABSENT, {}, Do.ENQUEUE, None, "next to start"),
    ("a queued run waits", S.QUEUED, {"ahead": 1}, Seen.ABSENT, {}, Do.EXPLAIN, None, "waits for 1 run ahead"),
    ("a queued run starts", S.QUEUED, {"slot_free": True}, Seen.ABSENT, {}, Do.START, None, ""),
    ("it waited too long", S.QUEUED, {"waited_seconds": 6.0, "max_wait_seconds": 5.0, "ahead": 1}, Seen.ABSENT,
     {}, Do.FINISH, S.FAILED, "runtime.max_wait_seconds is 5"),
    ("it waited long and can start", S.QUEUED, {"waited_seconds": 6.0, "max_wait_seconds": 5.0, "slot_free": True},
     Seen.ABSENT, {}, Do.START, None, ""),
    ("a new one, too", S.PENDING, {"waited_seconds": 6.0, "max_wait_seconds": 5.0, "slot_free": True}, Seen.ABSENT, {},
     Do.ENQUEUE, None, "next to start"),
    ("it may wait on", S.QUEUED, {"waited_seconds": 5.0, "max_wait_seconds": 5.0, "ahead": 1}, Seen.ABSENT, {},
     Do.EXPLAIN, None, "waits for 1 run"),
    ("cancel before start", S.QUEUED, {"cancel": True, "slot_free": True}, Seen.ABSENT, {}, Do.FINISH, S.CANCELLED, ""),
    ("a crash between store and spawn", S.STARTING, {}, Seen.ABSENT, {}, Do.LAUNCH, None, ""),
    ("it is on its way", S.STARTING, {}, Seen.LAUNCHING, {}, Do.KEEP, None, ""),
    ("it never comes up", S.STARTING, {}, Seen.ABSENT, {"launches": 3}, Do.FINISH, S.FAILED, "could not be started"),
    ("cancel while on its way", S.STARTING, {"cancel": True}, Seen.LAUNCHING, {}, Do.KEEP, None, ""),
    ("cancel before anything runs", S.STARTING, {"cancel": True}, Seen.ABSENT, {}, Do.FORBID, None, ""),
    ("code that is not run here", S.STARTING, {"barred": True}, Seen.ABSENT, {}, Do.FORBID, None, ""),
    ("it runs", S.RUNNING, {}, Seen.ALIVE, {}, Do.KEEP, None, ""),
    ("cancel while it runs", S.RUNNING, {"cancel": True}, Seen.ALIVE, {}, Do.STOP, None, ""),
    ("its files are gone", S.RUNNING, {}, Seen.ABSENT, {}, Do.FINISH, S.FAILED, "directory is gone"),
    ("its supervisor is gone", S.RUNNING, {}, Seen.VANISHED, {}, Do.FINISH, S.FAILED, "supervisor vanished"),
    ("it ends well", S.RUNNING, {}, Seen.EXITED, {"code": 0}, Do.FINISH, S.SUCCEEDED, "finished"),
    ("it ends before its first report", S.STARTING, {}, Seen.EXITED, {"code": 0}, Do.FINISH, S.SUCCEEDED, ""),
    ("it ends badly", S.RUNNING, {}, Seen.EXITED, {"code": 3}, Do.FINISH, S.FAILED, "exit code 3"),
    ("it is killed", S.RUNNING, {}, Seen.EXITED, {"signal": "SIGKILL"}, Do.FINISH, S.FAILED, "SIGKILL (out"),
    ("it cannot be started", S.STARTING, {}, Seen.EXITED, {"code": 127, "problem": "no such file"}, Do.FINISH, S.FAILED,
     "no such file"),
    ("its time is over", S.RUNNING, {"max_seconds": 5.0}, Seen.EXITED, {"signal": "SIGTERM", "stopped": "time_limit"},
     Do.FINISH, S.FAILED, "max_seconds is 5"),
    ("it was stopped", S.RUNNING, {"cancel": True}, Seen.EXITED, {"code": 0, "time": 101.0, "stopped": "asked"},
     Do.FINISH, S.CANCELLED, "cancelled"),
    ("a shutdown stopped it", S.RUNNING, {}, Seen.EXITED, {"signal": "SIGTERM", "stopped": "asked"},
     Do.FINISH, S.FAILED, "from outside"),
    ("it had to be killed", S.RUNNING, {"cancel": True}, Seen.EXITED, {"signal": "SIGKILL", "stopped": "asked"},
     Do.FINISH, S.CANCELLED, "killed 10 s after"),
    ("it stopped because it heard of the cancel", S.RUNNING, {"cancel": True}, Seen.EXITED, {"code": 0, "time": 101.0},
     Do.FINISH, S.CANCELLED, "by itself"),
    ("it had finished when the cancel came", S.RUNNING, {"cancel": True}, Seen.EXITED, {"code": 0, "time": 99.0},
     Do.FINISH, S.SUCCEEDED, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "state", "more", "seen", "sight", "do", "to", "says"), TABLE, ids=lambda v: str(v)[:40]
)
def test_each_case_has_its_one_action(case, state, more, seen, sight, do, to, says) -> None:
    wanted = dict(more)
    if wanted.pop("cancel", False):
        wanted["cancel_requested_at"] = CANCEL
    action = decide(Wanted(state=state, **wanted), Sight(seen=seen, **sight))
    assert (action.do, action.to) == (do, to), case
    assert says in action.reason


@pytest.mark.parametrize(
    ("state", "seen", "cancel", "free"), list(itertools.product(RunState, Seen, (None, 1.0), (False, True)))
)
def test_every_action_is_one_the_table_of_moves_allows_and_final_runs_are_left_alone(state, seen, cancel, free) -> None:
    action = decide(Wanted(state=state, cancel_requested_at=cancel, slot_free=free), Sight(seen=seen, code=1, time=2.0))
    if state in FINAL:
        assert action == KEEP
    target = {Do.ENQUEUE: S.QUEUED, Do.START: S.STARTING, Do.FINISH: action.to}.get(action.do)
    assert target is None or target in MOVES[state]
    assert action.do is not Do.FINISH or action.reason


def test_a_second_look_at_the_same_thing_decides_the_same() -> None:
    wanted, sight = Wanted(state=S.RUNNING, cancel_requested_at=1.0), Sight(seen=Seen.ALIVE)
    assert decide(wanted, sight) == decide(wanted, sight) == Action(do=Do.STOP)
