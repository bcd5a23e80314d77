"""One control plane as a process: claim the port, then the data directory, open the store, look after runs, serve.

The order matters: whatever is refused is refused before anything is made, or leaves nothing behind. What is made is
its user's alone. Ending leaves the runs running; the next control plane on the same data directory finds them again.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from twinstep.platform.api import create_app
from twinstep.platform.api.waiting import Waiting, answering
from twinstep.platform.dashboard import mount
from twinstep.platform.scheduler.accounts import refuse_unprotected
from twinstep.platform.scheduler.cluster.connect import Connection, check_access, connect
from twinstep.platform.scheduler.local import LocalBackend
from twinstep.platform.scheduler.passes import Passes
from twinstep.platform.scheduler.reconcile import Reconciler
from twinstep.platform.scheduler.service import Service
from twinstep.platform.scheduler.supervise import write_json
from twinstep.platform.scheduler.webhooks import Messenger, Target
from twinstep.platform.settings import Settings, is_loopback
from twinstep.platform.store.outbox import Outbox
from twinstep.platform.store.store import Store
from twinstep.spec.errors import UnavailableError

SERVER_FILE = "server.json"  # in the data directory: {"url": …, "pid": …}; there as long as the control plane is
DATABASE_WAIT_S = 60.0  # both may have been started at once; longer, and whoever started this one is told
GC_AFTER = (10_000, 20, 20)  # of CPython's thresholds: what a request makes is no garbage while it is worked on
TURN_S = 0.001  # a thread that works without a pause lets another one on after so long
_BACKLOG = 256
_GRACE_S = 5  # for requests under way when the control plane is told to end


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The parts of a control plane that is assembled and not yet started."""

    settings: Settings
    store: Store
    backend: LocalBackend
    reconciler: Reconciler
    service: Service
    messenger: Messenger
    app: FastAPI
    cluster: Connection | None = None
    """To the cluster that TPU and GPU jobs run in, where there is one."""

    def start(self) -> None:
        """Begin to look after runs, and to tell webhooks of them."""
        self.reconciler.start()
        if self.cluster is not None:
            self.cluster.start()
        self.messenger.start()

    def close(self) -> None:
        """End what was started and close the store; runs go on."""
        self.service.closing.set()
        self.messenger.stop()
        self.reconciler.stop()
        if self.cluster is not None:
            self.cluster.stop()
        self.backend.let_go()
        self.store.close()


def assemble(
    settings: Settings,
    *,
    pages: bool = True,
    wait_s: float = 0.0,
    on_wait: Callable[[str], None] = lambda problem: None,
) -> ControlPlane:
    """Open the store, whose server is waited for so long, and put the parts together; nothing runs yet.

    `on_wait` is told meanwhile what keeps the database from answering.

    Raises:
        UnavailableError: the data directory or the database cannot be used.
    """
    if settings.cluster is not None:
        check_access(settings.cluster)
    store = Store(settings.database, wait_s=wait_s, on_wait=on_wait)
    backend = LocalBackend(settings.runs_dir, command=settings.worker_command, api_url=settings.url)
    reconciler = Reconciler(
        store,
        backend,
        max_parallel_runs=settings.max_parallel_runs,
        runs_modules=settings.runs_modules,
        every_seconds=settings.reconcile_seconds,
    )
    try:
        cluster = None if settings.cluster is None else connect(settings, settings.cluster, store)
    except UnavailableError:
        store.close()
        raise
    passes: list[Passes] = [reconciler, *([cluster.reconciler] if cluster is not None else [])]

    def nudge() -> None:
        for each in passes:
            each.nudge()

    def age() -> float | None:
        ages = [each.age() for each in passes]
        return None if None in ages else max(found for found in ages if found is not None)

    service = Service(
        store,
        settings,
        nudge=nudge,
        reconciler_age=age,
        cluster_health=lambda: None if cluster is None else cluster.health(),
        cluster_figures=lambda: None if cluster is None else cluster.figures(),
    )
    app = create_app(service)
    if pages:
        mount(app, service, settings)
    messenger = Messenger(Outbox(store.database), Target(settings))
    return ControlPlane(settings, store, backend, reconciler, service, messenger, app, cluster)


