"""Classes of bugs of other control planes that show in a cluster only; the map of all is tests/unit/platform's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from fakekube.resources import RESOURCES
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.scheduler.cluster.kube import KubeCluster
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.spec.parse import validate_spec

IMAGE = "registry.example/worker@sha256:" + "0" * 64
TRICKY = ['"', "'", "a\nb", ": #", "{x}", "`id`", "$(HOSTNAME)", "$$", "a; b && c", "yes", "0123", "1e3", "x:", ""]


@pytest.fixture
def cluster(server: FakeServer) -> Iterator[KubeCluster]:
    api = KubeApi(Access(kubeconfig=server.kubeconfig))
    yield KubeCluster(api, Watcher(api))
    api.close()


def rendered(name: str, accelerator: dict[str, Any], **kubernetes: Any) -> RenderedRun:
    spec = {"name": name, "accelerator": accelerator, "kubernetes": {"image": IMAGE, **kubernetes}}
    return render(validate_spec(spec), run_id="r" * 26, job_id="j" * 26, api_url="http://10.0.0.1:8765")


def kubelet(text: str, environment: dict[str, str]) -> str:
    """What the kubelet makes of an argument: `$(NAME)` becomes its value where there is one, `$$` becomes `$`."""

    def say(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", say, text)


@pytest.mark.parametrize(
    "accelerator",
    [
        {"kind": "tpu", "generation": "v5p", "topology": "4x4x8"},
        {"kind": "tpu", "generation": "v5p", "topology": "2x2x2", "slices": 12},
        {"kind": "gpu", "model": "h100", "count": 96},
    ],
)
def test_the_longest_names_fit_all_that_the_cluster_makes_of_them(
    server: FakeServer, cluster: KubeCluster, accelerator: dict[str, Any]
) -> None:
    run = rendered("a" * 40, accelerator, queue="q" * 63)
    cluster.apply("r" * 26, run.objects, token="t")
    Simulation(server).settle()
    assert len(server.all("Pod")) > 2
    for kind in {each.kind for each in RESOURCES} - {"Event"}:
        for found in server.all(kind):
            metadata = found["metadata"]
            assert len(metadata["name"]) <= 63, (kind, metadata["name"])
            for key, text in (metadata.get("labels") or {}).items():
                assert len(text) <= 63, (kind, key, text)
            hostname = (found.get("spec") or {}).get("hostname", "")
            assert re.fullmatch(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?", hostname)


@pytest.mark.parametrize(
    "accelerator",
    [{"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}, {"kind": "gpu", "model": "h100", "count": 8}],
)
def test_words_arrive_through_the_api_server_byte_for_byte(
    server: FakeServer, cluster: KubeCluster, accelerator: dict[str, Any]
) -> None:
    words = {f"A{index}": text for index, text in enumerate(TRICKY)}
    run = rendered("a", accelerator, env=words)
    cluster.apply("r" * 26, run.objects, token="t")
    Simulation(server).settle()
    pods = [pod for pod in server.all("Pod") if pod["spec"]["containers"][0]["name"] != "ray-job-submitter"]
    assert pods
    for pod in pods:
        entries = {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0]["env"]}
        assert {name: kubelet(entries[name], {"HOSTNAME": "h"}) for name in words} == words
    if run.workload["kind"] == "RayJob":
        line = server.all("RayJob")[0]["spec"]["entrypoint"]
        assert shlex.split(kubelet(line, {})) == ["python", "-m", "twinstep.worker.train.ray_job"]
