"""Control planes for tests: real store, real processes, real HTTP on a free port of the loopback interface.

A test that takes `settings`, `store`, `live`, `shared` or `databases` runs on SQLite and on PostgreSQL. A module about
something else names what it needs: `DATABASES = ("sqlite",)`.
"""

from __future__ import annotations

import itertools
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn

from bench.postgres import NoServerError, Server, postgres
from twinstep.platform.server import ControlPlane, assemble
from twinstep.platform.settings import Settings
from twinstep.platform.store.store import Store
from twinstep.platform.store.users import Users
from twinstep.spec.errors import ConflictError
from twinstep.spec.roles import Role

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


BOTH = ("sqlite", "postgresql")
TEMPLATE = "twinstep_template"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "databases" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "DATABASES", BOTH)
        metafunc.parametrize("databases", kinds, indirect=True, scope="module")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server for the whole session, with a database that others are copied from."""
    try:
        with postgres() as server:
            Postgres(server).execute(f"CREATE DATABASE {TEMPLATE}")
            Store(server.url(TEMPLATE)).close()
            yield server
    except NoServerError as error:
        pytest.skip(f"no PostgreSQL runs here: {error}")


class Postgres:
    """Databases of a server, copied from one whose tables are made, and dropped."""

    kind = "postgresql"
    _numbers = itertools.count(1)

    def __init__(self, server: Server) -> None:
        self.server = server
        self._made: list[str] = []

    def new(self) -> str:
        """Make an empty database with tables and return its URL."""
        name = f"twinstep_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        self._made.append(name)
        return self.server.url(name)

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            connection.execute(statement)

    def drop(self) -> None:
        while self._made:
            self.execute(f"DROP DATABASE {self._made.pop()} WITH (FORCE)")


class Sqlite:
    """Databases in files of a directory."""

    kind = "sqlite"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)

    def new(self) -> str:
        """Return the URL of a database that is made when it is opened."""
        return f"sqlite:///{self._directory}/{next(self._numbers)}.db"


@pytest.fixture(scope="module")
def databases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sqlite | Postgres]:
    """Fresh databases, of one kind: `databases.new()` gives a URL."""
    if request.param == "sqlite":
        yield Sqlite(tmp_path_factory.mktemp("databases"))
        return
    made = Postgres(request.getfixturevalue("server"))
    yield made
    made.drop()


@pytest.fixture(scope="module")
def one_store(databases: Sqlite | Postgres) -> Iterator[Store]:
    """One store for tests that make up many cases and look at nothing but what each of them made."""
    with closing(Store(databases.new())) as store:
        yield store


@pytest.fixture
def database_url(databases: Sqlite | Postgres) -> str | None:
    """URL of a database of the test's own; None for a file in its data directory."""
    return None if databases.kind == "sqlite" else databases.new()


@pytest.fixture
def settings(tmp_path: Path, database_url: str | None) -> Settings:
    return replace(settings_in(tmp_path / "data"), database_url=database_url)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with closing(Store(settings.database)) as store:
        yield store


@contextmanager
def control_plane(settings: Settings) -> Iterator[Live]:
    """A whole control plane in this process, without pages; leaves no process behind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plane = assemble(replace(settings, port=listener.getsockname()[1]), pages=False)
        plane.start()
        server = uvicorn.Server(uvicorn.Config(plane.app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started)
        with httpx.Client(base_url=plane.settings.url, timeout=20, trust_env=False) as http:
            yield Live(plane, http)
            for run in plane.store.live_runs():
                with suppress(ConflictError):  # it has ended since it was listed
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
def shared(databases: Sqlite | Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One control plane for tests that look at nothing but what they made, or make nothing."""
    settings = replace(settings_in(tmp_path_factory.mktemp("shared") / "data"), database_url=databases.new())
    with control_plane(settings) as live:
        yield live


@pytest.fixture
def wait() -> Callable[..., Any]:
    return eventually


@pytest.fixture
def users(live: Live) -> Users:
    return live.plane.service.accounts.users


@pytest.fixture
def admin(live: Live, users: Users) -> str:
    """The first token: from now on a login is asked for."""
    _, secret = users.create_token("root", role=Role.ADMIN, everywhere=True, created_by="test")
    live.plane.service.accounts.look_again()
    return secret


@pytest.fixture
def ask(live: Live) -> Callable[..., httpx.Response]:
    """Ask with a token, in place of all that this client has."""

    def asking(secret: str, method: str = "GET", path: str = "/v1/jobs", **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {secret}", **options.pop("headers", {})}
        return live.http.request(method, path, headers=headers, **options)

    return asking


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Leave logging as it was: a command that runs within a test points it at the test's own output."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level
