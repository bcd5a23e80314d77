"""A job in a cluster, read like a local one: its hosts' lines by API and stream, to the last; and its metrics."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.server import ControlPlane, assemble
from twinstep.platform.settings import ClusterSettings, Settings
from twinstep.spec.parse import validate_spec
from twinstep.spec.states import RunState

IMAGE = "registry.example/worker@sha256:" + "0" * 64
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
Wait = Callable[..., Any]


@contextmanager
def answering(settings: Settings) -> Iterator[tuple[ControlPlane, httpx.Client]]:
    """A control plane that answers on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plane = assemble(replace(settings, port=listener.getsockname()[1]), pages=False)
        plane.start()
        web = uvicorn.Server(uvicorn.Config(plane.app, log_config=None, access_log=False))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            with httpx.Client(base_url=plane.settings.url, timeout=20, trust_env=False) as http:
                yield plane, http
        finally:
            plane.service.closing.set()
            web.should_exit = True
            thread.join(timeout=20)
            plane.close()


def host_of(pod: dict[str, Any]) -> str:
    metadata = pod["metadata"]
    key = "batch.kubernetes.io/job-completion-index"
    return str((metadata.get("labels") or {}).get(key) or metadata["annotations"][key])


def test_lines_of_all_hosts_are_there_to_the_last_one(tmp_path: Path, server: FakeServer, wait: Wait) -> None:
    cluster = ClusterSettings(kubeconfig=server.kubeconfig)
    settings = Settings(data_dir=tmp_path / "data", reconcile_seconds=0.2, cluster=cluster)
    with Simulation(server).running() as simulation, answering(settings) as (plane, http):
        spec = {"name": "two", "accelerator": TPU, "kubernetes": {"image": IMAGE}}
        job = plane.service.submit_job(validate_spec(spec))
        wait(lambda: plane.service.get_job(job.id).state is RunState.RUNNING)
        pods = {host_of(pod): pod for pod in server.all("Pod")}
        assert sorted(pods) == ["0", "1"]
        for host, pod in pods.items():
            server.logs.write(pod["metadata"]["uid"], "worker", f"I am {host}\n")
        path = f"/v1/jobs/{job.id}/logs"
        wait(lambda: http.get(path, params={"host": 1}).json()["text"] == "started\nI am 1\n")
        for host, pod in pods.items():
            server.logs.write(pod["metadata"]["uid"], "worker", f"last words of {host}")
        simulation.end(job.run_id)
        wait(lambda: plane.service.get_job(job.id).state is RunState.SUCCEEDED)
        told = http.get(path, params={"host": 0}).json()
        assert told["text"] == "started\nI am 0\nlast words of 0"
        assert {span["pod"] for span in told["spans"]} == {pods["0"]["metadata"]["name"]}
        with http.stream("GET", f"/v1/jobs/{job.id}/stream", params={"kinds": "log"}) as stream:
            streamed = "".join(stream.iter_text())
        assert all(words in streamed for words in ("I am 0", "I am 1", "last words of 0", "last words of 1"))
        assert streamed.index("last words") < streamed.index("event: end")
        shown = http.get("/metrics").text
        assert "twinstep_cluster_leads 1.0" in shown
        assert 'twinstep_cluster_watch_age_seconds{kind="Pod"}' in shown
        assert 'twinstep_cluster_lists_total{kind="JobSet"} 1.0' in shown
        assert 'twinstep_cluster_requests_total{kind="PodLog",verb="get"}' in shown
        assert f"twinstep_cluster_log_bytes_total {float(2 * len('started I am 0 last words of 0'))}" in shown
        assert set(http.get("/readyz").json()["cluster"]["watch_ages_seconds"]) >= {"JobSet", "Pod", "Workload"}
