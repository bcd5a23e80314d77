"""The handle on a real API server, tried on one that is simulated: the same calls, and skips for what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakekube.real import BUSY, EMPTIED, RealServer
from fakekube.resources import BY_KIND, Refusal, Resource
from fakekube.server import FakeServer


@pytest.fixture
def there(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "cluster") as server:
        yield server


def pod(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default"}
    spec = {"containers": [{"name": "worker", "image": "i"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def test_what_is_done_through_it_is_done_and_nothing_of_it_stays(there: FakeServer) -> None:
    with RealServer(there.admin) as server:
        made = server.put({**pod("a"), "metadata": {**pod("a")["metadata"], "finalizers": ["x.example/y"]}})
        assert made["metadata"]["uid"] == there.all("Pod")[0]["metadata"]["uid"]
        assert made["status"] == {"phase": "Running"}
        server.objects.set_status(made, {"phase": "Failed"})
        assert server.objects.get("Pod", "default", "a")["status"] == {"phase": "Failed"}
        assert [each["metadata"]["name"] for each in server.all("Pod")] == ["a"]
        server.objects.namespace("of-a-test")
        server.put(pod("b"))
        server.objects.delete(BY_KIND["Pod"], "default", "b", grace=0)
        assert [each["metadata"]["name"] for each in server.all("Pod")] == ["a"]
        with pytest.raises(Refusal) as caught:
            server.objects.get("Pod", "default", "b")
        assert (caught.value.code, caught.value.reason) == (404, "NotFound")
    assert there.all("Pod") == []
    assert "of-a-test" not in [each["metadata"]["name"] for each in there.all("Namespace")]


@pytest.mark.parametrize(
    "ask",
    [
        lambda server: server.faults.answer(500),
        lambda server: server.logs.write("uid", "worker", "text"),
        lambda server: server.away(),
        lambda server: server.objects.compact(),
        lambda server: server.requests,
        lambda server: server.asked("GET"),
        lambda server: setattr(server.api, "refuse_token", True),
    ],
)
def test_what_only_the_simulated_one_can_do_is_a_skip_that_says_what_it_is(
    there: FakeServer, ask: Callable[[RealServer], object]
) -> None:
    with RealServer(there.admin) as server, pytest.raises(pytest.skip.Exception, match="only the simulated API server"):
        ask(server)


KINDS_THAT_OTHERS_MAY_HAVE = [each for each in EMPTIED if each.kind not in BUSY]


@pytest.mark.parametrize("resource", KINDS_THAT_OTHERS_MAY_HAVE, ids=lambda each: each.kind)
def test_what_was_there_before_a_test_stays_and_is_not_shown_to_it(there: FakeServer, resource: Resource) -> None:
    def of(name: str) -> dict[str, Any]:
        metadata = {"name": name, "namespace": "default"}
        return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": {}}

    before = there.put(of("theirs"))
    with RealServer(there.admin) as server:
        there.put(of("ours"))
        assert [each["metadata"]["name"] for each in server.all(resource.kind)] == ["ours"]
    assert [each["metadata"]["uid"] for each in there.all(resource.kind)] == [before["metadata"]["uid"]]


def test_a_cluster_that_others_use_is_left_alone(there: FakeServer) -> None:
    there.put(pod("theirs"))
    with pytest.raises(pytest.fail.Exception, match=r"in use \(Pod/theirs"), RealServer(there.admin):
        pass
    assert len(there.all("Pod")) == 1
