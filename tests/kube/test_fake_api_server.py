"""The fake API server answers the official client as a real one does: codes, words, versions, owners, watches, logs."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakekube.admission import crds_dir
from fakekube.real import api_server
from fakekube.server import FakeServer
from kubernetes import client, config, watch
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from twinstep.platform.scheduler.render.render import render
from twinstep.spec.parse import parse_spec

JOBSET = ("jobset.x-k8s.io", "v1alpha2", "default", "jobsets")
APPLY = "application/apply-patch+yaml"
TPU = {
    "name": "two",
    "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"},
    "kubernetes": {"image": "registry.example/worker@sha256:" + "0" * 64},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with api_server(tmp_path_factory.mktemp("cluster"), bookmark_seconds=0.1) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left(server: FakeServer) -> Iterator[None]:
    yield
    if isinstance(server, FakeServer):
        server.faults.clear()
        server.api.refuse_token = False


@pytest.fixture(scope="module")
def api(server: FakeServer) -> Iterator[client.ApiClient]:
    settings = client.Configuration()
    config.load_kube_config(str(server.kubeconfig), client_configuration=settings)
    settings.retries = False
    with client.ApiClient(settings) as found:
        yield found


@pytest.fixture(scope="module")
def core(api: client.ApiClient) -> client.CoreV1Api:
    return client.CoreV1Api(api)


@pytest.fixture(scope="module")
def custom(api: client.ApiClient) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(api)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own."""
    return "n" + format(abs(hash(request.node.name)) % 16**8, "08x")


def jobset(name: str, **spec: Any) -> dict[str, Any]:
    found = dict(render(parse_spec(yaml.safe_dump({**TPU, "name": name}))).workload)
    return {**found, "metadata": {**found["metadata"], "name": name}, "spec": {**found["spec"], **spec}}


def config_map(name: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **more}, "data": {"a": "1"}}


def pod(name: str, **status: Any) -> dict[str, Any]:
    containers = [{"name": "worker", "image": "i"}]
    found = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}}
    return {**found, "spec": {"containers": containers}, **({"status": status} if status else {})}


def refused(code: int, reason: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ApiException) as caught:
        call(*args, **kwargs)
    status = yaml.safe_load(caught.value.body)
    assert (caught.value.status, status.get("reason", ""), status["code"]) == (code, reason, code)
    return str(status["message"])


# ---- create, read, write ----


def test_a_create_is_201_with_uid_version_time_and_generation(custom: client.CustomObjectsApi, name: str) -> None:
    made, code, _ = custom.create_namespaced_custom_object_with_http_info(*JOBSET, jobset(name))
    assert code == 201
    metadata = made["metadata"]
    assert metadata["uid"]
    assert int(metadata["resourceVersion"]) > 0
    assert metadata["generation"] == 1
    assert metadata["creationTimestamp"].endswith("Z")
    assert custom.get_namespaced_custom_object(*JOBSET, name) == made


def test_what_is_there_and_what_is_not_have_kubernetes_words(
    core: client.CoreV1Api, custom: client.CustomObjectsApi, name: str
) -> None:
    assert (
        refused(404, "NotFound", core.read_namespaced_config_map, name, "default") == f'configmaps "{name}" not found'
    )
    core.create_namespaced_config_map("default", config_map(name))
    said = refused(409, "AlreadyExists", core.create_namespaced_config_map, "default", config_map(name))
    assert said == f'configmaps "{name}" already exists'
    said = refused(404, "NotFound", custom.get_namespaced_custom_object, *JOBSET, name)
    assert said == f'jobsets.jobset.x-k8s.io "{name}" not found'
    refused(404, "NotFound", core.create_namespaced_config_map, "nowhere", config_map(name))
    refused(404, "NotFound", custom.list_namespaced_custom_object, "x.example", "v1", "default", "things")


