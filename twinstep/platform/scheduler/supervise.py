"""Watch one worker from start to end: `python -m twinstep.platform.scheduler.supervise ORDER`.

Runs apart from the control plane, in a session of its own, so that either may end without the other. It starts the
worker in a process group, asks it to stop on SIGTERM, at the time limit or when the run's directory is gone, kills it
after the grace, and writes how it ended. A worker that was killed, hung or failed is started again where the spec
grants restarts, and goes on from its last checkpoint. Imports the standard library only; knows no store and no network.
A run is never started twice: the lock, and the files this writes before the worker starts, turn a second one away.
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
PAUSE_S = 1.0  # seconds before a worker is started again: what made it end may pass
NEVER_AGAIN = (0, 2)  # exit codes: it is done; its user has something to mend (EXIT_SPEC in spec/words.py)
LONGEST_WAIT_S = 3600.0  # a limit of many years is more than the system call takes
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what comes of a wish to stop
_WATCHED = {signal.SIGCHLD, *ASKS}


def main(text: str) -> int:
    """Run the worker an order describes; return 0, also where another supervisor has the run already.

    The order is JSON: run_dir, command (list), max_seconds (or null), stop_grace_seconds; restarts and hang_seconds
    where they are not 0 and null. The worker gets this process's own environment, so no secret is ever an argument.
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
        self.restarts = 0
        self.began = time.monotonic()
        self.heart = _Heart(run_dir / "heartbeat", order.get("hang_seconds"))

    def run(self) -> None:
        self._tell({"worker": None})
        limit = self.order["max_seconds"]
        ends_at = None if limit is None else time.monotonic() + limit
        while True:
            how = self._attempt(ends_at)
            if not self._goes_on(how):
                self._tell_end(how)
                return

    def _goes_on(self, how: dict[str, Any]) -> bool:
        """Say whether the worker is to be started again, after a pause in which a wish to stop is heard."""
        if self.restarts >= self.order.get("restarts", 0) or how["stopped"] not in (None, "hung"):
            return False
        if how["problem"] or (how["stopped"] is None and how["code"] in NEVER_AGAIN):
            return False
        self.restarts += 1
        ends = time.monotonic() + PAUSE_S
        told = {"count": self.restarts, "reason": _in_words(how), "step": self.heart.step()}
        os.environ["TWINSTEP_RESTART"] = json.dumps(told | {"seconds": round(ends - self.began, 3)})
        self.stopped = self.kill_at = None
        while (got := self._wait(ends)) is not None:
            if got != signal.SIGCHLD:
                how["stopped"] = "asked"
                return False
        return True

    def _attempt(self, ends_at: float | None) -> dict[str, Any]:
        """Run the worker from start to end, and return how it ended."""
        self.heart.forget()
        try:
            worker = self._start()
        except OSError as error:
            return ending(code=127, problem=f"the worker cannot be started: {error}")
        started = Process.of(worker.pid)
        self._tell({"worker": started.to_json() if started else {"pid": worker.pid}})
        while not _ended(worker.pid):
            look_at = None if self.stopped else time.monotonic() + LOOK_S
            waits = [at for at in (ends_at if self.stopped is None else None, self.kill_at, look_at) if at is not None]
            got = self._wait(min(waits, default=None))
            now = time.monotonic()
            if got in ASKS and self.stopped is None:
                self._stop(worker.pid, why="asked")
            elif got in ASKS and self.stopped == "hung":
                self.stopped = "asked"  # it is being stopped as it is; it must not be started again
            elif self.stopped is None and ends_at is not None and now >= ends_at:
                self._stop(worker.pid, why="time_limit")
            elif self.stopped is None and self._homeless():
                self._stop(worker.pid, why="homeless")  # nothing it does or says is kept any more
            elif self.stopped is None and self.heart.stands_still():
                self._stop(worker.pid, why="hung")
            elif self.kill_at is not None and now >= self.kill_at:
                self.kill_at = None
                _signal_group(worker.pid, signal.SIGKILL)
        # The leader is not yet reaped, so its group's number is still its own: what is left in it is ours to kill.
        _signal_group(worker.pid, signal.SIGKILL)
        code = worker.wait()
        return ending(
            code=code if code >= 0 else None,
            signal_name=_name(-code) if code < 0 else None,
            stopped=self.stopped,
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


class _Heart:
    """Whether the worker gets on: its heartbeat file says in which phase it is, and changes with each step.

    Only whether the file changes is looked at, and how long it does not by this process's own clock.
    """

    def __init__(self, path: Path, limit: float | None) -> None:
        self._path, self._limit = path, limit
        self._seen, self._since = b"", time.monotonic()

    def forget(self) -> None:
        """Begin anew, for a worker that is about to start."""
        self._path.unlink(missing_ok=True)
        self._seen, self._since = b"", time.monotonic()

    def stands_still(self) -> bool:
        """Say whether a worker that trains has ended no step for too long."""
        now, told = time.monotonic(), self._read()
        if told != self._seen or self._told().get("phase") != "training":
            self._seen, self._since = told, now
            return False
        return self._limit is not None and now - self._since > self._limit

    def step(self) -> int:
        """Return how many steps the worker has told of."""
        step = self._told().get("step")
        return step if isinstance(step, int) else 0

    def _told(self) -> dict[str, Any]:
        try:
            found = json.loads(self._read() or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""


def _in_words(how: dict[str, Any]) -> str:
    """Say how the worker before ended."""
    if how["stopped"] == "hung":
        return "the worker before hung, and was stopped"
    if how["signal"]:
        return f"the worker before was ended by {how['signal']}"
    return f"the worker before ended with exit code {how['code']}"


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
    """Return what `exit.json` holds. `stopped` says who ended it: null (itself), asked, time_limit, hung."""
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
