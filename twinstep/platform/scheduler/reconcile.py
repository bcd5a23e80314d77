"""Make the runs that exist agree with the runs that are wanted: load, decide, apply; again and again.

One thread of the control plane. What goes wrong with one run is told of and tried again at the next pass; the others
go on. Nothing waits for a process or a file inside a transaction.
"""

from __future__ import annotations

import logging
import threading
import time

from twinstep.platform.scheduler.decide import Action, Do, Seen, Sight, Wanted, decide
from twinstep.platform.scheduler.local import LocalBackend
from twinstep.platform.store.store import Order, Store
from twinstep.spec.errors import TwinstepError
from twinstep.spec.states import RunState

log = logging.getLogger(__name__)

_HOLDS_A_SLOT = frozenset({RunState.STARTING, RunState.RUNNING, RunState.RESTARTING})
SILENCE_S = 5.0  # a worker that was not heard of for so long may not reach us: what it spooled is read instead
ACTOR = "scheduler"


class Reconciler:
    """The loop, and one pass of it."""

    def __init__(self, store: Store, backend: LocalBackend, *, max_parallel_runs: int, every_seconds: float) -> None:
        self._store = store
        self._backend = backend
        self._slots = max_parallel_runs
        self._every = every_seconds
        self._nudged = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reconciler", daemon=True)
        self._spool_sizes: dict[str, int] = {}
        self._passed_at: float | None = None

    def start(self) -> None:
        """Begin to pass over the runs."""
        self._thread.start()

    def stop(self) -> None:
        """End after the pass that is under way. Runs go on."""
        self._stopping.set()
        self._nudged.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def nudge(self) -> None:
        """Pass at once: something was submitted or cancelled."""
        self._nudged.set()

    def age(self) -> float | None:
        """Return the seconds since the last whole pass; None before the first."""
        return None if self._passed_at is None else time.monotonic() - self._passed_at

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self.run_once()
            except Exception:
                log.exception("a pass over the runs failed; the next one tries again")
            self._nudged.wait(self._every)
            self._nudged.clear()

    def run_once(self) -> None:
        """Look at every run that is not final, and do the one thing each needs."""
        orders = self._store.orders()
        held = sum(order.run.state in _HOLDS_A_SLOT for order in orders)
        ahead = held
        for order in orders:
            waiting = order.run.state not in _HOLDS_A_SLOT
            try:
                action = self._one(order, slot_free=waiting and held < self._slots, ahead=ahead)
            except Exception as error:
                problem = str(error) if isinstance(error, TwinstepError) else f"{type(error).__name__}: {error}"
                if not isinstance(error, TwinstepError):
                    log.exception("run %s could not be looked after", order.run.id)
                self._tell(order, f"is tried again: {problem}")
                action = None
            if waiting:
                ahead += 1
                held += action is not None and action.do is Do.START
        self._passed_at = time.monotonic()

    def _one(self, order: Order, *, slot_free: bool, ahead: int) -> Action:
        run, runtime = order.run, order.spec.runtime
        sight = self._backend.observe(run.id)
        action = decide(
            Wanted(
                state=run.state,
                cancel_requested_at=run.cancel_requested_at,
                slot_free=slot_free,
                ahead=ahead,
                max_seconds=runtime.max_seconds,
                stop_grace_seconds=runtime.stop_grace_seconds,
            ),
            sight,
        )
        self._apply(order, action, sight)
        return action

    def _apply(self, order: Order, action: Action, sight: Sight) -> None:
        run = order.run
        match action.do:
            case Do.KEEP:
                if sight.seen is Seen.ALIVE:
                    self._catch_up(order)
            case Do.ENQUEUE:
                if self._move(order, RunState.QUEUED, action.reason):
                    self.nudge()  # a free slot takes it at the next pass, which need not wait
            case Do.EXPLAIN:
                if run.reason != action.reason:
                    self._tell(order, action.reason)
            case Do.START:
                token_hash = self._backend.prepare(run.id, order.spec)
                if self._move(order, RunState.STARTING, "its worker is being started", token_hash=token_hash):
                    self._backend.launch(run.id, order.spec)
            case Do.LAUNCH:
                self._backend.launch(run.id, order.spec)
            case Do.STOP:
                self._backend.stop(run.id)
            case Do.FORBID:
                self._backend.forbid(run.id, order.spec)
                self.nudge()
            case Do.FINISH if action.to is not None:
                self._finish(order, action.to, action.reason, sight)

    def _finish(self, order: Order, to: RunState, reason: str, sight: Sight) -> None:
        run = order.run
        if sight.seen is Seen.VANISHED:
            self._backend.sweep(run.id)
        started = run.state in _HOLDS_A_SLOT
        if started:
            self._drain(run.id, after=run.acked_seq, skip_gaps=True)
        if to is RunState.FAILED and started and (line := self._backend.last_line(run.id)):
            reason = f"{reason}: {line}"
        # Reports may have moved it since it was loaded (starting → running), and that is no reason to wait.
        now = self._store.run(run.id)
        if self._store.move(run.id, to=to, if_version=now.version, reason=reason, actor=ACTOR):
            self._backend.forget(run.id)
            self._spool_sizes.pop(run.id, None)
            self.nudge()

    def _catch_up(self, order: Order) -> None:
        """Read the spool of a worker that runs and is silent: it may look for us at an address we no longer have."""
        run = order.run
        size = self._backend.spool_size(run.id)
        heard = run.heartbeat_at or run.started_at or run.created_at
        if time.time() - heard > SILENCE_S and self._spool_sizes.get(run.id) != size:
            self._spool_sizes[run.id] = size
            self._drain(run.id, after=run.acked_seq, skip_gaps=False)

    def _drain(self, run_id: str, *, after: int, skip_gaps: bool) -> None:
        for records in self._backend.spool(run_id, after=after):
            self._store.ingest(run_id, records, skip_gaps=skip_gaps)

    def _move(self, order: Order, to: RunState, reason: str, *, token_hash: str | None = None) -> bool:
        run = order.run
        return self._store.move(
            run.id,
            to=to,
            if_version=run.version,
            reason=reason,
            actor=ACTOR,
            token_hash=token_hash,
            handle=None if token_hash is None else {"backend": "local"},
        )

    def _tell(self, order: Order, reason: str) -> None:
        try:
            self._store.set_reason(order.run.id, reason=reason[:2000], if_version=order.run.version)
        except TwinstepError as error:
            log.warning("run %s: %s", order.run.id, error)