def test_versions_only_rise_and_an_old_one_is_a_conflict(core: client.CoreV1Api, name: str) -> None:
    first = core.create_namespaced_config_map("default", config_map(name))
    second = core.patch_namespaced_config_map(name, "default", {"data": {"b": "2"}})
    assert second.data == {"a": "1", "b": "2"}
    assert int(second.metadata.resource_version) > int(first.metadata.resource_version)
    first.data = {"a": "3"}
    assert "modified" in refused(409, "Conflict", core.replace_namespaced_config_map, name, "default", first)
    same = core.patch_namespaced_config_map(name, "default", {"data": {"b": "2"}})
    assert same.metadata.resource_version == second.metadata.resource_version  # nothing changed: no new version


def test_generation_rises_with_the_spec_and_not_with_the_status(custom: client.CustomObjectsApi, name: str) -> None:
    custom.create_namespaced_custom_object(*JOBSET, jobset(name))
    how = {"_content_type": "application/merge-patch+json"}
    found = custom.patch_namespaced_custom_object(*JOBSET, name, {"spec": {"ttlSecondsAfterFinished": 5}}, **how)
    assert found["metadata"]["generation"] == 2
    found = custom.patch_namespaced_custom_object_status(*JOBSET, name, {"status": {"restarts": 1}}, **how)
    assert (found["metadata"]["generation"], found["status"]) == (2, {"restarts": 1})


def test_status_has_a_path_of_its_own(custom: client.CustomObjectsApi, name: str) -> None:
    made = custom.create_namespaced_custom_object(*JOBSET, {**jobset(name), "status": {"restarts": 7}})
    assert "status" not in made
    how = {"_content_type": "application/merge-patch+json"}
    found = custom.patch_namespaced_custom_object(*JOBSET, name, {"status": {"restarts": 7}}, **how)
    assert "status" not in found
    change = {"status": {"restarts": 1}, "spec": {"suspend": True}}
    found = custom.patch_namespaced_custom_object_status(*JOBSET, name, change, **how)
    assert found["status"]["restarts"] == 1
    assert "suspend" not in found["spec"]


def test_json_patches_and_their_tests(custom: client.CustomObjectsApi, name: str) -> None:
    custom.create_namespaced_custom_object(*JOBSET, jobset(name))
    how = {"_content_type": "application/json-patch+json"}
    steps = [{"op": "replace", "path": "/spec/ttlSecondsAfterFinished", "value": 9}]
    found = custom.patch_namespaced_custom_object(*JOBSET, name, steps, **how)
    assert found["spec"]["ttlSecondsAfterFinished"] == 9
    steps.insert(0, {"op": "test", "path": "/metadata/uid", "value": "another"})
    refused(422, "Invalid", custom.patch_namespaced_custom_object, *JOBSET, name, steps, **how)


def test_a_put_of_a_custom_resource_needs_a_version(custom: client.CustomObjectsApi, name: str) -> None:
    made = custom.create_namespaced_custom_object(*JOBSET, jobset(name))
    refused(422, "Invalid", custom.replace_namespaced_custom_object, *JOBSET, name, jobset(name))
    made["spec"]["suspend"] = True
    assert custom.replace_namespaced_custom_object(*JOBSET, name, made)["spec"]["suspend"] is True


def test_a_dry_run_stores_nothing(core: client.CoreV1Api, custom: client.CustomObjectsApi, name: str) -> None:
    core.create_namespaced_config_map("default", config_map(name), dry_run="All")
    refused(404, "NotFound", core.read_namespaced_config_map, name, "default")
    custom.patch_namespaced_custom_object(
        *JOBSET, name, jobset(name), field_manager="me", dry_run="All", _content_type=APPLY
    )
    refused(404, "NotFound", custom.get_namespaced_custom_object, *JOBSET, name)


def test_a_namespace_is_made_listed_and_taken_away_with_what_is_in_it(
    core: client.CoreV1Api, server: FakeServer, name: str
) -> None:
    core.create_namespace({"metadata": {"name": name}})
    core.create_namespaced_config_map(name, config_map("a"))
    assert name in [each.metadata.name for each in core.list_namespace().items]
    assert core.read_namespace(name).metadata.uid
    core.delete_namespace(name)
    refused(404, "NotFound", core.read_namespace, name)
    assert server.all("ConfigMap", name) == []


