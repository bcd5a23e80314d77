"""The control plane as a process, killed (SIGKILL) within a submit: the next one finds everything and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from clusterplane import API_URL, IMAGE, TPU, left_of, times_made
from fakekube.admission import warm
from fakekube.faults import Fault
from fakekube.kubelet import Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

Wait = Callable[..., Any]


class Process:
    """`twinstep up`, on one data directory, started as often as it is killed."""

    def __init__(self, directory: Path, kubeconfig: Path, wait: Wait) -> None:
        self._directory, self._kubeconfig, self._wait = directory, kubeconfig, wait
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client()

    def start(self) -> None:
        (self._directory / "server.json").unlink(missing_ok=True)  # of one that was killed
        command = [sys.executable, "-m", "twinstep", "up", "--port", "0", "--data-dir", str(self._directory)]
        command += ["--kubeconfig", str(self._kubeconfig), "--image", IMAGE, "--workers-url", API_URL]
        environ = {**os.environ, "TWINSTEP_DATA_DIR": str(self._directory)}
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def told() -> Any:
            with contextlib.suppress(OSError, ValueError):
                return json.loads((self._directory / "server.json").read_bytes())["url"]
            return None

        self.http = httpx.Client(base_url=self._wait(told, seconds=60), timeout=20, trust_env=False)

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self._process is not None
        self.http.close()
        self._process.send_signal(how)
        self._process.wait(timeout=30)

    def submit(self, name: str) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json={"name": name, "accelerator": TPU})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def state(self, job: dict[str, Any]) -> str:
        return str(self.http.get(f"/v1/jobs/{job['id']}").json()["state"])


@contextlib.contextmanager
def control_plane(directory: Path, server: FakeServer, wait: Wait) -> Iterator[Process]:
    found = Process(directory, server.kubeconfig, wait)
    found.start()
    try:
        yield found
    finally:
        found.kill(signal.SIGTERM)


def test_a_process_that_is_killed_within_a_request_loses_and_doubles_nothing(
    tmp_path: Path, server: FakeServer, wait: Wait
) -> None:
    warm()
    cluster = Simulation(server)
    cluster.kubelet.work = lambda pod: Work(seconds=0.5)
    points: tuple[Callable[[], Fault], ...] = (
        lambda: server.faults.hang(60, method="PATCH", path="/jobsets/", stored=False),
        lambda: server.faults.hang(60, method="PATCH", path="/jobsets/"),
        lambda: server.faults.hang(60, method="PATCH", path="/secrets/"),
    )
    with cluster.running(), control_plane(tmp_path / "data", server, wait) as plane:
        jobs = []
        for number, point in enumerate(points):
            fault = point()
            jobs.append(plane.submit(f"job-{number}"))
            wait(lambda fault=fault: fault.hits)
            plane.kill()
            for lease in server.all("Lease"):
                cluster.world.delete(lease)  # as if the time had passed for which the killed one holds it
            plane.start()
        wait(lambda: all(plane.state(job) == "succeeded" for job in jobs), seconds=60)
        assert times_made(server) == len(jobs)
        for job in jobs:
            runs = plane.http.get(f"/v1/jobs/{job['id']}/runs").json()
            assert len(runs["items"] if isinstance(runs, dict) else runs) == 1
        for each in server.all("JobSet"):
            cluster.world.delete(each)
        wait(lambda: not any(left_of(server, job["run_id"]) for job in jobs))
        assert [plane.state(job) for job in jobs] == ["succeeded"] * len(jobs)
