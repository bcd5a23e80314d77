"""The control plane as a process, killed (SIGKILL) within a submit: the next one finds everything and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clusterplane import left_of, times_made
from fakekube.admission import warm
from fakekube.faults import Fault
from fakekube.kubelet import Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation
from planeprocess import Wait, control_plane


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