def test_secrets_take_text_and_keep_base64(core: client.CoreV1Api, name: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"token": "geheim"}}
    made = core.create_namespaced_secret("default", secret)
    assert made.data == {"token": base64.b64encode(b"geheim").decode()}
    assert made.string_data is None


def test_lists_page_select_and_leave_out_the_kind_of_built_in_objects(
    core: client.CoreV1Api, server: FakeServer
) -> None:
    for index in range(5):
        server.put(
            config_map(f"page-{index}", namespace="default", labels={"page": "yes", "even": str(index % 2 == 0)})
        )
    first = core.list_namespaced_config_map("default", label_selector="page=yes", limit=2)
    assert [each.metadata.name for each in first.items] == ["page-0", "page-1"]
    rest = core.list_namespaced_config_map(
        "default", label_selector="page=yes", limit=9, _continue=first.metadata._continue
    )
    assert [each.metadata.name for each in rest.items] == ["page-2", "page-3", "page-4"]
    assert rest.metadata._continue is None
    chosen = core.list_config_map_for_all_namespaces(label_selector="page,even in (True),nothing notin (a,b),!other")
    assert [each.metadata.name for each in chosen.items] == ["page-0", "page-2", "page-4"]
    chosen = core.list_namespaced_config_map("default", field_selector="metadata.name=page-3")
    assert [each.metadata.name for each in chosen.items] == ["page-3"]
    assert chosen.items[0].kind is None
    refused(400, "BadRequest", core.list_namespaced_config_map, "default", field_selector="data.a=1")
    server.objects.compact()
    server.put(config_map("page-9", namespace="default"))
    server.objects.compact()
    refused(410, "Expired", core.list_namespaced_config_map, "default", limit=2, _continue=first.metadata._continue)


# ---- validation ----


