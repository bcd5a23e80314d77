"""Logs of a run in a cluster, over real HTTP: nothing lost, nothing twice, whatever happens to pods and us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakekube.resources import BY_KIND
from fakekube.server import FakeServer

from twinstep.platform.scheduler.cluster import logs as collecting
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.logs import LogCollector
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.platform.store.logs import Logs
from twinstep.platform.store.records import LogFilter
from twinstep.platform.store.store import Store
from twinstep.spec.parse import validate_spec

Wait = Callable[..., Any]
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}


class Rig:
    """One run in a cluster, its store, and those who collect."""

    def __init__(self, server: FakeServer, store: Store, api: KubeApi, wait: Wait) -> None:
        self.server, self.store, self.api, self.wait = server, store, api, wait
        self.run_id = store.create_job(validate_spec({"name": "a", "accelerator": TPU})).run_id
        self.logs = Logs(store.database, store.changes)
        self.watcher = Watcher(api, watch_seconds=2)
        self.watcher.start()
        self._collectors: list[LogCollector] = []

    def collector(self, **more: Any) -> LogCollector:
        collector = LogCollector(self.api, self.watcher.mirror, self.logs, **more)
        self._collectors.append(collector)
        collector.start()
        return collector

    def close(self) -> None:
        for collector in self._collectors:
            collector.stop()
        self.watcher.stop()

    def pod(self, name: str, *, host: int = 0, slice_: int = 0, restart: int = 0, state: str = "running") -> Any:
        labels = {
            "app.kubernetes.io/managed-by": "twinstep",
            "twinstep.dev/run": self.run_id,
            "jobset.sigs.k8s.io/job-index": str(slice_),
            "jobset.sigs.k8s.io/restart-attempt": str(restart),
            "batch.kubernetes.io/job-completion-index": str(host),
        }
        return self.server.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "default", "labels": labels},
                "spec": {"containers": [{"name": "worker", "image": "i"}], "nodeName": "n"},
                "status": _status(state),
            }
        )

    def set(self, pod: Any, state: str, restarts: int = 0) -> Any:
        return self.server.objects.set_status(pod, _status(state, restarts))

    def write(self, pod: Any, text: str | bytes, **more: Any) -> None:
        self.server.logs.write(pod["metadata"]["uid"], "worker", text, **more)

    def end(self, pod: Any, **more: Any) -> None:
        self.server.logs.end(pod["metadata"]["uid"], "worker", **more)
        self.set(pod, "terminated")

    def delete(self, pod: Any) -> None:
        self.server.objects.delete(BY_KIND["Pod"], "default", pod["metadata"]["name"], grace=0)

    def text(self, **wanted: int) -> str:
        text, offset = "", 0
        while True:
            part = self.logs.log(self.run_id).read_log(offset=offset, limit=1 << 20, wanted=LogFilter(**wanted))
            text += part.text
            if part.next_offset == part.offset:
                return text
            offset = part.next_offset

    def comes_to(self, text: str, **wanted: int) -> None:
        try:
            self.wait(lambda: self.text(**wanted) == text)
        except AssertionError:
            assert self.text(**wanted) == text


def _status(state: str, restarts: int = 0) -> dict[str, Any]:
    if not state:
        return {"phase": "Pending"}
    phase = {"running": "Running", "terminated": "Succeeded", "waiting": "Pending"}[state]
    container = {"name": "worker", "restartCount": restarts, "state": {state: {}}, "ready": state == "running"}
    return {"phase": phase, "containerStatuses": [container]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LOOK_S": 0.02,
        "SOONEST_S": 0.03,
        "LATEST_S": 0.2,
        "HALF_LINE_S": 0.3,
        "RESCUE_S": 0.2,
    }.items():
        monkeypatch.setattr(collecting, name, value)
    monkeypatch.setattr(collecting, "PER_SECOND", 1000.0)


@pytest.fixture
def rig(server: FakeServer, tmp_path: Path, wait: Wait) -> Iterator[Rig]:
    store = Store(f"sqlite:///{tmp_path / 'store' / 'a.db'}")
    api = KubeApi(Access(kubeconfig=server.kubeconfig))
    rig = Rig(server, store, api, wait)
    yield rig
    rig.close()
    api.close()
    store.close()


def test_it_begins_before_there_are_pods_and_ends_after_they_are_gone(rig: Rig) -> None:
    rig.collector()
    pod = rig.pod("p", state="")
    time.sleep(0.1)
    rig.set(pod, "running")
    rig.write(pod, "one\n")
    rig.comes_to("one\n")
    rig.write(pod, "two\nthree\n")
    rig.comes_to("one\ntwo\nthree\n")
    rig.end(pod)
    rig.delete(pod)
    time.sleep(0.3)
    assert rig.text() == "one\ntwo\nthree\n"


def test_hosts_are_told_apart(rig: Rig) -> None:
    rig.collector()
    pods = [rig.pod(f"p{slice_}{host}", slice_=slice_, host=host) for slice_ in (0, 1) for host in (0, 1)]
    for number, pod in enumerate(pods):
        rig.write(pod, f"I am {number}\n")
    for number in range(4):
        rig.comes_to(f"I am {number}\n", slice=number // 2, host=number % 2)
    rig.wait(lambda: len(rig.text()) == 4 * len("I am 0\n"))


def test_a_pod_that_takes_anothers_place_is_another_restart(rig: Rig) -> None:
    rig.collector()
    first = rig.pod("p-abc")
    rig.write(first, "first\n")
    rig.comes_to("first\n")
    rig.delete(first)
    second = rig.pod("p-def", restart=1)
    rig.write(second, "second\n")
    rig.comes_to("first\n--- restart 1 ---\nsecond\n")
    rig.comes_to("second\n", restart=1)


def test_a_container_that_starts_again_in_its_pod_is_read_to_its_end_first(rig: Rig) -> None:
    collector = rig.collector()
    pod = rig.pod("p")
    rig.write(pod, "one\n")
    rig.comes_to("one\n")
    with rig.server.away():  # the new container's log may be read before its pod's status tells of it
        rig.write(pod, "two\n")
        rig.server.logs.end(pod["metadata"]["uid"], "worker")
        time.sleep(0.01)
        rig.write(pod, "anew\n", restart=1)
        rig.set(pod, "running", restarts=1)
    rig.wait(lambda: sorted(rig.text().split()) == ["anew", "one", "two"])
    assert collector.counts.bytes == len("one\ntwo\nanew\n")


@pytest.mark.parametrize(
    "text",
    [
        b"a\r\nb\r\n", b"10%\r20%\r100%\n", b"no end", b"\xff\xfe broken\n", b"\x00zero\n", "é€😀\n".encode(),
        b"\n\n\n", b"2026-01-01T00:00:00Z looks like a time\n",
    ],
)  # fmt: skip
def test_bytes_of_any_kind_come_as_they_are(rig: Rig, text: bytes) -> None:
    rig.collector()
    pod = rig.pod("p")
    rig.write(pod, text)
    rig.comes_to(text.decode("utf-8", errors="replace"))
    rig.end(pod)
    time.sleep(0.2)
    assert rig.text() == text.decode("utf-8", errors="replace")


def test_half_a_line_is_shown_after_a_while_and_not_twice(rig: Rig) -> None:
    rig.collector()
    pod = rig.pod("p")
    rig.write(pod, "whole\nhalf ")
    rig.comes_to("whole\n")
    rig.comes_to("whole\nhalf ")
    rig.write(pod, "and the rest\n")
    rig.comes_to("whole\nhalf and the rest\n")


def test_many_lines_of_one_moment_come_once_each(rig: Rig) -> None:
    rig.collector()
    pod = rig.pod("p")
    lines = [f"{number}\n" for number in range(500)]
    now = time.time()
    for number in range(0, 500, 50):
        rig.write(pod, "".join(lines[number : number + 50]), at=now)
        time.sleep(0.02)
    rig.comes_to("".join(lines))


def test_a_line_of_a_mebibyte(rig: Rig) -> None:
    rig.collector()
    pod = rig.pod("p")
    rig.write(pod, "x" * (1 << 20) + "\n")
    rig.wait(lambda: len(rig.text()) == (1 << 20) + 1)


def test_more_than_can_be_kept_costs_no_more_than_that(rig: Rig) -> None:
    rig.logs = Logs(rig.store.database, rig.store.changes, keep_bytes=4 << 20)
    collector = rig.collector()
    pod = rig.pod("p")
    block = b"".join(b"%09d %s\n" % (number, b"x" * 989) for number in range(1000))
    for number in range(20):
        rig.write(pod, block, at=time.time() + number * 1e-3)
    rig.write(pod, "the end\n", at=time.time() + 1)
    rig.end(pod)
    rig.wait(lambda: rig.text().endswith("the end\n"), seconds=60)
    text = rig.text()
    assert len(text) < 5 << 20
    assert text.startswith("000000000 xxx")
    assert "bytes of the log are not kept" in text
    assert collector.counts.bytes == 20 * len(block) + len("the end\n")


def test_a_collector_that_dies_loses_nothing_and_the_next_doubles_nothing(rig: Rig) -> None:
    pod = rig.pod("p")
    written = 0
    for _ in range(6):
        collector = rig.collector()
        for _ in range(20):
            rig.write(pod, f"{written}\n")
            written += 1
            time.sleep(0.005)
        collector.stop()
    rig.collector()
    rig.comes_to("".join(f"{number}\n" for number in range(written)))


def test_two_collectors_at_once_store_every_line_once(rig: Rig) -> None:
    rig.collector()
    rig.collector()
    pods = [rig.pod(f"p{host}", host=host) for host in range(3)]
    for number in range(40):
        for pod in pods:
            rig.write(pod, f"{number}\n")
        time.sleep(0.005)
    for host in range(3):
        rig.comes_to("".join(f"{number}\n" for number in range(40)), host=host)


def test_who_does_not_lead_collects_nothing(rig: Rig) -> None:
    leads = False
    rig.collector(leads=lambda: leads)
    pod = rig.pod("p")
    rig.write(pod, "one\n")
    time.sleep(0.3)
    assert rig.text() == ""
    leads = True
    rig.comes_to("one\n")


def test_faults_of_the_server_lose_and_double_nothing(rig: Rig) -> None:
    rig.collector()
    pod = rig.pod("p")
    for number in range(30):
        if number % 6 == 0:
            rig.server.faults.answer(500, path="/log", times=2)
            rig.server.faults.drop(path="/log", times=1)
        rig.write(pod, f"{number}\n")
        time.sleep(0.01)
    rig.comes_to("".join(f"{number}\n" for number in range(30)))


def test_draining_waits_for_the_ends_of_all_logs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "SOONEST_S", 30.0)
    monkeypatch.setattr(collecting, "LATEST_S", 60.0)
    collector = rig.collector()
    pods = [rig.pod(f"p{host}", host=host) for host in range(10)]
    rig.wait(lambda: collector.counts.requests >= 10)
    for pod in pods:
        rig.write(pod, "last words")
        rig.end(pod)
    rig.wait(lambda: all(
        "terminated" in pod["status"]["containerStatuses"][0]["state"] for pod in rig.watcher.mirror.pods(rig.run_id)
    ))  # fmt: skip
    assert collector.drain(rig.run_id)
    for pod in pods:
        rig.delete(pod)
    for host in range(10):
        assert rig.text(host=host) == "last words"


def test_draining_does_not_wait_for_ever(rig: Rig) -> None:
    collector = rig.collector()
    rig.pod("p")
    rig.wait(lambda: collector.counts.requests >= 1)
    rig.server.faults.answer(500, path="/log", times=10**6)
    assert not collector.drain(rig.run_id, seconds=0.5)


def test_pods_of_runs_that_are_not_ours_are_asked_for_nothing(rig: Rig) -> None:
    collector = rig.collector()
    rig.run_id, ours = "elsewhere", rig.run_id
    rig.write(rig.pod("foreign"), "x\n")
    rig.run_id = ours
    rig.write(rig.pod("own"), "y\n")
    rig.comes_to("y\n")
    time.sleep(0.2)
    assert not rig.server.asked("GET", "/pods/foreign/log")
    assert collector.counts.errors == {}


def test_of_128_hosts_every_line_comes_by_a_few_threads(rig: Rig) -> None:
    import threading

    rig.collector()
    pods = [rig.pod(f"p{host}", host=host) for host in range(128)]
    for number in range(3):
        for host, pod in enumerate(pods):
            rig.write(pod, f"{host}: {number}\n")
    wanted = sum(len(f"{host}: {number}\n") for host in range(128) for number in range(3))
    rig.wait(lambda: len(rig.text()) == wanted, seconds=60)
    assert sum(thread.name.startswith("logs") for thread in threading.enumerate()) <= collecting.THREADS
    assert sorted(rig.text().splitlines()) == sorted(f"{host}: {n}" for host in range(128) for n in range(3))


@pytest.mark.parametrize("how", ["terminated", "deleting"])
def test_what_is_written_last_is_read_by_others_where_who_leads_dies_together_with_the_pods(rig: Rig, how: str) -> None:
    first = rig.collector()
    rig.collector(leads=lambda: False)
    pod = rig.pod("p")
    rig.write(pod, "one\n")
    rig.comes_to("one\n")
    first.stop()
    rig.write(pod, "two\n")
    time.sleep(0.3)
    assert rig.text() == "one\n", "a pod that goes on is for who leads next"
    if how == "deleting":
        rig.server.objects.delete(BY_KIND["Pod"], "default", "p", grace=30)
    else:
        rig.end(pod)
    rig.comes_to("one\ntwo\n")


def test_who_does_not_lead_asks_nothing_of_a_log_that_was_read_to_its_end(rig: Rig) -> None:
    leader, other = rig.collector(), rig.collector(leads=lambda: False)
    pods = [rig.pod(f"p{host}", host=host) for host in range(3)]
    for pod in pods:
        rig.write(pod, "one\n")
        rig.end(pod)
    for host in range(3):
        rig.comes_to("one\n", host=host)
    rig.wait(lambda: all(leader._done(feed) for feed in leader._feeds.values()))
    asked = other.counts.requests
    rig.wait(lambda: len(other._feeds) == 3 and all(other._done(feed) for feed in other._feeds.values()))
    assert other.counts.requests <= asked + 3
    done = other.counts.requests
    time.sleep(0.5)
    assert other.counts.requests == done
