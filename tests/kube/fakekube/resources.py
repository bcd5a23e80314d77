"""What the fake API server serves: one table of kinds, and Kubernetes' answer to a request that cannot be met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """One kind, in every version it is served in; the first one is what is stored."""

    group: str
    versions: tuple[str, ...]
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """Whether `status` is written through a path of its own."""

    @property
    def custom(self) -> bool:
        """Whether it comes from a CRD: such objects bear their kind in lists too."""
        return self.group in _CUSTOM

    @property
    def api_version(self) -> str:
        """`apiVersion` of the version that is stored."""
        return self.in_version(self.versions[0])

    def in_version(self, version: str) -> str:
        """Return the `apiVersion` of a version."""
        return f"{self.group}/{version}" if self.group else version

    @property
    def full(self) -> str:
        """`jobsets.jobset.x-k8s.io`, as messages say it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_CUSTOM = ("jobset.x-k8s.io", "ray.io", "kueue.x-k8s.io")


def _core(plural: str, kind: str, *, namespaced: bool = True, status: bool = False) -> Resource:
    return Resource(group="", versions=("v1",), plural=plural, kind=kind, namespaced=namespaced, status=status)


def _of(
    group: str, versions: str, plural: str, kind: str, *, namespaced: bool = True, status: bool = False
) -> Resource:
    return Resource(
        group=group, versions=tuple(versions.split()), plural=plural, kind=kind, namespaced=namespaced, status=status
    )


KUEUE = ("kueue.x-k8s.io", "v1beta2 v1beta1")
RESOURCES: tuple[Resource, ...] = (
    _core("namespaces", "Namespace", namespaced=False, status=True),
    _core("nodes", "Node", namespaced=False, status=True),
    _core("pods", "Pod", status=True),
    _core("services", "Service", status=True),
    _core("configmaps", "ConfigMap"),
    _core("secrets", "Secret"),
    _core("serviceaccounts", "ServiceAccount"),
    _core("events", "Event"),
    _of("events.k8s.io", "v1", "events", "Event"),
    _of("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    _of("coordination.k8s.io", "v1", "leases", "Lease"),
    _of("batch", "v1", "jobs", "Job", status=True),
    _of("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", status=True),
    _of("ray.io", "v1", "rayjobs", "RayJob", status=True),
    _of("ray.io", "v1", "rayclusters", "RayCluster", status=True),
    _of(*KUEUE, "workloads", "Workload", status=True),
    _of(*KUEUE, "localqueues", "LocalQueue", status=True),
    _of(*KUEUE, "clusterqueues", "ClusterQueue", namespaced=False, status=True),
    _of(*KUEUE, "resourceflavors", "ResourceFlavor", namespaced=False),
    _of(*KUEUE, "workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False),
)

BY_KIND: Mapping[str, Resource] = {each.kind: each for each in reversed(RESOURCES)}
BY_PATH: Mapping[tuple[str, str], Resource] = {(each.group, each.plural): each for each in RESOURCES}


class Refusal(Exception):
    """An answer that is no success: a Status object, with its code and its reason in Kubernetes' own words."""

    def __init__(self, code: int, reason: str, message: str, *, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    @property
    def status(self) -> Object:
        """The body of the answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            **({"reason": self.reason} if self.reason else {}),
            **({"details": self.details} if self.details else {}),
            "code": self.code,
        }


def not_found(resource: Resource, name: str) -> Refusal:
    """404: no object of that name."""
    return Refusal(404, "NotFound", f'{resource.full} "{name}" not found', details=_details(resource, name))


def already_exists(resource: Resource, name: str) -> Refusal:
    """409: create of a name that is taken."""
    return Refusal(409, "AlreadyExists", f'{resource.full} "{name}" already exists', details=_details(resource, name))


def conflict(resource: Resource, name: str, why: str) -> Refusal:
    """409: the object is not the one, or not in the version, that the request spoke of."""
    message = f'Operation cannot be fulfilled on {resource.full} "{name}": {why}'
    return Refusal(409, "Conflict", message, details=_details(resource, name))


def modified(resource: Resource, name: str) -> Refusal:
    """409: the object has changed since the version that the request spoke of."""
    return conflict(
        resource,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
    )


def invalid(resource: Resource, name: str, causes: list[tuple[str, str]]) -> Refusal:
    """422: (field, message) of everything that is wrong."""
    said = [f"{field}: {message}" if field else message for field, message in causes]
    text = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    details = {
        **_details(resource, name),
        "causes": [{"reason": "FieldValueInvalid", "message": message, "field": field} for field, message in causes],
    }
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details=details)


def bad_request(message: str) -> Refusal:
    """400."""
    return Refusal(400, "BadRequest", message)


def gone(message: str) -> Refusal:
    """410: a resourceVersion, or a page's token, that is too old."""
    return Refusal(410, "Expired", message)


def _details(resource: Resource, name: str) -> Object:
    return {"name": name, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}