@pytest.mark.skipif(crds_dir() is None, reason="the CRD files are not in this checkout")
def test_a_bad_manifest_is_refused_in_words(custom: client.CustomObjectsApi, name: str) -> None:
    bad = jobset(name)
    bad["spec"]["replicatedJobs"][0]["replicas"] = -1
    said = refused(422, "Invalid", custom.create_namespaced_custom_object, *JOBSET, bad)
    assert said.startswith(f'JobSet.jobset.x-k8s.io "{name}" is invalid: spec.replicatedJobs[0].replicas: ')
    twice = jobset(name)
    container = twice["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["env"].append(dict(container["env"][0]))
    assert "env" in refused(422, "Invalid", custom.create_namespaced_custom_object, *JOBSET, twice)


@pytest.mark.skipif(crds_dir() is None, reason="the CRD files are not in this checkout")
def test_unknown_fields_go_are_refused_or_fail_an_apply(custom: client.CustomObjectsApi, name: str) -> None:
    odd = jobset(name, paralelism=3)
    _, _, headers = custom.create_namespaced_custom_object_with_http_info(*JOBSET, odd)
    assert "paralelism" in headers["Warning"]
    assert "paralelism" not in custom.get_namespaced_custom_object(*JOBSET, name)["spec"]
    said = refused(400, "BadRequest", custom.create_namespaced_custom_object, *JOBSET, odd, field_validation="Strict")
    assert 'unknown field "spec.paralelism"' in said
    how = {"field_manager": "me", "_content_type": APPLY}
    said = refused(500, "", custom.patch_namespaced_custom_object, *JOBSET, name, odd, **how)
    assert said.endswith(".spec.paralelism: field not declared in schema")


def test_what_never_changes_is_refused(core: client.CoreV1Api, custom: client.CustomObjectsApi, name: str) -> None:
    custom.create_namespaced_custom_object(*JOBSET, jobset(name))
    how = {"_content_type": "application/merge-patch+json"}
    jobs = jobset(name)["spec"]["replicatedJobs"]
    jobs[0]["replicas"] = 2
    change = {"spec": {"replicatedJobs": jobs}}
    assert "immutable" in refused(422, "Invalid", custom.patch_namespaced_custom_object, *JOBSET, name, change, **how)
    core.create_namespaced_config_map("default", {**config_map(name), "immutable": True})
    refused(422, "Invalid", core.patch_namespaced_config_map, name, "default", {"data": {"a": "2"}})


# ---- server-side apply ----


def applied(custom: client.CustomObjectsApi, name: str, body: Any, manager: str = "twinstep", **how: Any) -> Any:
    _, code, _ = custom.patch_namespaced_custom_object_with_http_info(
        *JOBSET, name, body, field_manager=manager, _content_type=APPLY, **how
    )
    return custom.get_namespaced_custom_object(*JOBSET, name), code


def test_apply_creates_once_and_says_so(custom: client.CustomObjectsApi, name: str) -> None:
    made, code = applied(custom, name, jobset(name))
    assert code == 201
    again, code = applied(custom, name, jobset(name))
    assert code == 200
    assert again == made  # not even a new version
    managers = [(each["manager"], each["operation"]) for each in made["metadata"]["managedFields"]]
    assert managers == [("twinstep", "Apply")]


def test_the_official_client_gives_back_nothing_of_what_an_apply_created(
    custom: client.CustomObjectsApi, name: str
) -> None:
    how = {"field_manager": "twinstep", "_content_type": APPLY}
    assert custom.patch_namespaced_custom_object(*JOBSET, name, jobset(name), **how) is None  # it expects a 200 only
    raw = custom.patch_namespaced_custom_object(*JOBSET, name, jobset(name), _preload_content=False, **how)
    assert yaml.safe_load(raw.data)["metadata"]["uid"]


def test_apply_removes_what_it_no_longer_says_and_leaves_others_alone(
    custom: client.CustomObjectsApi, name: str
) -> None:
    body = jobset(name)
    body["metadata"]["annotations"] = {"mine": "1", "gone": "1"}
    applied(custom, name, body)
    how = {"_content_type": "application/merge-patch+json", "field_manager": "kubectl"}
    custom.patch_namespaced_custom_object(*JOBSET, name, {"metadata": {"annotations": {"theirs": "1"}}}, **how)
    del body["metadata"]["annotations"]["gone"]
    found, _ = applied(custom, name, body)
    assert found["metadata"]["annotations"] == {"mine": "1", "theirs": "1"}


def test_apply_conflicts_with_another_manager_unless_it_forces(custom: client.CustomObjectsApi, name: str) -> None:
    applied(custom, name, jobset(name, suspend=True))
    how = {"_content_type": "application/merge-patch+json", "field_manager": "kueue"}
    custom.patch_namespaced_custom_object(*JOBSET, name, {"spec": {"suspend": False}}, **how)
    said = refused(409, "Conflict", applied, custom, name, jobset(name, suspend=True))
    assert said == 'Apply failed with 1 conflict: conflict with "kueue": .spec.suspend'
    found, _ = applied(custom, name, jobset(name))  # who no longer speaks of it is at peace
    assert found["spec"]["suspend"] is False
    found, _ = applied(custom, name, jobset(name, suspend=True), force=True)
    assert found["spec"]["suspend"] is True


def test_apply_never_brings_back_an_object_of_another_uid(custom: client.CustomObjectsApi, name: str) -> None:
    made, _ = applied(custom, name, jobset(name))
    custom.delete_namespaced_custom_object(*JOBSET, name)
    body = jobset(name)
    body["metadata"]["uid"] = made["metadata"]["uid"]
    refused(409, "Conflict", applied, custom, name, body)
    applied(custom, name, jobset(name))
    refused(409, "Conflict", applied, custom, name, body)


def test_apply_needs_a_manager(custom: client.CustomObjectsApi, name: str) -> None:
    how = {"_content_type": APPLY}
    said = refused(422, "Invalid", custom.patch_namespaced_custom_object, *JOBSET, name, jobset(name), **how)
    assert "fieldManager" in said


# ---- delete, owners, finalizers ----


def test_delete_minds_the_uid(custom: client.CustomObjectsApi, name: str) -> None:
    made = custom.create_namespaced_custom_object(*JOBSET, jobset(name))
    other = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="another"))
    assert "Precondition" in refused(409, "Conflict", custom.delete_namespaced_custom_object, *JOBSET, name, body=other)
    own = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=made["metadata"]["uid"]))
    assert custom.delete_namespaced_custom_object(*JOBSET, name, body=own)["status"] == "Success"
    refused(404, "NotFound", custom.delete_namespaced_custom_object, *JOBSET, name)


