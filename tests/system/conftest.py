"""A control plane in a process of its own with a worker that needs no tensors, for the command and the pages."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from twinstep.cli.app import run as run_command


@dataclass
class Plane:
    """A control plane's process, and a client of it."""

    data_dir: Path
    port: int = 0
    kubeconfig: Path | None = None
    """Of the cluster that TPU and GPU jobs run in."""
    url: str = ""
    process: subprocess.Popen[str] | None = None
    http: httpx.Client = field(init=False)

    def start(self) -> None:
        """Start it, or start it again on the same port and data."""
        script = Path(__file__).parent / "curve_server.py"
        cluster = [] if self.kubeconfig is None else [str(self.kubeconfig)]
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(self.data_dir), str(self.port), *cluster],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the control plane did not start"
        self.port = int(self.url.rsplit(":", 1)[1])
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self.http.close()

    def submit(self, name: str, **spec: Any) -> dict[str, Any]:
        """Submit a job over HTTP and return it."""
        answer = self.http.post("/v1/jobs", json={"name": name, **spec})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def when(self, job_id: str, *states: str, seconds: float = 30) -> dict[str, Any]:
        """Return the job once it is in one of `states`."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            job = self.http.get(f"/v1/jobs/{job_id}").json()
            if job["state"] in states:
                return dict(job)
            if job["state"] in ("succeeded", "failed", "cancelled"):
                break
            time.sleep(0.05)
        raise AssertionError(f"{job_id} is {job['state']}: {job['reason']}")

    def cancel_all(self) -> None:
        """Leave no worker behind."""
        jobs = self.http.get("/v1/jobs", params={"limit": 200}).json()["items"]
        live = [job["id"] for job in jobs if job["state"] not in ("succeeded", "failed", "cancelled")]
        for job_id in live:
            self.http.post(f"/v1/jobs/{job_id}/cancel")
        for job_id in live:
            self.when(job_id, "succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """One control plane for a test file."""
    plane = Plane(tmp_path_factory.mktemp("plane") / "data")
    plane.start()
    try:
        yield plane
        plane.cancel_all()
    finally:
        plane.kill()


@pytest.fixture(scope="session")
def make_plane() -> type[Plane]:
    """What a test makes a control plane of its own with."""
    return Plane


@pytest.fixture
def ask(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command within this process: a second faster, for what does not depend on being a process."""
    monkeypatch.setenv("TWINSTEP_URL", plane.url)

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command(args)
        return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def twinstep(plane: Plane) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command as a process, pointed at the control plane."""

    def run(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"TWINSTEP_URL": plane.url} | (env or {})
        return subprocess.run(
            [sys.executable, "-m", "twinstep", *args],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )

    return run


CHROMIUM = Path(os.environ.get("TWINSTEP_CHROMIUM", "/usr/bin/chromium"))
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "dashboard.png"
ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SOON = 15_000  # milliseconds a busy machine may take for what takes half a second


@pytest.fixture(scope="module")  # not longer: as long as it lives, this thread counts as one that runs an event loop
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"no Chromium at {CHROMIUM}; TWINSTEP_CHROMIUM names another")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGS)
        yield browser
        browser.close()


def expected(said: str) -> bool:
    """Say whether a page may say this without a fault of ours.

    A page that is left, or closed at a test's end, aborts what it was still loading: nothing was refused or missing.
    A path that leads nowhere is a page with status 404, which tests ask for, and Chromium says so. Any other request
    that fails, such as for a script that is not there or one that the page's policy forbids, is a complaint.
    """
    return (said.startswith("failed: ") and said.endswith(": net::ERR_ABORTED")) or "status of 404" in said


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may ask only this machine, and must not complain."""
    context = browser.new_context(viewport={"width": 1320, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(SOON)
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}: {request.failure}"))
    hosts: set[str | None] = set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.on("websocket", lambda socket: hosts.add(urlsplit(socket.url).hostname))
    yield page
    context.close()
    assert [said for said in complaints if not expected(said)] == []
    assert hosts - {None} <= {"127.0.0.1"}


@dataclass
class Charts:
    """What the charts of a page hold and show."""

    page: Page

    def points(self, chart: int, line: int = 0) -> list[list[float]]:
        """Return the points that ECharts itself holds; a line has two more series for its band."""
        return self.page.evaluate(  # type: ignore[no-any-return]
            """([chart, line]) => {
                const element = document.querySelectorAll('.tw-chart')[chart];
                return getElement(Number(element.id.slice(1))).chart.getOption().series[3 * line].data;
            }""",
            [chart, line],
        )

    def until(self, check: Callable[[], bool]) -> None:
        """Wait until it holds; charts tell nobody when they have drawn."""
        ends = time.monotonic() + SOON / 1000
        while not check():
            assert time.monotonic() < ends, "it did not come to pass in time"
            self.page.wait_for_timeout(50)

    def painted(self, chart: int) -> int:
        """Return how many pixels of a chart's canvas are not empty."""
        return self.page.evaluate(  # type: ignore[no-any-return]
            """(chart) => {
                const canvas = document.querySelectorAll('.tw-chart')[chart].querySelector('canvas');
                const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                return data.filter((value, index) => index % 4 === 3 && value > 0).length;
            }""",
            chart,
        )


@pytest.fixture
def charts(page: Page) -> Charts:
    return Charts(page)
