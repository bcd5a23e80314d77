"""Two replicas on one PostgreSQL and one cluster, of which one is killed and started again while submits go on."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from pathlib import Path

import httpx
import pytest
from clusterplane import TPU, times_made
from fakekube.admission import warm
from fakekube.kubelet import Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation
from planeprocess import Process, Wait, control_plane

from bench.postgres import NoServerError, postgres

KILLS = 1
EACH = 3
PAUSE_S = 1.0
SMALL = TPU | {"topology": "2x2x1"}


class Client:
    """Submits job after job, each with a key; what one replica does not answer, it sends to the other."""

    def __init__(self, name: str, replicas: list[Process], stop: threading.Event) -> None:
        self.stored: dict[str, str] = {}
        """Job by name."""
        self._name, self._replicas, self._stop = name, replicas, stop
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(timeout=20, trust_env=False) as http:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                name = f"{self._name}-{number}"
                self.stored[name] = self._submit(http, name, number)
                time.sleep(PAUSE_S)

    def _submit(self, http: httpx.Client, name: str, number: int) -> str:
        for replica in itertools.islice(itertools.cycle(self._replicas), number % 2, None):
            with contextlib.suppress(httpx.TransportError):
                answer = http.post(
                    f"{replica.url}/v1/jobs",
                    json={"name": name, "accelerator": SMALL},
                    headers={"Idempotency-Key": name},
                )
                if answer.status_code != 503:
                    assert answer.status_code in (200, 201), answer.text
                    return str(answer.json()["id"])
            time.sleep(0.02)
        raise AssertionError("unreachable")


@pytest.mark.slow
def test_no_submit_is_lost_or_doubled_while_one_of_two_replicas_is_killed_and_started_again(
    tmp_path: Path, server: FakeServer, wait: Wait
) -> None:
    warm()
    cluster = Simulation(server)
    cluster.kubelet.work = lambda pod: Work(seconds=0.2)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        try:
            more = ["--database-url", stack.enter_context(postgres()).url()]
        except NoServerError as error:
            pytest.skip(f"no PostgreSQL runs here: {error}")
        stack.enter_context(cluster.running())
        replicas = [stack.enter_context(control_plane(tmp_path / name, server, wait, more)) for name in ("one", "two")]
        clients = [Client(name, replicas, stop) for name in ("ada", "bob")]
        stack.callback(stop.set)
        for client in clients:
            client.thread.start()
        for kill in range(KILLS):
            before = [len(client.stored) for client in clients]
            wait(lambda before=before: all(len(c.stored) >= n + EACH for c, n in zip(clients, before, strict=True)))
            replicas[kill % 2].kill()
            for lease in server.all("Lease"):
                cluster.world.delete(lease)  # as if the time had passed for which the killed one may hold it
            replicas[kill % 2].start()
        stop.set()
        for client in clients:
            client.thread.join(timeout=30)
        http = replicas[0].http
        stored = {name: job for client in clients for name, job in client.stored.items()}
        _until_all_succeeded(http, len(stored))
        named = {job["name"]: job["id"] for job in http.get("/v1/jobs", params={"limit": 200}).json()["items"]}
        assert named == stored
        assert times_made(server) == len(stored) >= KILLS * EACH * len(clients)
        assert all(len(http.get(f"/v1/jobs/{job}/runs").json()["items"]) == 1 for job in stored.values())


def _until_all_succeeded(http: httpx.Client, count: int) -> None:
    states: list[str] = []
    ends = time.monotonic() + 240
    while time.monotonic() < ends and states != ["succeeded"] * count:
        time.sleep(0.5)
        jobs = http.get("/v1/jobs", params={"limit": 200}).json()["items"]
        states = [job["state"] for job in jobs]
    assert states == ["succeeded"] * count, [(job["state"], job["reason"]) for job in jobs]