def owned(name: str, owner: dict[str, Any]) -> dict[str, Any]:
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    reference |= {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return config_map(name, namespace="default", ownerReferences=[reference])


@pytest.mark.parametrize(("policy", "there"), [("Background", False), ("Foreground", False), ("Orphan", True)])
def test_what_is_owned_goes_with_its_owner_unless_it_is_let_go(
    custom: client.CustomObjectsApi, server: FakeServer, name: str, policy: str, there: bool
) -> None:
    made = custom.create_namespaced_custom_object(*JOBSET, jobset(name))
    server.put(owned(f"{name}-a", made))
    custom.delete_namespaced_custom_object(*JOBSET, name, propagation_policy=policy)
    assert bool([each for each in server.all("ConfigMap") if each["metadata"]["name"] == f"{name}-a"]) is there
    refused(404, "NotFound", custom.get_namespaced_custom_object, *JOBSET, name)


def test_what_is_owned_by_nobody_that_is_there_is_collected(server: FakeServer, name: str) -> None:
    nobody = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gone", "uid": "not-there"}}
    server.put(owned(name, nobody))
    assert not [each for each in server.all("ConfigMap") if each["metadata"]["name"] == name]


def test_finalizers_keep_an_object_until_they_are_gone(custom: client.CustomObjectsApi, name: str) -> None:
    body = jobset(name)
    body["metadata"]["finalizers"] = ["example.com/wait"]
    custom.create_namespaced_custom_object(*JOBSET, body)
    custom.delete_namespaced_custom_object(*JOBSET, name)
    assert custom.get_namespaced_custom_object(*JOBSET, name)["metadata"]["deletionTimestamp"]
    refused(409, "AlreadyExists", custom.create_namespaced_custom_object, *JOBSET, jobset(name))
    how = {"_content_type": "application/merge-patch+json"}
    custom.patch_namespaced_custom_object(*JOBSET, name, {"metadata": {"finalizers": None}}, **how)
    refused(404, "NotFound", custom.get_namespaced_custom_object, *JOBSET, name)


# ---- watches ----


def events(core: client.CoreV1Api, version: str, seconds: int = 1, **how: Any) -> list[tuple[str, str]]:
    found = watch.Watch().stream(
        core.list_namespaced_config_map, "default", resource_version=version, timeout_seconds=seconds, **how
    )
    return [(each["type"], each["raw_object"]["metadata"].get("name", "")) for each in found]


def test_a_watch_goes_on_from_a_version(core: client.CoreV1Api, server: FakeServer, name: str) -> None:
    start = core.list_namespaced_config_map("default").metadata.resource_version
    server.put(config_map(name, namespace="default", labels={"w": "1"}))
    core.patch_namespaced_config_map(name, "default", {"data": {"b": "2"}})
    core.delete_namespaced_config_map(name, "default")
    assert events(core, start) == [("ADDED", name), ("MODIFIED", name), ("DELETED", name)]


def test_a_watch_sees_what_comes_while_it_is_open(core: client.CoreV1Api, server: FakeServer, name: str) -> None:
    start = core.list_namespaced_config_map("default").metadata.resource_version
    later = threading.Timer(0.2, lambda: server.put(config_map(name, namespace="default")))
    later.start()
    assert events(core, start) == [("ADDED", name)]
    later.join()


def test_leaving_a_selector_is_being_deleted_to_its_watch(
    core: client.CoreV1Api, server: FakeServer, name: str
) -> None:
    start = core.list_namespaced_config_map("default").metadata.resource_version
    server.put(config_map(name, namespace="default", labels={"mine": name}))
    core.patch_namespaced_config_map(name, "default", {"metadata": {"labels": {"mine": None}}})
    core.patch_namespaced_config_map(name, "default", {"metadata": {"labels": {"mine": name}}})
    found = events(core, start, label_selector=f"mine={name}")
    assert found == [("ADDED", name), ("DELETED", name), ("ADDED", name)]


def test_bookmarks_tell_the_version(core: client.CoreV1Api, server: FakeServer) -> None:
    found = [
        each["raw_object"]["metadata"]["resourceVersion"]
        for each in watch.Watch().stream(
            core.list_namespaced_config_map, "default", allow_watch_bookmarks=True, timeout_seconds=1,
            resource_version=str(server.objects.version),
        )
        if each["type"] == "BOOKMARK"
    ]  # fmt: skip
    assert found
    assert found[-1] == str(server.objects.version)


def test_a_version_that_is_forgotten_is_410(core: client.CoreV1Api, server: FakeServer, name: str) -> None:
    start = core.list_namespaced_config_map("default").metadata.resource_version
    server.put(config_map(name, namespace="default"))
    server.objects.compact()
    with pytest.raises(ApiException) as caught:
        events(core, start)
    assert caught.value.status == 410


# ---- leases, logs, discovery ----


def test_of_two_who_take_a_lease_one_is_refused(api: client.ApiClient, name: str) -> None:
    leases = client.CoordinationV1Api(api)
    lease = {"metadata": {"name": name}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15}}
    leases.create_namespaced_lease("default", {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease})
    one, two = leases.read_namespaced_lease(name, "default"), leases.read_namespaced_lease(name, "default")
    one.spec.holder_identity, two.spec.holder_identity = "b", "c"
    leases.replace_namespaced_lease(name, "default", one)
    refused(409, "Conflict", leases.replace_namespaced_lease, name, "default", two)


