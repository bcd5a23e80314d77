"""Reports: every record goes to the run's spool file first, and from there to the control plane, in batches.

The training thread only appends a line (`spool.py`). A sender thread reads the spool from the last acknowledged record
on, so what waits is on disk and not in memory, and a control plane that is away costs nothing but retries. Records that
could not be sent before the end stay in the spool, where the control plane finds them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from twinstep.spec.report import MAX_RECORDS_PER_POST, MAX_TEXT, RunSummary
from twinstep.worker.train.environment import RunContext
from twinstep.worker.train.output import say
from twinstep.worker.train.spool import Spool, SpoolReader

if TYPE_CHECKING:
    import httpx

Phase = Literal["starting", "compiling", "training", "evaluating", "done"]

SEND_EVERY = 0.25  # seconds; a person watching a chart does not see more
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0  # seconds between tries while the control plane is away
LAST_TRY = 10.0  # seconds that `close` waits for the last records to be taken
LAST_TRY_AWAY = 1.0  # seconds it waits where nobody answered the last time either
SPOOL = "spool.jsonl"


class Reporter(Protocol):
    """Where a run's numbers and events go."""

    def metric(self, step: int, values: Mapping[str, float | None]) -> None: ...

    def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None: ...

    def progress(
        self,
        phase: Phase,
        step: int,
        total_steps: int,
        *,
        examples_per_s: float | None,
        eta_s: float | None,
        **more: Any,
    ) -> None: ...

    def result(self, summary: RunSummary) -> None: ...

    def close(self) -> None: ...


class NoReporter:
    """For a run by hand: the terminal is enough."""

    def metric(self, step: int, values: Mapping[str, float | None]) -> None:
        """Drop it."""

    def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None:
        """Drop it."""

    def progress(
        self,
        phase: Phase,
        step: int,
        total_steps: int,
        *,
        examples_per_s: float | None,
        eta_s: float | None,
        **more: Any,
    ) -> None:
        """Drop it."""

    def result(self, summary: RunSummary) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to close."""


class SpoolReporter:
    """Appends records to the spool, and sends them from there in a thread of its own. Nothing it does ends a run."""

    def __init__(self, context: RunContext) -> None:
        self._spool = Spool(context.run_dir / SPOOL)
        self._unwritten: dict[str, Any] | None = None
        """The summary, where it could not be written."""
        self._sender = _Sender(context, self._spool.path)
        self._sender.start()

    def metric(self, step: int, values: Mapping[str, float | None]) -> None:
        """Report numbers of a step; what is not finite becomes null."""
        self._append("metric", step=step, values=dict(values))

    def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None:
        """Report something that happened once."""
        self._append("event", name=name, reason=reason[:MAX_TEXT], data=dict(data or {}))

    def progress(
        self,
        phase: Phase,
        step: int,
        total_steps: int,
        *,
        examples_per_s: float | None,
        eta_s: float | None,
        **more: Any,
    ) -> None:
        """Report where the run is; `more`: tokens_per_s, goodput, chip_hours and time_s of a `ProgressRecord`."""
        self._append(
            "progress",
            phase=phase,
            step=step,
            total_steps=total_steps,
            examples_per_s=examples_per_s,
            eta_s=eta_s,
            **more,
        )

    def result(self, summary: RunSummary) -> None:
        """Report the run's summary."""
        content = summary.model_dump(mode="json")
        self._unwritten = None if self._append("result", summary=content) else content

    def close(self) -> None:
        """Wait a while for the last records to be taken; what is not stays in the spool."""
        if self._spool.lost:
            self._tell_what_is_lost()
        self._spool.close()
        self._sender.finish(self._spool.seq)

    def _tell_what_is_lost(self) -> None:
        """Try the result once more, and report how many records are missing: the disk may have room again."""
        lost = self._spool.lost
        if self._unwritten is not None and self._append("result", summary=self._unwritten):
            lost -= 1
        if lost:
            reason = f"{lost} report{'' if lost == 1 else 's'} could not be written and are missing here"
            self._append("event", name="reports_lost", reason=reason, data={"count": lost})
        self._spool.lost = lost

    def _append(self, kind: str, **content: Any) -> bool:
        written = self._spool.append(kind, content)
        if written:
            self._sender.wake()
        return written


class _Sender(threading.Thread):
    """Reads the spool behind the writer and posts what is not acknowledged yet."""

    def __init__(self, context: RunContext, path: Path) -> None:
        super().__init__(name="reports", daemon=True)
        self._url = f"{context.api_url.rstrip('/')}/v1/runs/{context.run_id}/reports"
        self._headers = {"Authorization": f"Bearer {context.token}"}
        self._path = path
        self._reader = SpoolReader(path)
        self._acked = 0
        self._jitter = random.Random()  # its own: a capture going on meanwhile watches Python's
        self._news = threading.Event()
        self._away = threading.Event()
        self._end: int | None = None

    def wake(self) -> None:
        """Say that the spool grew."""
        self._news.set()

    def finish(self, last_seq: int) -> None:
        """Send up to `last_seq`, for a few seconds at most."""
        self._end = last_seq
        self._news.set()
        self.join(LAST_TRY_AWAY if self._away.is_set() else LAST_TRY)

    def run(self) -> None:
        import httpx  # here, beside the run: what it starts with has no need of it

        wait = FIRST_WAIT
        # A proxy in the environment is for the world outside; the control plane's address is given, not looked up.
        with httpx.Client(headers=self._headers, timeout=10.0, trust_env=False) as client:
            while self._end is None or self._acked < self._end:
                try:
                    sent = self._send_some(client)
                except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, LookupError, OSError):
                    self._away.set()
                    # Half a second at first, doubled, never in step with other workers that lost the same server.
                    time.sleep(min(wait, LONGEST_WAIT) * self._jitter.uniform(0.5, 1.0))
                    wait *= 2
                    continue
                wait = FIRST_WAIT
                self._away.clear()
                if sent is None:
                    return
                if not sent and self._end is not None:
                    return  # the spool lacks what was written: somebody removed it
                if not sent:
                    self._news.wait()
                    self._news.clear()
                    if self._end is None:
                        time.sleep(SEND_EVERY)  # let a batch gather

    def _send_some(self, client: httpx.Client) -> bool | None:
        """Post the next batch. Return whether something was sent; None when the control plane wants no more."""
        lines = self._reader.after(self._acked, limit=MAX_RECORDS_PER_POST)
        if not lines:
            return False
        body = b'{"records": [' + b",".join(lines) + b"]}"
        answer = client.post(self._url, content=body, headers={"Content-Type": "application/json"})
        if answer.status_code in (401, 403, 404, 409, 422):
            say(f"reports are refused ({answer.status_code}); they stay in {self._path}")
            return None
        answer.raise_for_status()
        before, self._acked = self._acked, max(0, int(answer.json()["acked"]))
        if self._acked <= before:
            # It takes nothing, or misses earlier records, which come next: wait, as for one that is away.
            raise ValueError(f"the control plane is at record {self._acked}")
        return True


def make_reporter(context: RunContext | None) -> Reporter:
    """Return the reporter for a run by hand or for one that was started by a control plane."""
    return NoReporter() if context is None else SpoolReporter(context)
