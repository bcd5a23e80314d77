"""A Kubernetes cluster as the reconciler's port has it: apply, look, confirm, suspend, delete, for one run at a time.

Nothing without the run's label is changed or deleted, and nothing of another uid than the one that was looked at.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from twinstep.platform.scheduler.cluster.evidence import Evidence, Object
from twinstep.platform.scheduler.cluster.kinds import BESIDE
from twinstep.platform.scheduler.cluster.kube_api import KubeApi
from twinstep.platform.scheduler.cluster.mirror import (
    JOB_UID_LABEL,
    MANAGED_LABEL,
    MANAGER,
    RUN_LABEL,
    of_workload,
    trimmed,
)
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.platform.scheduler.cluster.status import QUEUE_LABEL
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.platform.scheduler.render.context import DOMAIN
from twinstep.platform.scheduler.render.names import label_value
from twinstep.spec.errors import ConflictError, NotFoundError, TwinstepError, UnavailableError

log = logging.getLogger(__name__)

PAGE = 500


class KubeCluster:
    """The `Cluster` of port.py, over one API server."""

    def __init__(self, api: KubeApi, watcher: Watcher) -> None:
        """`watcher` keeps the mirror that `look` reads; who starts and stops it is somebody else's affair."""
        self._api = api
        self._watcher = watcher
        self._unlabelled: dict[str, str] = {}
        """By run, what keeps its workload from having its labels again; told once."""

    # ---- writing ----

    def apply(self, run_id: str, objects: Sequence[Object], *, token: str | None = None) -> WorkloadRef:
        """See `Cluster.apply`.

        The workload is applied once: what is there of it already is this run's and stays as it is, since its spec
        cannot change and a queue has a hand in it.
        """
        *beside, workload = objects
        metadata = workload["metadata"]
        try:
            there = self._owned(run_id, workload)
            if there is None:
                self._check_service(workload)
            secret = None if token is None else self._replace_secret(run_id, metadata, token)
            for each in beside:
                self._apply_own(run_id, each, owner=there)
            if there is None:
                # Not by force: whatever of that name came between is not ours to change.
                there = self._api.apply(workload, force=False)
            for each in beside:
                self._apply_own(run_id, each, owner=there)
            if secret is not None:
                self._api.apply(_with_owner(secret, there), force=True)
            elif token is None:
                self._own_secret(run_id, there)
        except NotFoundError as error:
            raise UnavailableError(error.problem, remedy=error.remedy) from error
        return WorkloadRef(
            kind=workload["kind"],
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=there["metadata"]["uid"],
        )

    def put_back(self, run_id: str, ref: WorkloadRef, objects: Sequence[Object]) -> list[str]:
        """See `Cluster.put_back`."""
        *beside, workload = objects
        owner = {**workload, "metadata": {**workload["metadata"], "uid": ref.uid}}
        missing = [each for each in beside if self._owned(run_id, each) is None]
        if not missing or self._mine(run_id, ref) is None:  # its end takes along what it owns
            return []
        for each in missing:
            self._apply_own(run_id, each, owner=owner)
        return [f"{each['kind']} {each['metadata']['name']}" for each in missing]

    def _owned(self, run_id: str, wanted: Object) -> dict[str, Any] | None:
        """Return an object as it is now; None where it is not there.

        Raises:
            ConflictError: it is not this run's, or is being deleted.
        """
        metadata = wanted["metadata"]
        kind, namespace, name = wanted["kind"], metadata["namespace"], metadata["name"]
        found = self._api.get(kind, namespace, name)
        if found is None:
            return None
        if not _is_of(run_id, found):
            raise ConflictError(
                f"namespace {namespace} has a {kind} {name} already, and it is not this run's",
                remedy=f"delete it (kubectl -n {namespace} delete {kind.lower()} {name}), or give the job another name",
            )
        if found["metadata"].get("deletionTimestamp"):
            raise ConflictError(
                f"the {kind} {name} in namespace {namespace} is being deleted",
                remedy="wait until it is gone; it is tried again",
            )
        return found

    def _check_service(self, workload: Object) -> None:
        """Raise ConflictError where a Service has the name that a JobSet's controller makes one of.

        It would take that one without a word, whatever it selects, and no pod would find another.
        """
        if workload["kind"] != "JobSet":
            return
        namespace, name = workload["metadata"]["namespace"], workload["metadata"]["name"]
        if self._api.get("Service", namespace, name) is not None:
            raise ConflictError(
                f"namespace {namespace} has a Service {name} already, by which the pods would look for each other",
                remedy=f"delete it (kubectl -n {namespace} delete service {name}), or give the job another name",
            )

    def _apply_own(self, run_id: str, wanted: Object, *, owner: Object | None) -> None:
        found = self._owned(run_id, wanted)
        if owner is None and found is not None:
            return  # applied by an earlier try; its owner comes when there is one
        if found is not None and _owner_of(owner) in (found["metadata"].get("ownerReferences") or ()):
            return
        body: dict[str, Any] = {**wanted, "metadata": dict(wanted["metadata"])}
        if found is not None:
            body["metadata"]["uid"] = found["metadata"]["uid"]  # this one, not another that comes by its name
        if owner is not None:
            body["metadata"]["ownerReferences"] = [_owner_of(owner)]
        self._api.apply(body, force=True)

    def _replace_secret(self, run_id: str, workload: Mapping[str, Any], token: str) -> dict[str, Any]:
        """Make the Secret with the run's token, in place of one that an earlier try made; return what makes it.

        The control plane may not read secrets: one of the run's own is deleted by its label, and whatever has the
        name then is somebody else's.
        """
        name, namespace = f"{workload['name']}-token", workload["namespace"]
        metadata = {"name": name, "namespace": namespace, "labels": _own_labels(workload.get("labels") or {})}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "Opaque",
            "data": {"token": base64.b64encode(token.encode()).decode()},
        }
        for last in (False, True):
            try:
                made = self._api.create(body)
                break
            except ConflictError:
                if last:
                    raise ConflictError(
                        f"namespace {namespace} has a Secret {name} already, and it is not this run's",
                        remedy=f"delete it (kubectl -n {namespace} delete secret {name}), or give the job another name",
                    ) from None
                self._api.delete_all("Secret", namespace, selector=_selector(run_id))
        return {**body, "metadata": {**metadata, "uid": made["metadata"]["uid"]}}

    def _own_secret(self, run_id: str, owner: Object) -> None:
        """Let a run's Secret belong to its workload, where an earlier try made it and did not come as far."""
        metadata = owner["metadata"]
        label = RUN_LABEL.replace("/", "~1")
        steps: list[dict[str, Any]] = [
            {"op": "test", "path": f"/metadata/labels/{label}", "value": label_value(run_id)},
            {"op": "add", "path": "/metadata/ownerReferences", "value": [_owner_of(owner)]},
        ]
        self._api.amend("Secret", metadata["namespace"], f"{metadata['name']}-token", steps)

    def suspend(self, run_id: str, ref: WorkloadRef, suspended: bool) -> None:
        """See `Cluster.suspend`."""
        found = self._mine(run_id, ref)
        if found is None:
            raise NotFoundError(
                f"the {ref.kind} {ref.name} is not in namespace {ref.namespace} any more",
                remedy="nothing to do: it has ended, or somebody deleted it",
            )
        if QUEUE_LABEL not in (found["metadata"].get("labels") or {}):
            self._patch(ref.kind, found, {"suspend": suspended})
            return
        admission = self._admission(ref.namespace, found["metadata"]["uid"])
        if admission is None:
            raise UnavailableError(
                f"Kueue has made no Workload for the {ref.kind} {ref.name} yet",
                remedy="it is tried again; see that Kueue runs and handles this kind",
            )
        self._patch("Workload", admission, {"active": not suspended})

    def _patch(self, kind: str, found: Object, spec: Mapping[str, Any]) -> None:
        metadata = found["metadata"]
        if all((found.get("spec") or {}).get(name) == value for name, value in spec.items()):
            return
        patch = {"metadata": {"uid": metadata["uid"]}, "spec": spec}
        self._api.merge(kind, metadata["namespace"], metadata["name"], patch)

    def delete(self, run_id: str, ref: WorkloadRef) -> bool:
        """See `Cluster.delete`."""
        found = self._mine(run_id, ref)
        if found is not None:
            if found["metadata"].get("deletionTimestamp"):
                return True
            if self._api.delete(ref.kind, ref.namespace, ref.name, uid=found["metadata"]["uid"]):
                return True
        # What an apply left that did not come as far as the workload belongs to nothing that could take it along.
        for kind in BESIDE:
            self._api.delete_all(kind, ref.namespace, selector=_selector(run_id))
        return False

    # ---- reading ----

    def workloads(self) -> Mapping[str, WorkloadRef]:
        """See `Cluster.workloads`."""
        return self._watcher.mirror.workloads()

    def look(self, run_id: str, ref: WorkloadRef) -> Evidence | None:
        """See `Cluster.look`."""
        return self._watcher.look(run_id, ref)

    def confirm(self, run_id: str, ref: WorkloadRef) -> Evidence:
        """See `Cluster.confirm`."""
        workload: Object | None = self._mine(run_id, ref)
        if workload is not None:
            self._label_again(run_id, ref.kind, workload)
        admission: Object | None = None
        pods: list[Object] = []
        if workload is not None:
            admission = self._admission(ref.namespace, workload["metadata"]["uid"])
            listed = self._api.list("Pod", ref.namespace, {"labelSelector": _selector(run_id), "limit": str(PAGE)})
            pods = [trimmed("Pod", pod) for pod in listed.get("items") or () if of_workload(pod, workload)]
            workload = trimmed(ref.kind, workload)
        return Evidence(workload=workload, admission=admission, pods=pods, now=time.time())

    def age(self) -> float | None:
        """See `Cluster.age`."""
        return self._watcher.age()

    def _mine(self, run_id: str, ref: WorkloadRef) -> dict[str, Any] | None:
        """Return a run's workload as the API server has it; None where it is not there, or another has its name."""
        found = self._api.get(ref.kind, ref.namespace, ref.name)
        if found is None or ref.uid not in ("", found["metadata"]["uid"]):
            return None
        if not _is_of(run_id, found) and not ref.uid:
            return None  # by its uid it is the run's, whatever was made of its labels
        return {**found, "kind": ref.kind}

    def _label_again(self, run_id: str, kind: str, found: Object) -> None:
        """Put back the labels by which the watches know a run's workload, where somebody took them away.

        Where that is refused, the workload is what was found all the same: its uid says so.
        """
        metadata = found["metadata"]
        labels = {MANAGED_LABEL: MANAGER, RUN_LABEL: label_value(run_id)}
        if labels.items() <= (metadata.get("labels") or {}).items() or metadata.get("deletionTimestamp"):
            self._unlabelled.pop(run_id, None)
            return
        patch = {"metadata": {"uid": metadata["uid"], "labels": labels}}
        try:
            self._api.merge(kind, metadata["namespace"], metadata["name"], patch)
        except TwinstepError as error:
            if self._unlabelled.get(run_id) != error.problem:
                self._unlabelled[run_id] = error.problem
                log.warning("%s: the labels of its %s cannot be put back: %s", run_id, kind, error.problem)

    def _admission(self, namespace: str, uid: str) -> Object | None:
        """Return Kueue's Workload of an owner; None where there is none, or no Kueue."""
        try:
            page = self._api.list("Workload", namespace, {"labelSelector": f"{JOB_UID_LABEL}={uid}"})
        except NotFoundError:
            return None
        found = page.get("items") or ()
        return trimmed("Workload", found[0]) if found else None


def _selector(run_id: str) -> str:
    return f"{RUN_LABEL}={label_value(run_id)}"


def _is_of(run_id: str, found: Object) -> bool:
    return (found["metadata"].get("labels") or {}).get(RUN_LABEL) == label_value(run_id)


def _own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that say whose an object is; a workload's say more, to its queue."""
    return {name: value for name, value in labels.items() if name.startswith((f"{DOMAIN}/", "app.kubernetes.io/"))}


def _owner_of(owner: Object | None) -> dict[str, str]:
    if owner is None:
        return {}
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]
    }  # fmt: skip


def _with_owner(body: Mapping[str, Any], owner: Object) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [_owner_of(owner)]}}