def serve(settings: Settings, *, on_ready: Callable[[str], None] = lambda url: None, pages: bool = True) -> None:
    """Run a control plane until it is told to end (SIGINT, SIGTERM); `on_ready` gets its URL once it answers.

    Raises:
        UnavailableError: the port or the data directory is in use or cannot be used; nothing is left behind.
    """
    with contextlib.ExitStack() as stack:
        # Files of every run come from here, by way of SQLite, supervisors and workers: one mask holds for them all.
        stack.callback(os.umask, os.umask(0o077))
        refuse_unprotected(settings)
        listener = stack.enter_context(_listen(settings))
        settings = replace(settings, port=listener.getsockname()[1])
        stack.enter_context(_claim(settings.data_dir))
        plane = _assembled(settings, listener, pages=pages)
        stack.callback(plane.close)
        plane.service.accounts.prepare(settings)
        plane.start()
        settle()
        server = _Server(plane, on_ready)
        with _ended_by_sigterm(server), contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def settle() -> None:
    """Let no thread of this process, once it is put together, keep the event loop waiting for long.

    To look through all that was loaded, for garbage that cannot be there, stops every thread for a tenth of a second
    and more; and whoever works without a pause keeps its turn for 5 ms, which each request would wait again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_AFTER)
    sys.setswitchinterval(TURN_S)


def _assembled(settings: Settings, listener: socket.socket, *, pages: bool) -> ControlPlane:
    """Put the parts together; probes are answered while a database's server is waited for, or tables are made."""
    if settings.database_url is None:
        return assemble(settings, pages=pages)
    waiting = Waiting(tells_addresses=is_loopback(settings.host))
    with answering(listener, waiting):
        return assemble(settings, pages=pages, wait_s=DATABASE_WAIT_S, on_wait=waiting.on_wait)


class _Server(uvicorn.Server):
    """uvicorn, which tells when it answers, and ends live streams before it waits for them."""

    def __init__(self, plane: ControlPlane, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                plane.app,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
                # Whoever reaches it from afar is kept to 64 KiB of headers; the quicker parser holds whatever comes.
                http="auto" if is_loopback(plane.settings.host) else "h11",
                proxy_headers=False,  # where a request came from is what the audit log and the limits go by
            )
        )
        self._plane = plane
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then write where."""
        await super().startup(sockets=sockets)
        if self.started:
            settings = self._plane.settings
            write_json(settings.data_dir / SERVER_FILE, {"url": settings.url, "pid": os.getpid()})
            self._on_ready(settings.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End: streams first, else the grace is spent waiting for them."""
        self._plane.service.closing.set()
        super().handle_exit(sig, frame)


@contextlib.contextmanager
def _listen(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last connections still linger may be taken again; one that somebody listens on may not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            raise UnavailableError(
                f"port {settings.port} on {settings.host} cannot be used: {error.strerror or error}",
                remedy="stop what listens there, or choose another with --port (0 takes a free one)",
            ) from None
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def _claim(data_dir: Path) -> Iterator[None]:
    """Hold the data directory: two control planes on one would each look after the other's runs.

    Where what follows fails before there is a database, what was made here is taken away again.
    """
    path = data_dir / "lock"
    try:
        made = [folder for folder in (data_dir, *data_dir.parents) if not folder.exists()]
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _close_to_others(data_dir)
        new = not path.exists()
        lock = path.open("a")
    except OSError as error:
        raise UnavailableError(
            f"the data directory {data_dir} cannot be used: {error.strerror or error}",
            remedy="set TWINSTEP_DATA_DIR (or --data-dir) to a directory you can write",
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                raise BlockingIOError  # its holder took it away a moment ago: this one keeps nobody out
        except BlockingIOError:
            other = running(data_dir) or {}
            raise UnavailableError(
                f"another control plane uses {data_dir}" + (f": {other['url']} (pid {other['pid']})" if other else ""),
                remedy="use that one, or stop it first, or give this one another data directory",
            ) from None
        try:
            yield
        except UnavailableError:
            with contextlib.suppress(OSError):
                if new:
                    path.unlink()
                for folder in made:
                    folder.rmdir()
            raise
        finally:
            (data_dir / SERVER_FILE).unlink(missing_ok=True)


def _close_to_others(data_dir: Path) -> None:
    """Close a data directory to others: whoever can write it can put code into a run.

    One that holds nothing, or a control plane's lock, is ours to close. One that holds other things is left as it is.

    Raises:
        UnavailableError: it holds other things, and others may write it.
    """
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if mode & 0o077 and ((data_dir / "lock").exists() or not any(data_dir.iterdir())):
        data_dir.chmod(0o700)
    elif mode & 0o022:
        raise UnavailableError(
            f"the data directory {data_dir} holds other files, and other users can write it (mode {mode:o})",
            remedy=f"give a directory of its own, or close it: chmod go-w {data_dir}",
        )


def running(data_dir: Path) -> dict[str, Any] | None:
    """Return `url` and `pid` of the control plane on `data_dir`, as its file says; None where there is none.

    The file of one that was killed may still be there: whoever needs to know asks the URL.
    """
    try:
        told = json.loads((data_dir / SERVER_FILE).read_bytes())
        return {"url": str(told["url"]), "pid": int(told["pid"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _ended_by_sigterm(server: _Server) -> Iterator[None]:
    """Take SIGTERM outside uvicorn's own handling: before it begins, and when it sends the signal again at its end.

    Either way the server ends in its own time, and what this process made is tidied.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
