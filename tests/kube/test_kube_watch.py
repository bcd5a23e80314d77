"""The mirror over real HTTP, under every fault a watch has: it comes to the truth again, and never goes backwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakekube.server import FakeServer

from twinstep.platform.scheduler.cluster import watch as watching
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.platform.scheduler.cluster.watch import WATCHED, Watcher

Wait = Callable[..., Any]
LABELS = {"app.kubernetes.io/managed-by": "twinstep", "twinstep.dev/run": "r1"}


def pod(name: str, namespace: str = "default", **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {**LABELS, **labels}}
    spec = {"containers": [{"name": "worker", "image": "i"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BACKOFF_S", (0.02, 0.1))


@pytest.fixture
def api(server: FakeServer) -> Iterator[KubeApi]:
    api = KubeApi(Access(kubeconfig=server.kubeconfig))
    yield api
    api.close()


@pytest.fixture
def watcher(api: KubeApi, quick: None) -> Iterator[Watcher]:
    watcher = Watcher(api, watch_seconds=2, absent_seconds=0.2)
    yield watcher
    watcher.stop()


def names(watcher: Watcher) -> set[str]:
    return {pod["metadata"]["name"] for pod in watcher.mirror.pods("r1")}


def filled(watcher: Watcher) -> bool:
    ref = WorkloadRef(kind="JobSet", namespace="default", name="x")
    return watcher.look("r1", ref) is not None


def begin(watcher: Watcher, wait: Wait) -> None:
    watcher.start()
    wait(lambda: filled(watcher))


def test_it_says_nothing_before_everything_was_listed(server: FakeServer, watcher: Watcher, wait: Wait) -> None:
    fault = server.faults.answer(503, path="rayjobs", times=3)
    server.put(pod("a"))
    assert watcher.age() is None
    watcher.start()
    wait(lambda: names(watcher) == {"a"})
    assert fault.left == 0 or not filled(watcher)
    wait(lambda: filled(watcher))
    assert watcher.age() is not None


def test_what_happens_in_the_cluster_is_told_at_once(server: FakeServer, api: KubeApi, quick: None, wait: Wait) -> None:
    changed = threading.Event()
    watcher = Watcher(api, watch_seconds=30, on_change=changed.set)
    try:
        begin(watcher, wait)
        changed.clear()
        made = server.put(pod("a"))
        assert changed.wait(10)
        server.objects.set_status(made, {"phase": "Running"})
        wait(lambda: watcher.mirror.pods("r1")[0]["status"]["phase"] == "Running")
        server.objects.delete(resource("Pod"), "default", "a", grace=0)
        wait(lambda: not names(watcher))
        assert watcher.lists() == dict.fromkeys(WATCHED, 1)
    finally:
        watcher.stop()


def resource(kind: str) -> Any:
    from fakekube.resources import BY_KIND

    return BY_KIND[kind]


@pytest.mark.parametrize("kind", ["gone", "half_line", "garbage", "duplicate", "old", "close"])
def test_a_watch_that_breaks_loses_nothing(server: FakeServer, watcher: Watcher, wait: Wait, kind: str) -> None:
    fault = server.faults.watch(kind, path="/pods", times=3, events=1, seconds=0.2)
    begin(watcher, wait)
    for number in range(12):
        server.put(pod(f"p{number}"))
        if number % 3 == 2:
            server.objects.delete(resource("Pod"), "default", f"p{number}", grace=0)
        time.sleep(0.02)
    wanted = {f"p{number}" for number in range(12) if number % 3 != 2}
    wait(lambda: names(watcher) == wanted)
    time.sleep(0.2)
    assert names(watcher) == wanted
    assert fault.hits >= 1


def test_what_went_while_nobody_watched_is_seen_to_be_gone(server: FakeServer, watcher: Watcher, wait: Wait) -> None:
    server.put(pod("a"))
    server.put(pod("b"))
    begin(watcher, wait)
    wait(lambda: names(watcher) == {"a", "b"})
    with server.away():
        server.objects.delete(resource("Pod"), "default", "a", grace=0)
        server.put(pod("c"))
        server.objects.compact()  # and what happened is forgotten: 410
    wait(lambda: names(watcher) == {"b", "c"})
    assert watcher.lists()["Pod"] >= 2


def test_older_states_that_come_late_change_nothing(server: FakeServer, watcher: Watcher, wait: Wait) -> None:
    server.faults.watch("old", path="/pods", times=10)
    made = server.put(pod("a"))
    begin(watcher, wait)
    seen: list[str] = []
    for number in range(10):
        made = server.objects.set_status(made, {"phase": "Running", "message": f"{number:02}"})
        wait(lambda: watcher.mirror.pods("r1")[0]["status"].get("message"))
        seen.append(watcher.mirror.pods("r1")[0]["status"]["message"])
    wait(lambda: watcher.mirror.pods("r1")[0]["status"]["message"] == "09")
    assert seen == sorted(seen)


def test_silence_is_found_and_ended(server: FakeServer, api: KubeApi, quick: None, wait: Wait) -> None:
    watcher = Watcher(api, watch_seconds=0.5)
    server.faults.watch("mute", path="/pods")
    try:
        begin(watcher, wait)
        server.put(pod("a"))
        wait(lambda: names(watcher) == {"a"}, seconds=30)
    finally:
        watcher.stop()


def test_credentials_that_ran_out_are_told_of_and_renewed(
    server: FakeServer, watcher: Watcher, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.kube_api.RELOAD_S", 0.05)
    begin(watcher, wait)
    server.api.refuse_token = True
    server.close_watches()
    wait(lambda: any("credentials" in trouble for trouble in watcher.troubles()))
    server.api.refuse_token = False
    server.put(pod("a"))
    wait(lambda: names(watcher) == {"a"})
    wait(lambda: not watcher.troubles())


def test_a_kind_that_the_cluster_does_not_have_holds_up_nothing_and_is_found_once_it_has(
    server: FakeServer, watcher: Watcher, wait: Wait
) -> None:
    fault = server.faults.answer(404, path="/workloads", times=10**6)
    server.put(pod("a"))
    begin(watcher, wait)
    assert names(watcher) == {"a"}
    assert watcher.troubles() == []
    fault.left = 0
    wait(lambda: watcher.lists()["Workload"] >= 1)


def test_a_server_that_is_away_is_asked_ever_more_seldom(
    server: FakeServer, api: KubeApi, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BACKOFF_S", (0.1, 5.0))
    watcher = Watcher(api, watch_seconds=30)
    server.faults.answer(500, times=10**6)
    watcher.start()
    time.sleep(2.0)
    asked = len(server.requests)
    watcher.stop()
    assert len(WATCHED) <= asked <= len(WATCHED) * 20
    assert watcher.age() is None


def test_waits_are_spread_over_the_whole_range_and_bounded(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BACKOFF_S", (0.5, 30.0))
    source = watcher._sources[0]
    waits = [[source._pause(failures) for _ in range(200)] for failures in (1, 4, 50)]
    assert [max(each) <= most for each, most in zip(waits, (1.0, 8.0, 30.0), strict=True)] == [True] * 3
    assert min(waits[2]) < 5 < 25 < max(waits[2])
    assert source._pause(0) == 0.0


def test_lists_of_many_pages_are_read_whole(
    server: FakeServer, watcher: Watcher, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "PAGE", 3)
    for number in range(10):
        server.put(pod(f"p{number}"))
    begin(watcher, wait)
    assert len(names(watcher)) == 10
    assert len(server.asked("GET", "/pods", limit="3")) >= 4


def test_only_the_namespaces_it_was_given_are_watched(
    server: FakeServer, api: KubeApi, quick: None, wait: Wait
) -> None:
    for namespace in ("one", "two", "three"):
        server.objects.namespace(namespace)
        server.put(pod(f"in-{namespace}", namespace))
    watcher = Watcher(api, namespaces=("one", "two"), watch_seconds=2)
    try:
        begin(watcher, wait)
        assert names(watcher) == {"in-one", "in-two"}
        assert not server.asked("GET", "/api/v1/pods")
    finally:
        watcher.stop()


def test_pods_of_others_are_not_asked_for(server: FakeServer, watcher: Watcher, wait: Wait) -> None:
    foreign = pod("foreign")
    del foreign["metadata"]["labels"]["app.kubernetes.io/managed-by"]
    server.put(foreign)
    begin(watcher, wait)
    assert names(watcher) == set()


def test_stopping_does_not_wait_for_the_server(server: FakeServer, api: KubeApi, wait: Wait) -> None:
    watcher = Watcher(api, watch_seconds=300)
    begin(watcher, wait)
    wait(lambda: server.watches == len(WATCHED))
    began = time.monotonic()
    watcher.stop()
    assert time.monotonic() - began < 8
    wait(lambda: not any(thread.name.startswith("watch-") for thread in threading.enumerate()))
