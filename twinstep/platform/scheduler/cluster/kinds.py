"""The kinds of objects the control plane handles in a cluster, and what it may do with each: one table. Pure.

Its role (`docs/howto/connect-a-cluster.md`, `manifests/control-plane/`) follows from this table, and every request is
checked against it before it is sent: what is not here is never asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of object."""

    kind: str
    group: str
    """Empty: the core group."""
    version: str
    plural: str
    verbs: tuple[str, ...]
    """What the control plane asks of the API server with it, as a Role writes it."""
    why: str
    """What it needs them for."""

    @property
    def api_version(self) -> str:
        """As an object's `apiVersion` writes it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As an error of the API server names it: `jobsets.jobset.x-k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
        """Return the path of an object, or of all of them in a namespace, or in all namespaces."""
        parts = ["/apis/" + self.group if self.group else "/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, sub) if part is not None]
        return "/".join(parts)


_BESIDE = ("get", "create", "patch", "deletecollection")

KINDS: Mapping[str, Kind] = {
    kind.kind: kind
    for kind in (
        Kind(
            kind="JobSet", group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets",
            verbs=("get", "list", "watch", "create", "patch", "delete"), why="the workload of a TPU job",
        ),
        Kind(
            kind="RayJob", group="ray.io", version="v1", plural="rayjobs",
            verbs=("get", "list", "watch", "create", "patch", "delete"), why="the workload of a GPU job",
        ),
        Kind(
            kind="Workload", group="kueue.x-k8s.io", version="v1beta2", plural="workloads",
            verbs=("list", "watch", "patch"), why="what a queue says of a run; pausing it there",
        ),
        Kind(
            kind="Pod", group="", version="v1", plural="pods",
            verbs=("list", "watch"), why="which pods run, wait or have failed",
        ),
        Kind(kind="PodLog", group="", version="v1", plural="pods/log", verbs=("get",), why="what workers print"),
        Kind(
            kind="Service", group="", version="v1", plural="services",
            verbs=("get",), why="whether the name by which a JobSet's pods find each other is free",
        ),
        Kind(kind="Event", group="", version="v1", plural="events", verbs=("list", "watch"), why="why a pod waits"),
        Kind(kind="ConfigMap", group="", version="v1", plural="configmaps", verbs=_BESIDE, why="the spec of a run"),
        Kind(
            kind="ServiceAccount", group="", version="v1", plural="serviceaccounts",
            verbs=_BESIDE, why="a run's own account, which may do nothing",
        ),
        Kind(
            kind="NetworkPolicy", group="networking.k8s.io", version="v1", plural="networkpolicies",
            verbs=_BESIDE, why="closing a run off",
        ),
        Kind(
            kind="Secret", group="", version="v1", plural="secrets",
            verbs=("create", "patch", "deletecollection"), why="the token of a run; secrets are never read",
        ),
        Kind(
            kind="Lease", group="coordination.k8s.io", version="v1", plural="leases",
            verbs=("get", "create", "update"), why="which replica looks after runs",
        ),
    )
}  # fmt: skip
"""By kind. `Lease` is needed in the control plane's own namespace, the others in those of its runs."""

WORKLOADS = ("JobSet", "RayJob")
BESIDE = ("ConfigMap", "ServiceAccount", "NetworkPolicy", "Secret")
"""What stands beside a workload; see `scheduler/render/surroundings.py`."""


def rules(*kinds: str) -> list[dict[str, list[str]]]:
    """Return the rules of a Role that allows what the table says, and no more; for all kinds where none is named."""
    return [
        {"apiGroups": [row.group], "resources": [row.plural], "verbs": list(row.verbs)}
        for row in (KINDS[kind] for kind in (kinds or KINDS))
    ]
