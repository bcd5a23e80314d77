"""Whole control planes as processes: killed, restarted, ended, refused. Real signals, real workers, real HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from twinstep.platform.scheduler.procs import Process
from twinstep.platform.server import running, serve
from twinstep.platform.settings import Settings
from twinstep.spec.errors import UnavailableError

WORKER = Path(__file__).parents[1] / "unit" / "platform" / "stand_in_worker.py"
PROGRAM = """
import sys
from pathlib import Path
from twinstep.platform.server import serve
from twinstep.platform.settings import Settings
directory, port, worker, pages = sys.argv[1:]
serve(
    Settings(
        data_dir=Path(directory), port=int(port), worker_command=(sys.executable, worker), reconcile_seconds=0.05
    ),
    on_ready=lambda url: print(url, flush=True),
    pages=bool(pages),
)
"""


def until(check: Callable[[], Any], *, seconds: float = 30) -> Any:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with contextlib.suppress(httpx.TransportError):
            if value := check():
                return value
        time.sleep(0.03)
    raise AssertionError("it did not come to pass in time")


class Machine:
    """One data directory and one port, and the control planes that come and go on them."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=10, trust_env=False)
        self.process: subprocess.Popen[str] | None = None

    def up(self, *, pages: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.data_dir), str(self.port), str(WORKER), "x" if pages else ""],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip() == self.url, line + self.process.stdout.read()

    def end(self, number: signal.Signals) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=30)
        code, self.process = self.process.returncode, None
        return code, output

    def submit(self, name: str, **spec: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json={"name": name, **spec})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def when(self, job_id: str, *states: str) -> dict[str, Any]:
        def check() -> dict[str, Any] | None:
            job = self.http.get(f"/v1/jobs/{job_id}").json()
            return job if job["state"] in states else None

        return until(check)

    def supervisor(self, job: dict[str, Any]) -> dict[str, Any]:
        path = self.data_dir / "runs" / job["run_id"] / "supervisor.json"

        def check() -> dict[str, Any] | None:
            told = json.loads(path.read_text()) if path.exists() else None
            return told if told and told["worker"] else None

        return until(check)

    def close(self) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)
        for path in self.data_dir.glob("runs/*/supervisor.json"):
            if process := Process.from_json(json.loads(path.read_text())):
                process.send(signal.SIGTERM)
                until(lambda found=process: not found.alive())
        self.http.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "data")
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One that is up, with pages, in a directory that was there before, for tests that leave it as it is."""
    machine = Machine(tmp_path_factory.mktemp("standing") / "data")
    machine.data_dir.mkdir(mode=0o755)
    left = {"url": "http://127.0.0.1:1", "pid": 1}  # by one that was killed
    (machine.data_dir / "lock").touch(0o600)
    (machine.data_dir / "server.json").write_text(json.dumps(left))
    machine.up(pages=True)
    yield machine
    machine.close()


def test_a_control_plane_killed_again_and_again_loses_no_point_and_no_event(machine: Machine) -> None:
    machine.up()
    job = machine.submit("reports-100")
    machine.end(signal.SIGKILL)  # once before its worker is up, once in the middle
    machine.up()
    until(lambda: machine.http.get(f"/v1/jobs/{job['id']}/metrics").json()["items"])
    machine.end(signal.SIGKILL)
    spool = machine.data_dir / "runs" / job["run_id"] / "spool.jsonl"
    size = spool.stat().st_size
    until(lambda: spool.stat().st_size > size + 300)  # a few reports that nobody hears
    machine.up()
    done = machine.when(job["id"], "succeeded", "failed", "cancelled")
    assert (done["state"], done["reason"]) == ("succeeded", "its worker finished")
    points = machine.http.get(f"/v1/jobs/{job['id']}/metrics", params={"limit": 10000}).json()["items"]
    assert [point["step"] for point in points] == list(range(1, 101))
    events = machine.http.get(f"/v1/jobs/{job['id']}/events").json()["items"]
    assert [event["name"] for event in events] == ["submitted"] + ["state_changed"] * 4
    starts = (machine.data_dir / "runs" / job["run_id"] / "starts").read_text().split()
    assert len(starts) == 1


def test_a_control_plane_that_is_told_to_end_leaves_its_runs_running(machine: Machine) -> None:
    machine.up()
    job = machine.submit("sleeps")
    worker = Process.from_json(machine.supervisor(job)["worker"])
    assert worker is not None
    with machine.http.stream("GET", f"/v1/jobs/{job['id']}/stream") as stream:  # nor does a follower hold it up
        next(stream.iter_lines())
        assert machine.end(signal.SIGTERM) == (0, "")
    assert not (machine.data_dir / "server.json").exists()
    assert worker.alive()
    machine.up()
    machine.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert machine.when(job["id"], "cancelled", "failed")["state"] == "cancelled"
    assert not worker.alive()


def test_a_run_that_ends_while_nobody_looks_is_settled_by_the_next_control_plane(machine: Machine) -> None:
    machine.up()
    job = machine.submit("reports-10")
    machine.supervisor(job)
    machine.end(signal.SIGKILL)
    until((machine.data_dir / "runs" / job["run_id"] / "exit.json").exists)
    machine.up()
    assert machine.when(job["id"], "succeeded", "failed")["state"] == "succeeded"
    points = machine.http.get(f"/v1/jobs/{job['id']}/metrics").json()["items"]
    assert [point["step"] for point in points] == list(range(1, 11))


def test_a_killed_supervisor_fails_its_run_and_leaves_no_worker(machine: Machine) -> None:
    machine.up()
    job = machine.submit("sleeps")
    told = machine.supervisor(job)
    os.kill(told["pid"], signal.SIGKILL)
    failed = machine.when(job["id"], "failed", "succeeded")
    assert failed["reason"].startswith("its supervisor vanished")
    worker = Process.from_json(told["worker"])
    assert worker is not None
    until(lambda: not worker.alive())


def test_a_control_plane_whose_directory_is_taken_away_says_so_and_takes_no_job(machine: Machine) -> None:
    machine.up(pages=True)
    until(lambda: machine.http.get("/readyz").status_code == 200)
    away = machine.data_dir.with_name("away")
    machine.data_dir.rename(away)
    refused = machine.http.post("/v1/jobs", json={"name": "lost"})
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert str(machine.data_dir) in refused.json()["detail"]
    assert machine.http.get("/readyz").status_code == 503
    assert machine.http.get("/healthz").status_code == 200
    assert machine.http.get("/").status_code in (200, 503)
    away.rename(machine.data_dir)  # the very one: nothing is lost, and it goes on
    done = machine.submit("reports-1")
    assert machine.when(done["id"], "succeeded", "failed")["state"] == "succeeded"
    shutil.rmtree(machine.data_dir)
    machine.data_dir.mkdir()
    assert machine.http.get("/readyz").status_code == 503
    assert machine.http.post("/v1/jobs", json={"name": "lost"}).status_code == 503
    time.sleep(0.5)  # a few passes of the reconciler
    code, said = machine.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in said
    assert list(machine.data_dir.iterdir()) == []


@pytest.mark.parametrize(("name", "cancels"), [("sleeps", False), ("sleeps", True), ("stubborn", False)])
def test_a_run_whose_directory_is_taken_away_ends_and_frees_its_slot(
    machine: Machine, name: str, cancels: bool
) -> None:
    machine.up()
    job = machine.submit(name, runtime={"stop_grace_seconds": 1})
    told = machine.supervisor(job)
    supervisor, worker = Process.from_json(told), Process.from_json(told["worker"])
    assert supervisor is not None
    assert worker is not None
    spool = machine.data_dir / "runs" / job["run_id"]
    until((spool / "starts").exists)
    token = json.loads((spool / "token").read_text())
    record = {"kind": "metric", "seq": 1, "time": time.time(), "step": 1, "values": {"loss": 1.0}}
    url, headers = f"/v1/runs/{job['run_id']}/reports", {"Authorization": f"Bearer {token}"}
    assert machine.http.post(url, json={"records": [record]}, headers=headers).status_code == 200
    machine.when(job["id"], "running")
    waiting = machine.submit("reports-1")
    shutil.rmtree(spool)
    if cancels:
        assert machine.http.post(f"/v1/jobs/{job['id']}/cancel").status_code == 200
    ended = machine.when(job["id"], "failed", "cancelled")
    assert ended["state"] == ("cancelled" if cancels else "failed")
    assert cancels or ended["reason"].startswith("its directory is gone")
    assert not worker.alive()
    assert not supervisor.alive()
    assert machine.when(waiting["id"], "succeeded", "failed")["state"] == "succeeded"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/jobs/job-0", "text/html"),
        ("/nowhere", "text/html"),
        ("/v1/jobs", "application/json"),
        ("/v1/nothing", "application/problem+json"),
    ],
)
def test_pages_and_api_are_served_side_by_side_and_none_may_be_framed(standing: Machine, path: str, kind: str) -> None:
    answer = standing.http.get(path)
    assert answer.headers["content-type"].partition(";")[0] == kind
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert standing.http.get(path, headers={"host": "evil.example"}).status_code == 403


def test_where_it_answers_is_written_down(standing: Machine) -> None:
    assert standing.process is not None
    assert running(standing.data_dir) == {"url": standing.url, "pid": standing.process.pid}


def test_a_second_control_plane_on_one_data_directory_is_refused_with_the_first_ones_address(standing: Machine) -> None:
    before = sorted(standing.data_dir.iterdir())
    with pytest.raises(UnavailableError, match="another control plane uses") as caught:
        serve(Settings(data_dir=standing.data_dir, port=0), pages=False)
    assert standing.url in caught.value.problem
    assert running(standing.data_dir) is not None
    assert sorted(standing.data_dir.iterdir()) == before


def test_whatever_a_control_plane_and_its_runs_make_is_their_users_alone(standing: Machine) -> None:
    job = standing.submit("reports-1")
    standing.when(job["id"], "succeeded")
    paths = [standing.data_dir, *standing.data_dir.rglob("*")]
    assert {"twinstep.db-wal", "log", "spool.jsonl", "token", "starts"} <= {path.name for path in paths}
    assert [str(path) for path in paths if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_a_directory_that_others_may_write_is_refused_where_it_is_not_ours_to_close(tmp_path: Path, mode: int) -> None:
    data_dir = tmp_path / "shared"
    data_dir.mkdir()
    (data_dir / "thesis.txt").write_text("not ours")
    data_dir.chmod(mode)
    with pytest.raises(UnavailableError, match="other users can write it") as caught:
        serve(Settings(data_dir=data_dir, port=0), pages=False)
    assert f"chmod go-w {data_dir}" in caught.value.remedy
    assert [path.name for path in data_dir.iterdir()] == ["thesis.txt"]
    assert data_dir.stat().st_mode & 0o7777 == mode


def test_a_database_that_cannot_be_used_leaves_its_directory_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "twinstep.db").write_text("no database, only words; " * 100)
    mask = os.umask(0o022)
    try:
        with pytest.raises(UnavailableError, match="cannot be used"):
            serve(Settings(data_dir=tmp_path, port=0), pages=False)
        assert os.umask(0o022) == 0o022  # the mask is the caller's again
    finally:
        os.umask(mask)
    assert [path.name for path in tmp_path.iterdir()] == ["twinstep.db"]


def test_a_disk_that_takes_no_database_is_left_without_a_directory(tmp_path: Path) -> None:
    as_child, up = Path(__file__).with_name("as_child.py"), ["-m", "twinstep", "up", "--port", "0"]
    done = subprocess.run(
        [sys.executable, str(as_child), "--file-size", "2048", *up, "--data-dir", str(tmp_path / "a" / "data")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the database {tmp_path}/a/data/twinstep.db cannot be used" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_refused_by_its_number_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"port {port} on 127.0.0.1 cannot be used") as caught:
            serve(Settings(data_dir=tmp_path / "data", port=port), pages=False)
    assert "--port" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_data_directory_that_cannot_be_made_is_refused_and_the_port_let_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnavailableError, match="cannot be used") as caught:
        serve(Settings(data_dir=tmp_path / "file" / "data", port=port), pages=False)
    assert "TWINSTEP_DATA_DIR" in caught.value.remedy
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104
def test_an_address_that_others_can_reach_is_refused_while_nobody_can_log_in(tmp_path: Path, host: str) -> None:
    directory = tmp_path / "data"
    with pytest.raises(UnavailableError) as caught:
        serve(Settings(data_dir=directory, host=host, port=0), pages=False)
    assert "twinstep token create" in caught.value.remedy
    assert not directory.exists()
