"""Who follows a job asks the database only when something about it changed; this counts the changes.

On SQLite there is one process, and it knows of its own writes. On PostgreSQL several control planes share a database:
each tells the others by NOTIFY which jobs it wrote about, a few times a second at most, over a connection of its own.
A notice is a hint and may be lost, with the connection or the process: followers look by themselves now and then too.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from contextlib import suppress
from typing import Any

import psycopg
from sqlalchemy import URL

from twinstep.platform.backoff import backoff
from twinstep.platform.store.postgresql import CONNECT_S

log = logging.getLogger(__name__)

PLACES = 4096  # counters: jobs that share one cost each other a look now and then, and no job costs memory
CHANNEL = "twinstep_changes"
GATHER_S = 0.05  # notices of one worker's many reports go out together
JOBS_PER_NOTICE = 200
LOOK_S = 10.0  # between two looks whether the connection still stands
AGAIN_S = (0.2, 5.0)  # the first and the longest pause before the next try to connect


class Changes:
    """Counts changes per job."""

    def __init__(self) -> None:
        self._counts = [0] * PLACES
        self._lock = threading.Lock()
        self._wire: _Wire | None = None

    def bump(self, job_id: str) -> None:
        """Note that something about the job changed, and let others know."""
        self._count(job_id)
        if self._wire is not None:
            self._wire.tell(job_id)

    def count(self, job_id: str) -> int:
        """Return a number that differs from the one before whenever something changed."""
        return self._counts[hash(job_id) % PLACES]

    def share(self, url: URL) -> None:
        """Exchange notices with the other control planes on a PostgreSQL database, until `close`."""
        self._wire = _Wire(url, heard=self._count, missed=self._missed)
        self._wire.start()

    def close(self) -> None:
        """Tell what is still untold, and hear no more."""
        if self._wire is not None:
            self._wire.stop()

    def _count(self, job_id: str) -> None:
        with self._lock:
            self._counts[hash(job_id) % PLACES] += 1

    def _missed(self) -> None:
        """Count a change of every job: for a while nothing was heard."""
        with self._lock:
            self._counts = [count + 1 for count in self._counts]


class _Wire(threading.Thread):
    """The connection over which control planes tell each other; one thread sends and hears."""

    def __init__(self, url: URL, *, heard: Any, missed: Any) -> None:
        super().__init__(daemon=True)
        self._where = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._heard = heard
        self._missed = missed
        self._me = secrets.token_hex(4)
        self._untold: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._woken, self._wake = os.pipe()
        self._open = True
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)

    def tell(self, job_id: str) -> None:
        """Send a notice soon; nothing once it was stopped."""
        with self._lock:
            if self._stopping.is_set():
                return
            first = not self._untold
            self._untold.add(job_id)
        if first:
            self._knock()

    def stop(self) -> None:
        """Send what is untold and end. Once more changes nothing."""
        with self._lock:
            self._stopping.set()
        self._knock()
        self.join(timeout=10)
        if self.is_alive():
            return
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._wake)
                os.close(self._woken)

    def _knock(self) -> None:
        # Under the lock, for what is closed may be another's by now: the system gives its number away again.
        with self._lock, suppress(OSError):  # full: it was knocked at already
            if self._open:
                os.write(self._wake, b".")

    def run(self) -> None:
        """Connect, and again whenever the connection is lost."""
        failures, told = 0, False
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._where, autocommit=True, connect_timeout=CONNECT_S) as connection:
                    connection.execute("SET application_name = 'twinstep changes'")
                    connection.execute(f"LISTEN {CHANNEL}")
                    self._missed()
                    failures, told = 0, False
                    self._exchange(connection)
            except psycopg.Error as error:
                if not told:  # once, not at every try until it is mended
                    told = True
                    log.warning("notices of other control planes are not heard: %s", " ".join(str(error).split()))
                failures += 1
                self._stopping.wait(backoff(failures, first=AGAIN_S[0], longest=AGAIN_S[1]))

    def _exchange(self, connection: psycopg.Connection[Any]) -> None:
        while True:
            ready, _, _ = select.select([connection.fileno(), self._woken], [], [], LOOK_S)
            if self._woken in ready:
                if not self._stopping.is_set():
                    time.sleep(GATHER_S)
                with suppress(OSError):
                    os.read(self._woken, 4096)
                self._send(connection)
                if self._stopping.is_set():
                    return
            elif not ready:
                connection.execute("SELECT 1")
            for notice in connection.notifies(timeout=0):  # also those that came while something was sent
                self._on_notice(notice)

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            jobs, self._untold = sorted(self._untold), set()
        for begin in range(0, len(jobs), JOBS_PER_NOTICE):
            notice = " ".join([self._me, *jobs[begin : begin + JOBS_PER_NOTICE]])
            try:
                connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, notice))
            except psycopg.Error:
                with self._lock:
                    self._untold.update(jobs[begin:])
                self._knock()
                raise

    def _on_notice(self, notice: psycopg.Notify) -> None:
        sender, *jobs = notice.payload.split()
        if sender != self._me:
            for job_id in jobs:
                self._heard(job_id)
