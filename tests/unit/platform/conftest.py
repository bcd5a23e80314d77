"""Control planes for tests: real store, real processes, real HTTP on a free port of the loopback interface."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from twinstep.platform.server import ControlPlane, assemble
from twinstep.platform.settings import Settings
from twinstep.platform.store.store import Store

WORKER = (sys.executable, str(Path(__file__).parent / "stand_in_worker.py"))


def eventually(check: Callable[[], Any], *, seconds: float = 20) -> Any:
    """Return the first true value of `check`, or fail once the time is over."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := check():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come to pass in time")


@dataclass
class Live:
    """A control plane that answers."""

    plane: ControlPlane
    http: httpx.Client

    def submit(self, name: str, **spec: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json={"name": name, **spec})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def job(self, job_id: str) -> dict[str, Any]:
        return self.http.get(f"/v1/jobs/{job_id}").json()

    def when(self, job_id: str, *states: str) -> dict[str, Any]:
        def check() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in states else None

        return eventually(check)

    def run_dir(self, job: dict[str, Any]) -> Path:
        return self.plane.settings.runs_dir / job["run_id"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path / "data")


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    store = Store(settings.database)
    yield store
    store.close()


@contextmanager
def control_plane(settings: Settings) -> Iterator[Live]:
    """A whole control plane in this process, without pages; leaves no process behind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plane = assemble(replace(settings, port=listener.getsockname()[1]), pages=False)
        plane.reconciler.start()
        server = uvicorn.Server(uvicorn.Config(plane.app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started)
        with httpx.Client(base_url=plane.settings.url, timeout=20, trust_env=False) as http:
            yield Live(plane, http)
            for run in plane.store.live_runs():
                plane.service.cancel_job(run.job_id)
            eventually(lambda: not plane.store.live_runs())
        plane.service.closing.set()
        server.should_exit = True
        thread.join(timeout=20)
        plane.close()


def settings_in(directory: Path) -> Settings:
    return Settings(data_dir=directory, worker_command=WORKER, port=0, reconcile_seconds=0.05, stream_seconds=0.02)


@pytest.fixture
def live(settings: Settings) -> Iterator[Live]:
    """A control plane of the test's own."""
    with control_plane(settings) as live:
        yield live


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One control plane for tests that look at nothing but what they made, or make nothing."""
    with control_plane(settings_in(tmp_path_factory.mktemp("shared") / "data")) as live:
        yield live


@pytest.fixture
def wait() -> Callable[..., Any]:
    return eventually
