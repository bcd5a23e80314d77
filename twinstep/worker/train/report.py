"""Reports: every record goes to the run's spool file first, and from there to the control plane, in batches.

The training thread only appends a line. A sender thread reads the spool from the last acknowledged record on, so what
waits is on disk and not in memory, and a control plane that is away costs nothing but retries. Records that could not
be sent before the end stay in the spool, where the control plane finds them.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from twinstep.spec.report import MAX_RECORDS_PER_POST, MAX_TEXT, RunSummary
from twinstep.worker.train.environment import RunContext

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
        self, phase: Phase, step: int, total_steps: int, *, examples_per_s: float | None, eta_s: float | None
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
        self, phase: Phase, step: int, total_steps: int, *, examples_per_s: float | None, eta_s: float | None
    ) -> None:
        """Drop it."""

    def result(self, summary: RunSummary) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to close."""


class SpoolReporter:
    """Numbers records, appends them to the spool, and sends them from there in a thread of its own."""

    def __init__(self, context: RunContext) -> None:
        path = context.run_dir / SPOOL
        self._seq = _last_seq(path)  # pods that come back within a run count on from where they were
        self._spool = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._sender = _Sender(context, path)
        self._sender.start()

    def metric(self, step: int, values: Mapping[str, float | None]) -> None:
        """Report numbers of a step; what is not finite becomes null."""
        self._append("metric", step=step, values={name: _finite(value) for name, value in values.items()})

    def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None:
        """Report something that happened once."""
        self._append("event", name=name, reason=reason[:MAX_TEXT], data=dict(data or {}))

    def progress(
        self, phase: Phase, step: int, total_steps: int, *, examples_per_s: float | None, eta_s: float | None
    ) -> None:
        """Report where the run is."""
        self._append(
            "progress",
            phase=phase,
            step=step,
            total_steps=total_steps,
            examples_per_s=_finite(examples_per_s),
            eta_s=_finite(eta_s),
        )

    def result(self, summary: RunSummary) -> None:
        """Report the run's summary."""
        self._append("result", summary=summary.model_dump(mode="json"))

    def close(self) -> None:
        """Wait a while for the last records to be taken; what is not stays in the spool."""
        with self._lock:
            self._spool.close()
        self._sender.finish(self._seq)

    def _append(self, kind: str, **content: Any) -> None:
        with self._lock:
            self._seq += 1
            record = {"kind": kind, "seq": self._seq, "time": time.time(), **content}
            self._spool.write(json.dumps(record, allow_nan=False) + "\n")
            self._spool.flush()
        self._sender.wake()


class _Sender(threading.Thread):
    """Reads the spool behind the writer and posts what is not acknowledged yet."""

    def __init__(self, context: RunContext, path: Path) -> None:
        super().__init__(name="reports", daemon=True)
        self._url = f"{context.api_url.rstrip('/')}/v1/runs/{context.run_id}/reports"
        self._headers = {"Authorization": f"Bearer {context.token}"}
        self._path = path
        self._offset = 0
        self._acked = 0
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
        wait = FIRST_WAIT
        # A proxy in the environment is for the world outside; the control plane's address is given, not looked up.
        with httpx.Client(headers=self._headers, timeout=10.0, trust_env=False) as client:
            while self._end is None or self._acked < self._end:
                try:
                    sent = self._send_some(client)
                except (httpx.HTTPError, ValueError, OSError):
                    self._away.set()
                    # Half a second at first, doubled, never in step with other workers that lost the same server.
                    time.sleep(min(wait, LONGEST_WAIT) * random.uniform(0.5, 1.0))
                    wait *= 2
                    continue
                wait = FIRST_WAIT
                self._away.clear()
                if sent is None:
                    return
                if not sent and self._end is None:
                    self._news.wait()
                    self._news.clear()
                    if self._end is None:
                        time.sleep(SEND_EVERY)  # let a batch gather

    def _send_some(self, client: httpx.Client) -> bool | None:
        """Post the next batch. Return whether something was sent; None when the control plane wants no more."""
        lines, offset = self._next_lines()
        if not lines:
            return False
        body = b'{"records": [' + b",".join(lines) + b"]}"
        answer = client.post(self._url, content=body, headers={"Content-Type": "application/json"})
        if answer.status_code in (401, 403, 404, 409, 422):
            print(f"reports are refused ({answer.status_code}); they stay in {self._path}", flush=True)
            return None
        answer.raise_for_status()
        acked = int(answer.json()["acked"])
        last = int(json.loads(lines[-1])["seq"])
        if acked >= last:
            self._offset = offset
        elif acked > self._acked or self._offset:
            self._offset = 0  # the receiver misses earlier records: read on behind what it has
        else:
            raise ValueError(f"the control plane stays at record {acked}")  # wait, as for one that is away
        self._acked = acked
        return True

    def _next_lines(self) -> tuple[list[bytes], int]:
        """Return the next whole lines that are not acknowledged, and the offset after them."""
        lines: list[bytes] = []
        offset = self._offset
        with self._path.open("rb") as spool:
            spool.seek(offset)
            for line in spool:
                if not line.endswith(b"\n") or len(lines) == MAX_RECORDS_PER_POST:
                    break
                offset += len(line)
                if line.strip() and (self._offset or int(json.loads(line)["seq"]) > self._acked):
                    lines.append(line.rstrip())
        return lines, offset


def make_reporter(context: RunContext | None) -> Reporter:
    """Return the reporter for a run by hand or for one that was started by a control plane."""
    return NoReporter() if context is None else SpoolReporter(context)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _last_seq(path: Path) -> int:
    """Return the seq of the spool's last whole line, and cut off a half line that a killed worker left."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    return int(json.loads(last)["seq"]) if last else 0
