"""Watch one worker from start to end: `python -m twinstep.platform.scheduler.supervise ORDER`.

Runs apart from the control plane, in a session of its own, so that either may end without the other. It starts the
worker in a process group, asks it to stop on SIGTERM, at the time limit or when the run's directory is gone, kills it
after the grace, and writes how it ended. Imports the standard library only; knows no store and no network. A run is
never started twice: the lock, and the files this writes before the worker starts, turn a second supervisor away.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from twinstep.platform.scheduler.procs import Process

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
END_TRIES = 600  # one a second
LOOK_S = 2.0  # seconds between two looks whether the run still has its directory
LONGEST_WAIT_S = 3600.0  # a limit of many years is more than the system call takes
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(text: str) -> int:
    """Run the worker an order describes; return 0, also where another supervisor has the run already.

    The order is JSON: run_dir, command (list), max_seconds (or null), stop_grace_seconds. The worker gets this
    process's own environment, so that no secret is ever an argument.
    """
    order = json.loads(text)
    run_dir = Path(order["run_dir"])
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        if (run_dir / "supervisor.json").exists() or (run_dir / "exit.json").exists():
            return 0
        # Blocked, not handled: a signal that comes before the loop below waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        _Watch(order, run_dir).run()
    return 0


class _Watch:
    def __init__(self, order: dict[str, Any], run_dir: Path) -> None:
        self.order = order
        self.run_dir = run_dir
        self.home = run_dir.stat()
        self.me = Process.of(os.getpid())
        self.stopped: str | None = None
        self.kill_at: float | None = None

    def run(self) -> None:
        self._tell({"worker": None})
        limit = self.order["max_seconds"]
        ends_at = None if limit is None else time.monotonic() + limit
        try:
            worker = self._start()
        except OSError as error:
            self._tell_end(ending(code=127, problem=f"the worker cannot be started: {error}"))
            return
        started = Process.of(worker.pid)
        self._tell({"worker": started.to_json() if started else {"pid": worker.pid}})
        while not _ended(worker.pid):
            look_at = None if self.stopped else time.monotonic() + LOOK_S
            waits = [at for at in (ends_at if self.stopped is None else None, self.kill_at, look_at) if at is not None]
            got = self._wait(min(waits, default=None))
            now = time.monotonic()
            if got in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and self.stopped is None:
                self._stop(worker.pid, why="asked")
            elif self.stopped is None and ends_at is not None and now >= ends_at:
                self._stop(worker.pid, why="time_limit")
            elif self.stopped is None and self._homeless():
                self._stop(worker.pid, why="homeless")  # nothing it does or says is kept any more
            elif self.kill_at is not None and now >= self.kill_at:
                self.kill_at = None
                _signal_group(worker.pid, signal.SIGKILL)
        # The leader is not yet reaped, so its group's number is still its own: what is left in it is ours to kill.
        _signal_group(worker.pid, signal.SIGKILL)
        code = worker.wait()
        self._tell_end(
            ending(
                code=code if code >= 0 else None,
                signal_name=_name(-code) if code < 0 else None,
                stopped=self.stopped,
            )
        )

    def _start(self) -> subprocess.Popen[bytes]:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        me = os.getpid()

        def in_child() -> None:
            # Without a supervisor nobody enforces a limit or hears of the end: the worker goes with it.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

        with (self.run_dir / "log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603  the control plane's own order
                self.order["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.run_dir,
                process_group=0,
                preexec_fn=in_child,
            )

    def _stop(self, group: int, *, why: str) -> None:
        self.stopped = why
        self.kill_at = time.monotonic() + self.order["stop_grace_seconds"]
        _signal_group(group, signal.SIGTERM)

    def _tell(self, more: dict[str, Any]) -> None:
        me = self.me.to_json() if self.me else {}  # in /proc, which a running process always has
        write_json(self.run_dir / "supervisor.json", me | {"time": time.time()} | more)

    def _homeless(self) -> bool:
        """Say whether the run's directory was taken away, or another one stands in its place."""
        try:
            return not os.path.samestat(self.home, self.run_dir.stat())
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _tell_end(self, how: dict[str, Any]) -> None:
        # Without this file a run that succeeded counts as vanished: a full disk is waited for.
        for _ in range(END_TRIES):
            if self._homeless():
                return
            with contextlib.suppress(OSError):
                write_json(self.run_dir / "exit.json", how)
                return
            time.sleep(1)

    @staticmethod
    def _wait(until: float | None) -> int | None:
        if until is None:
            return signal.sigwait(_WATCHED)
        info = signal.sigtimedwait(_WATCHED, min(max(0.0, until - time.monotonic()), LONGEST_WAIT_S))
        return info.si_signo if info else None


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the two that have names
        return f"signal {number}"


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def ending(
    *, code: int | None, signal_name: str | None = None, stopped: str | None = None, problem: str | None = None
) -> dict[str, Any]:
    """Return what `exit.json` holds. `stopped` says who ended it: null (itself), asked, time_limit."""
    return {"code": code, "signal": signal_name, "time": time.time(), "stopped": stopped, "problem": problem}


def write_json(path: Path, data: Any) -> None:
    """Write a file so that a reader sees all of it or none, mode 0600."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(fd)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