def running(server: FakeServer, name: str) -> str:
    status = {"name": "worker", "restartCount": 0, "state": {"running": {}}, "ready": True, "image": "i", "imageID": ""}
    made = server.put(pod(name, phase="Running", containerStatuses=[status]))
    return str(made["metadata"]["uid"])


def read(core: client.CoreV1Api, name: str, **how: Any) -> bytes:
    return bytes(core.read_namespaced_pod_log(name, "default", _preload_content=False, **how).data)


def test_a_log_is_read_with_times_from_a_time_and_in_part(
    core: client.CoreV1Api, server: FakeServer, name: str
) -> None:
    uid = running(server, name)
    server.logs.write(uid, "worker", b"one\nt\xffwo\r\n", at=1_700_000_000.5)
    server.logs.write(uid, "worker", "thr", at=1_700_000_001)
    server.logs.write(uid, "worker", "ee", at=1_700_000_002)
    assert read(core, name) == b"one\nt\xffwo\r\nthree"
    stamped = read(core, name, timestamps=True)
    assert stamped == (
        b"2023-11-14T22:13:20.500000000Z one\n2023-11-14T22:13:20.500000000Z t\xffwo\r\n"
        b"2023-11-14T22:13:21.000000000Z three"
    )
    assert read(core, name, limit_bytes=5) == b"one\nt"
    assert read(core, name, tail_lines=1) == b"three"
    assert read(core, name, tail_lines=2) == b"t\xffwo\r\nthree"


def test_following_a_log_ends_with_its_container(core: client.CoreV1Api, server: FakeServer, name: str) -> None:
    uid = running(server, name)
    server.logs.write(uid, "worker", "one\n")

    def go_on() -> None:
        time.sleep(0.2)
        server.logs.write(uid, "worker", "two\n")
        server.logs.end(uid, "worker")

    thread = threading.Thread(target=go_on)
    thread.start()
    assert read(core, name, follow=True) == b"one\ntwo\n"
    thread.join()


