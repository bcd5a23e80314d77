"""The rights that a control plane asks a cluster for are those it uses, no more; the page says the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fakekube.server import FakeServer

from twinstep.platform.scheduler.cluster.kinds import KINDS, rules
from twinstep.platform.scheduler.cluster.kube import KubeCluster
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.lease import Elector
from twinstep.platform.scheduler.cluster.watch import WATCHED, Watcher
from twinstep.platform.scheduler.render.render import render
from twinstep.spec.parse import validate_spec

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "connect-a-cluster.md").read_text()
ACCELERATORS = ({"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}, {"kind": "gpu", "model": "h100", "count": 8})


def test_every_right_is_used_and_none_but_those(server: FakeServer, wait: Callable[..., Any]) -> None:
    api = KubeApi(Access(kubeconfig=server.kubeconfig))
    watcher = Watcher(api, watch_seconds=2)
    cluster = KubeCluster(api, watcher)
    try:
        watcher.start()
        for number, accelerator in enumerate(ACCELERATORS):
            run(server, cluster, f"r{number}", accelerator, queue="team" if number else None)
        elector = Elector(api, namespace="default", name="twinstep", identity="me")
        elector.step()
        elector.step()
        with api.pod_log("default", logged(server), {}) as stream:
            stream.all()
        wait(lambda: all(api.counts.requests["watch", kind] for kind in WATCHED))
        assert set(api.counts.requests) == {(verb, kind.kind) for kind in KINDS.values() for verb in kind.verbs}
    finally:
        watcher.stop()
        api.close()


def run(server: FakeServer, cluster: KubeCluster, run_id: str, accelerator: dict[str, Any], queue: str | None) -> None:
    """Take a run through everything that can be asked of a cluster."""
    spec = {"name": "a", "accelerator": accelerator, "kubernetes": {"image": "registry.example/w:1", "queue": queue}}
    found = render(validate_spec(spec), run_id=run_id, job_id="j", api_url="http://10.0.0.1:8765")
    ref = cluster.apply(run_id, found.objects, token="t")
    if queue is not None:
        owner = {"apiVersion": found.workload["apiVersion"], "kind": ref.kind, "name": ref.name, "uid": ref.uid}
        metadata = {
            "name": "w", "namespace": "default",
            "labels": {"kueue.x-k8s.io/job-uid": ref.uid}, "ownerReferences": [owner],
        }  # fmt: skip
        pod = {"metadata": {}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        server.put(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "Workload",
                "metadata": metadata,
                "spec": {"active": True, "podSets": [{"name": "p", "count": 1, "template": pod}]},
            }
        )
    cluster.suspend(run_id, ref, True)
    cluster.confirm(run_id, ref)
    assert cluster.delete(run_id, ref)
    assert not cluster.delete(run_id, ref)


def logged(server: FakeServer) -> str:
    status = {"containerStatuses": [{"name": "c", "restartCount": 0, "state": {"running": {}}}]}
    metadata = {"name": "p", "namespace": "default"}
    spec = {"containers": [{"name": "c", "image": "i"}]}
    server.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})
    return "p"


def test_the_page_shows_the_table_and_the_role() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert rows == [(kind.resource, ", ".join(kind.verbs), kind.why) for kind in KINDS.values()]
    (block,) = re.findall(r"```yml\n(.+?)```", PAGE, re.DOTALL)
    assert yaml.safe_load(block)["rules"] == rules(*(kind for kind in KINDS if kind != "Lease"))
