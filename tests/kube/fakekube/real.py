"""A real API server behind the handle that tests have on the simulated one: what it cannot be told to do is a skip.

The cluster must be one made for tests: `default` is written to. What was there before a test is not shown to it, and
stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from .resources import BY_KIND, RESOURCES, Object, Refusal, Resource
from .server import FakeServer

REAL = os.environ.get("TWINSTEP_TEST_KUBECONFIG")
NAMESPACE = "default"
KEPT = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt"), ("Service", "kubernetes")}
BUSY = ("Pod", "JobSet", "RayJob")
EMPTIED = [each for each in RESOURCES if each.namespaced and each.kind not in ("Event", "Lease")]


class Hooks:
    """What only the simulated server has; a test that asks for it ends here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"only the simulated API server does what a test tells it: {self._name}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            pytest.skip(f"only the simulated API server does what a test tells it: {self._name}.{name}")
        object.__setattr__(self, name, value)


class RealObjects(Hooks):
    """Objects of the cluster, read and written as an admin."""

    def __init__(self, api: client.ApiClient) -> None:
        super().__init__("objects")
        self._api = api
        self._namespaces: list[str] = []
        self._theirs: set[str] = set()
        """Uids of what was in the cluster's namespace before the test."""

    def get(self, kind: str, namespace: str, name: str) -> Object:
        return self._call("GET", _path(BY_KIND[kind], namespace, name))

    def put(self, value: Object) -> Object:
        resource, metadata = BY_KIND[value["kind"]], value["metadata"]
        body = {"apiVersion": resource.api_version, **{key: part for key, part in value.items() if key != "status"}}
        made = self._call("POST", _path(resource, metadata.get("namespace", NAMESPACE)), body)
        return self.set_status(made, value["status"]) if "status" in value else made

    def set_status(self, value: Object, status: Object) -> Object:
        resource, metadata = BY_KIND[value["kind"]], value["metadata"]
        path = _path(resource, metadata.get("namespace", ""), metadata["name"])
        return self._call("PATCH", f"{path}/status", [{"op": "add", "path": "/status", "value": status}])

    def delete(self, resource: Resource, namespace: str, name: str, *, grace: int | None = None) -> Object:
        return self._call("DELETE", _path(resource, namespace, name), {"gracePeriodSeconds": grace})

    def namespace(self, name: str) -> Object:
        self._namespaces.append(name)
        return self._call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def list(self, kind: str, namespace: str = "") -> list[Object]:
        resource = BY_KIND[kind]
        try:
            page = self._call("GET", _path(resource, namespace or NAMESPACE))
        except Refusal as refusal:
            if refusal.code == 404:  # a kind that this cluster does not serve
                return []
            raise
        items = [{"kind": kind, "apiVersion": resource.api_version, **each} for each in page["items"]]
        ours = [each for each in items if each["metadata"].get("uid") not in self._theirs]
        return [each for each in ours if (kind, each["metadata"]["name"]) not in KEPT]

    def _call(self, method: str, path: str, body: Any = None) -> Object:
        content = "application/json-patch+json" if method == "PATCH" else "application/json"
        asked = self._api.param_serialize(
            method,
            path,
            header_params={"Content-Type": content, "Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = self._api.call_api(*asked)
        found = json.loads(answer.read() or b"{}")
        if answer.status >= 300:
            raise Refusal(answer.status, found.get("reason", ""), found.get("message", ""))
        return dict(found)


class RealServer:
    """A handle on a real API server, for the test that uses it."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = self.admin = kubeconfig
        settings = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=settings)
        self._api = client.ApiClient(settings)
        self.objects = RealObjects(self._api)

    def __enter__(self) -> RealServer:
        if busy := [f"{kind}/{each['metadata']['name']}" for kind in BUSY for each in self.all(kind)]:
            pytest.fail(f"the namespace {NAMESPACE} is in use ({', '.join(busy[:5])}): give a cluster made for tests")
        found = [each for resource in EMPTIED for each in self.all(resource.kind)]
        self.objects._theirs = {each["metadata"]["uid"] for each in found}
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in self.objects._namespaces:
            self.objects._call("DELETE", f"/api/v1/namespaces/{namespace}")
        for resource in EMPTIED:
            for each in self.all(resource.kind):
                self._remove(resource, each)
        self._api.close()

    def _remove(self, resource: Resource, found: Object) -> None:
        name = found["metadata"]["name"]
        try:
            if found["metadata"].get("finalizers"):
                none = [{"op": "remove", "path": "/metadata/finalizers"}]
                self.objects._call("PATCH", _path(resource, NAMESPACE, name), none)
            self.objects.delete(resource, NAMESPACE, name, grace=0)
        except Refusal as refusal:
            if refusal.code != 404:
                raise

    def put(self, value: Object) -> Object:
        """Create an object as somebody else would."""
        return self.objects.put(value)

    def all(self, kind: str, namespace: str = "") -> list[Object]:
        """Return objects of a kind."""
        return self.objects.list(kind, namespace)

    def __getattr__(self, name: str) -> Any:
        if name in ("faults", "logs", "api"):
            return Hooks(name)
        pytest.skip(f"only the simulated API server does what a test tells it: {name}")


@contextmanager
def api_server(directory: Path, **simulated: Any) -> Iterator[Any]:
    """Give a test its API server: the simulated one, or the real one that TWINSTEP_TEST_KUBECONFIG names."""
    with RealServer(Path(REAL)) if REAL else FakeServer(directory, **simulated) as server:
        yield server


def _path(resource: Resource, namespace: str, name: str = "") -> str:
    base = f"/apis/{resource.group}" if resource.group else "/api"
    within = f"/namespaces/{namespace}" if resource.namespaced else ""
    return f"{base}/{resource.versions[0]}{within}/{resource.plural}" + (f"/{name}" if name else "")