def test_a_log_that_is_not_there_yet_is_a_bad_request(core: client.CoreV1Api, server: FakeServer, name: str) -> None:
    refused(404, "NotFound", core.read_namespaced_pod_log, name, "default")
    server.put(pod(name))
    said = refused(400, "BadRequest", core.read_namespaced_pod_log, name, "default")
    assert said == f'container "worker" in pod "{name}" is waiting to start: ContainerCreating'
    said = refused(400, "BadRequest", core.read_namespaced_pod_log, name, "default", previous=True)
    assert said == f'previous terminated container "worker" in pod "{name}" not found'


def test_discovery_knows_what_is_served(api: client.ApiClient) -> None:
    found = client.CustomObjectsApi(api).get_api_resources("kueue.x-k8s.io", "v1beta1")
    assert "workloads" in [each.name for each in found.resources]
    assert client.VersionApi(api).get_code().major == "1"


def test_both_versions_of_kueue_show_the_same_objects(custom: client.CustomObjectsApi, server: FakeServer) -> None:
    server.put(
        {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "v5p"}, "spec": {}}
    )
    for version in ("v1beta1", "v1beta2"):
        found = custom.get_cluster_custom_object("kueue.x-k8s.io", version, "resourceflavors", "v5p")
        assert found["apiVersion"] == f"kueue.x-k8s.io/{version}"


# ---- faults ----


def test_faults_strike_the_requests_they_were_meant_for(core: client.CoreV1Api, server: FakeServer, name: str) -> None:
    server.faults.answer(429, method="POST", path="configmaps", retry_after=1)
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_config_map("default", config_map(name))
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    server.faults.answer(504, method="POST", path="configmaps", stored=True)
    refused(504, "Timeout", core.create_namespaced_config_map, "default", config_map(name))
    refused(409, "AlreadyExists", core.create_namespaced_config_map, "default", config_map(name))
    server.faults.hang(0.1, method="DELETE", path=name)
    with pytest.raises(HTTPError):
        core.delete_namespaced_config_map(name, "default")
    refused(404, "NotFound", core.read_namespaced_config_map, name, "default")
    server.api.refuse_token = True
    refused(401, "Unauthorized", core.list_namespaced_config_map, "default")


def raw_watch(core: client.CoreV1Api, version: str, seconds: int = 1) -> bytes:
    answer = core.list_namespaced_config_map(
        "default", watch=True, resource_version=version, timeout_seconds=seconds, _preload_content=False
    )
    found = bytearray()
    try:
        while part := answer.read1(65536) if hasattr(answer, "read1") else answer.read(65536):
            found += part
    except HTTPError:
        found += b"<cut>"
    finally:
        answer.close()
    return bytes(found)


@pytest.mark.parametrize("kind", ["gone", "half_line", "garbage", "duplicate", "old", "close", "mute"])
def test_a_watch_breaks_as_it_was_told(core: client.CoreV1Api, server: FakeServer, name: str, kind: str) -> None:
    start = core.list_namespaced_config_map("default").metadata.resource_version
    server.put(config_map(name, namespace="default"))
    core.patch_namespaced_config_map(name, "default", {"data": {"b": "2"}})
    server.faults.watch(kind, path="configmaps")
    text = raw_watch(core, start).decode()
    lines = text.split("\n")
    if kind == "gone":
        assert '"type": "ERROR"' in lines[0]
        assert '"code": 410' in lines[0]
    elif kind == "half_line":
        assert text.startswith('{"type":"ADDED"')
        assert "\n" not in text
    elif kind == "garbage":
        assert lines[0] == "this is no JSON"
        assert '"type":"ADDED"' in lines[1]
    elif kind == "duplicate":
        assert lines[0] == lines[1]
    elif kind == "old":
        assert [yaml.safe_load(line)["type"] for line in lines[:3]] == ["ADDED", "MODIFIED", "ADDED"]
    else:
        assert text == ""
    assert raw_watch(core, start).decode().count("\n") == 2  # the next one is whole


def test_a_server_that_comes_back_has_kept_its_port_and_its_objects(tmp_path: Path) -> None:
    with FakeServer(tmp_path) as server:
        server.put(config_map("a", namespace="default"))
        port = server.port
        with server.away():
            pass
        assert server.port == port
        assert [each["metadata"]["name"] for each in server.all("ConfigMap")] == ["a"]
