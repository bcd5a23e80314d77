"""The local backend: runs are processes of this machine, each under a supervisor of its own.

The only file that starts or ends processes for the control plane; supervise.py does the rest beside the worker.
Never signals what it did not start: pid, start time and boot must match (procs.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

from twinstep.platform.scheduler.decide import Seen, Sight
from twinstep.platform.scheduler.procs import RUN_MARK, Process, kill_group_of_run
from twinstep.platform.scheduler.rundir import RunDir
from twinstep.platform.scheduler.supervise import ending, write_json
from twinstep.spec.job import JobSpec
from twinstep.spec.report import Record

SECRETS = frozenset({"TWINSTEP_TOKEN", "TWINSTEP_TOKEN_FILE", "TWINSTEP_BOOTSTRAP_TOKEN_FILE", "TWINSTEP_DATABASE_URL"})
"""Of a control plane's environment, what is no worker's: its run's token is all it needs."""


def checkpoint_place(data: Path, job_id: str, wanted: str | None) -> str:
    """Return where the runs of a job save their state: below the spec's path, else below the data directory."""
    if wanted is None:
        return str(data / "checkpoints" / job_id)
    if "://" in wanted:
        return f"{wanted.rstrip('/')}/{job_id}"
    return str(data / Path(wanted).expanduser() / job_id)


class LocalBackend:
    """Starts, watches and stops runs as processes of this machine."""

    def __init__(self, runs_dir: Path, *, command: tuple[str, ...], api_url: str) -> None:
        """`command` is the worker's, to which the path of the spec is added; workers report to `api_url`."""
        self._runs_dir = runs_dir
        self._command = command
        self._api_url = api_url
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._launches: dict[str, int] = {}
        self._home: str | None = None

    def home(self) -> str:
        """Return the id of this place: of several control planes on one database, each looks after its own runs.

        Made at the first call and kept beside the runs; whoever starts here again has it again.
        """
        if self._home is None:
            path, new = self._runs_dir / ".home", self._runs_dir / f".home-{os.getpid()}"
            self._runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(secrets.token_hex(8))
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # whole or not at all, and never over one that is there
            new.unlink()
            self._home = path.read_text()
        return self._home

    def run_dir(self, run_id: str) -> RunDir:
        """Return the run's directory."""
        return RunDir(self._runs_dir, run_id)

    def prepare(self, run_id: str, spec: JobSpec) -> str:
        """Write the run's directory; return the hash of its token. Starts nothing."""
        return self.run_dir(run_id).prepare(spec)

    def launch(self, run_id: str, spec: JobSpec, *, job_id: str | None = None, attempt: int = 1) -> None:
        """Start the run's supervisor; harmless where one has the run already.

        All runs of a job have one place for checkpoints, from which a later one goes on.

        Raises:
            UnavailableError: its directory cannot be written, or no process can be started.
        """
        if self._child_runs(run_id):
            return
        directory = self.run_dir(run_id)
        directory.prepare(spec)
        order = {
            "run_dir": str(directory.path),
            "command": [*self._command, str(directory.spec_path)],
            "max_seconds": spec.runtime.max_seconds,
            "stop_grace_seconds": spec.runtime.stop_grace_seconds,
            "restarts": spec.runtime.restarts,
            "hang_seconds": spec.runtime.hang_seconds,
        }
        environment = {name: text for name, text in os.environ.items() if name not in SECRETS} | {
            RUN_MARK: run_id,
            "TWINSTEP_RUN_DIR": str(directory.path),
            "TWINSTEP_API_URL": self._api_url,
            "TWINSTEP_RUN_TOKEN": directory.token(),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            **({} if job_id is None else {"TWINSTEP_CHECKPOINTS": self.checkpoints(job_id, spec)}),
            "TWINSTEP_ATTEMPT": str(attempt),
        }
        self._launches[run_id] = self._launches.get(run_id, 0) + 1
        with directory.log_path.open("ab") as log:
            self._children[run_id] = subprocess.Popen(  # noqa: S603  our own supervisor
                [sys.executable, "-m", "twinstep.platform.scheduler.supervise", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory.path,
                env=environment,
                start_new_session=True,
            )

    def checkpoints(self, job_id: str, spec: JobSpec) -> str:
        """Return where the runs of a job save their state."""
        return checkpoint_place(self._runs_dir.parent, job_id, spec.checkpoint.path)

    def observe(self, run_id: str) -> Sight:
        """Return what is to be seen of a run."""
        path = self.run_dir(run_id).path
        launching = self._child_runs(run_id)
        supervisor = Process.from_json(_read_json(path / "supervisor.json"))
        alive = supervisor is not None and supervisor.alive()
        # Read last: a supervisor writes how the worker ended and only then goes.
        exited = _read_json(path / "exit.json")
        if exited is not None:
            return Sight(seen=Seen.EXITED, **_ending(exited))
        if supervisor is not None:
            return Sight(seen=Seen.ALIVE if alive else Seen.VANISHED)
        launches = self._launches.get(run_id, 0)
        return replace(Sight(seen=Seen.LAUNCHING if launching else Seen.ABSENT), launches=launches)

    def _child_runs(self, run_id: str) -> bool:
        child = self._children.get(run_id)
        return child is not None and child.poll() is None  # poll() also lets go of one that has ended

    def stop(self, run_id: str) -> None:
        """Ask the supervisor to end the worker, with force after the spec's grace. Asking again changes nothing."""
        supervisor = Process.from_json(_read_json(self.run_dir(run_id).path / "supervisor.json"))
        if supervisor is not None:
            supervisor.send(SIGTERM)

    def forbid(self, run_id: str, spec: JobSpec) -> None:
        """See to it that a run that has not started never does: as if it had been cancelled.

        Under the lock every supervisor must take, so one that is on its way either has started (and is seen alive
        at the next look) or finds the run ended.
        """
        directory = self.run_dir(run_id)
        directory.prepare(spec)
        with (directory.path / "lock").open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (directory.path / "supervisor.json").exists():
                write_json(directory.path / "exit.json", ending(code=None, stopped="asked"))

    def sweep(self, run_id: str) -> int:
        """Kill what a vanished supervisor left of its worker; return how many processes that were."""
        told = _read_json(self.run_dir(run_id).path / "supervisor.json") or {}
        worker = Process.from_json(told.get("worker"))
        return 0 if worker is None else kill_group_of_run(worker.pid, run_id)

    def spool(self, run_id: str, *, after: int, offset: int) -> Iterator[tuple[list[Record], int]]:
        """Yield the records the worker spooled from byte `offset` on and that are newer than `after`; see RunDir."""
        return self.run_dir(run_id).spool(after=after, offset=offset)

    def spool_size(self, run_id: str) -> int:
        """Return the bytes the worker has spooled."""
        return self.run_dir(run_id).spool_size()

    def last_line(self, run_id: str) -> str:
        """Return the last thing the worker's log says."""
        return self.run_dir(run_id).last_line()

    def forget(self, run_id: str) -> None:
        """Let go of what is kept in memory about a run that has ended."""
        self._launches.pop(run_id, None)
        if (child := self._children.pop(run_id, None)) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=2)  # its last word is written: it is on its way out

    def let_go(self) -> None:
        """Let go of every supervisor, without a signal: the runs go on, and are found again."""
        for child in self._children.values():
            child.returncode = child.poll() or 0  # else Popen complains of a child it leaves running
        self._children.clear()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _ending(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data.get(name) for name in ("code", "signal", "time", "stopped", "problem")}
