"""Start a run's processes on this machine, each a rank, and end with what ended the first of them.

Signals go on to every process. When one fails, the others, which would wait for it in vain, are told to stop and then
killed; the launcher's exit code is that of the first failure. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.words import follows
from twinstep.worker.train.output import giving_up
from twinstep.worker.train.ranks import Ranks

PATIENCE = 10.0  # seconds
LOOPBACK = "127.0.0.1"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def launch(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = lambda text: None,
    ends_process: bool = False,
) -> int:
    """Run `command` as so many ranks and return the exit code of all: 0, or the first failure's.

    A process that a signal ended counts as 128 + its number. Rank 0 has this process's standard output; the others'
    goes nowhere, so that nothing is said twice. Standard error is everyone's.

    Args:
        environment: of the processes, without the variables of `ranks.py`; None: this process's.
        patience: seconds that the rest has, after a failure, to end by itself, and then to end when it is asked to.
        say: is told which process failed first.
        ends_process: this process ends then, with an exit code that no signal is to change any more.
    """
    with keep_port(LOOPBACK) as held, _Processes() as started, _forwarding(started.ask, ends_process=ends_process):
        port = held.getsockname()[1]
        for rank in range(processes):
            ranks = Ranks(rank=rank, size=processes, local=rank, on_host=processes, address=LOOPBACK, port=port)
            base = os.environ if environment is None else environment
            # gloo asks the host's name for its address, which need not be one that this host answers to.
            own = {"GLOO_SOCKET_IFNAME": _loopback(), **base, **ranks.as_environment()}
            started.start(rank, command, own)
        return started.wait(patience=patience, say=say)


def launch_spec(spec: JobSpec, *, processes: int, as_json: bool) -> int:
    """Train `spec` in so many processes on this machine; return the exit code of `launch`.

    Raises:
        SpecError: the spec's tables are kept by an engine that runs in one process.
    """
    if spec.embedding.engine != "torchrec":
        raise SpecError(
            f"{processes} processes are asked for, and embedding.engine {spec.embedding.engine} runs in one here",
            remedy="set embedding.engine: torchrec, or runtime.processes: 1",
        )
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="twinstep-", encoding="utf-8") as file:
        file.write(spec.model_dump_json())
        file.flush()
        command = [sys.executable, "-m", "twinstep", "train", file.name, *(["--json"] if as_json else [])]
        return launch(command, processes, say=_say_aside, ends_process=True)


def _say_aside(text: str) -> None:
    """Print a line on standard error: standard output is rank 0's."""
    with giving_up(sys.stderr):
        print(text, file=sys.stderr, flush=True)


class _Processes:
    """The processes by rank; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        """By pidfd: rank and process."""
        self._asked: list[int] = []
        """Signals that were passed on, which those that start later have not heard."""

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        silent = rank > 0
        process = subprocess.Popen(  # noqa: S603
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL if silent else None,
            stdout=subprocess.DEVNULL if silent else None,
            preexec_fn=end_with_parent,
        )
        handle = os.pidfd_open(process.pid)
        with _held_back():  # each signal comes before this, and is told here, or after it, and is told by `ask`
            self._running[handle] = (rank, process)
            missed = list(self._asked)
        for number in missed:
            signal.pidfd_send_signal(handle, number)

    def ask(self, number: int) -> None:
        """Pass a signal of this process's on; how long to take over it is then for whoever sent it to say."""
        self._asked.append(number)
        self.signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to all that run."""
        for handle in self._running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)

    def wait(self, *, patience: float, say: Callable[[str], None]) -> int:
        """Wait for all; return 0 or the first failure's code."""
        code, deadline, followed = 0, None, False
        means = iter((signal.SIGTERM, signal.SIGKILL))
        while self._running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = self._ended(left)
            failures = [(rank, found) for rank, found in ended if found]
            if not ended:
                followed = True  # whatever ends from here on was told to
                self.signal(next(means, signal.SIGKILL))
                deadline = time.monotonic() + patience
                continue
            # Of those that ended at once, one that a signal killed is the cause and not what follows from it; but a
            # peer that is gone ends others by SIGABRT, or is missed by them, which may be seen first.
            rank, found = min(failures, key=lambda each: (follows(each[1]), -each[1]), default=(0, 0))
            if found and (not code or (follows(found) < follows(code) and not followed)):
                if code:
                    say(f"process {rank} of this run ended with code {found}, which is why")
                code = found
                if self._running and not self._asked and deadline is None:
                    say(f"process {rank} of this run ended with code {code}; the others are stopped")
                    deadline = time.monotonic() + patience  # most see for themselves that it is gone, and say so
        return code

    def _ended(self, timeout: float | None) -> list[tuple[int, int]]:
        """Return rank and code of those that ended, as soon as there are any; none: the time is over."""
        poll = select.poll()
        for handle in self._running:
            poll.register(handle, select.POLLIN)
        found = []
        for handle, _ in poll.poll(None if timeout is None else timeout * 1e3):
            rank, process = self._running.pop(handle)
            os.close(handle)
            code = process.wait()
            found.append((rank, code if code >= 0 else 128 - code))
        return found

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        while self._running:
            self._ended(None)


def end_with_parent() -> None:
    """Let the kernel end this process when its launcher is killed, which then could not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Let no signal that is passed on arrive meanwhile; processes may not be started here, they would inherit it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _forwarding(send: Callable[[int], None], *, ends_process: bool) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends_process else handler)


def keep_port(host: str) -> socket.socket:
    """Return a socket on a free port of `host`, which keeps the port from others that ask for any until rank 0 listens.

    A socket that is bound without listening, with SO_REUSEADDR, does not hinder one that listens with the same option.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
