"""What the API server and its webhooks say to a write: defaults that are filled in, and what is refused.

Schemas come from the CRD files, where a checkout has them, and from `kubernetes-validate`; without the former an
object of a custom resource is checked in its pods only.
"""

from __future__ import annotations

import base64
import copy
import functools
import re
from pathlib import Path
from typing import Any

from twinstep.platform.scheduler.validate.check import faults_of
from twinstep.platform.scheduler.validate.schemas import CustomResources, core_faults
from twinstep.spec.errors import Fault

from .resources import Object, Refusal, Resource, bad_request, invalid

CRDS = Path(__file__).parents[4] / "shared" / "crds"
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_CHECKED = ("JobSet", "RayJob", "RayCluster")
_NETWORK = "networking.k8s.io/v1"
_UNKNOWN = "is not a field of this kind"


def crds_dir() -> Path | None:
    """Return the directory with the CRD files; None where a checkout has none."""
    here = [folder / "shared" / "crds" for folder in Path(__file__).parents]
    return next((each for each in here if each.is_dir()), None)


@functools.cache
def custom_resources() -> CustomResources | None:
    """Return the schemas of custom resources."""
    directory = crds_dir()
    return CustomResources(directory) if directory else None


def warm() -> None:
    """Read the schemas now: the first object of a kind is then answered as quickly as the others."""
    for kind, version in (("JobSet", "jobset.x-k8s.io/v1alpha2"), ("RayJob", "ray.io/v1")):
        schemas = custom_resources()
        if schemas and (schema := schemas.find(version, kind)):
            schema.faults({"apiVersion": version, "kind": kind, "metadata": {}})
    for kind, version in (("ConfigMap", "v1"), ("Secret", "v1"), ("ServiceAccount", "v1"), ("NetworkPolicy", _NETWORK)):
        core_faults({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}})


def admit(resource: Resource, value: Object, old: Object | None, *, unknown: str = "warn") -> tuple[Object, list[str]]:
    """Return an object as it is stored, with defaults; and warnings.

    Args:
        old: what is there now; None: it is created.
        unknown: what becomes of fields that the kind does not have: `warn` takes them out, `strict` refuses, `apply`
            fails as server-side apply does. `trust`: no schema is asked; the writer is a simulated controller.

    Raises:
        Refusal: 422 with every fault; 400 or 500 for unknown fields.
    """
    _name(resource, value)
    value, warnings = _known(resource, value, unknown) if unknown != "trust" else (value, [])
    value = _defaults(resource, value)
    if old is not None:
        _unchanged(resource, value, old)
    return value, warnings


def _name(resource: Resource, value: Object) -> None:
    name = value["metadata"].get("name", "")
    if not name:
        raise invalid(resource, "", [("metadata.name", "Required value: name or generateName is required")])
    if not _SUBDOMAIN.match(name) or len(name) > 253:
        message = (
            f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric '
            "characters, '-' or '.', and must start and end with an alphanumeric character"
        )
        raise invalid(resource, name, [("metadata.name", message)])


def _known(resource: Resource, value: Object, unknown: str) -> tuple[Object, list[str]]:
    """Check an object against the schema of its kind."""
    given = {key: each for key, each in value.items() if key != "status"}
    own = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink")
    given["metadata"] = {key: each for key, each in value["metadata"].items() if key not in own}
    found = _faults(resource, given)
    strange = [fault for fault in found if _is_unknown(fault)]
    wrong = [fault for fault in found if not _is_unknown(fault)]
    name = value["metadata"]["name"]
    warnings = []
    if strange:
        places = [_path(fault) for fault in strange]
        if unknown == "strict":
            said = ", ".join(f'unknown field "{place}"' for place in places)
            raise bad_request(f"{resource.kind} in version {value['apiVersion']!r} cannot be handled: {said}")
        if unknown == "apply":  # no Status error inside the API server: a plain 500 without a reason
            kind = f"{resource.api_version}, Kind={resource.kind}"
            place = f"{value['metadata'].get('namespace', '')}/{name}"
            message = (
                f"failed to create typed patch object ({place}; {kind}): .{places[0]}: field not declared in schema"
            )
            raise Refusal(500, "", message)
        warnings = [f'unknown field "{place}"' for place in places]
        value = copy.deepcopy(value)
        for place in places:
            _take_out(value, place)
        if not wrong:  # the rest of the checks, which an unknown field keeps from being made
            given = {**given, **{key: value[key] for key in given if key in value and key != "metadata"}}
            wrong = [fault for fault in _faults(resource, given) if not _is_unknown(fault)]
    if wrong:
        causes = [(fault.field, f"Invalid value: {fault.given or 'null'}: {fault.problem}") for fault in wrong]
        raise invalid(resource, name, causes)
    return value, warnings


def _faults(resource: Resource, value: Object) -> list[Fault]:
    if resource.kind in _CHECKED:
        return faults_of(value, custom_resources())
    if resource.custom:
        schemas = custom_resources()
        schema = schemas.find(value["apiVersion"], resource.kind) if schemas else None
        return schema.faults(value) if schema else []
    return core_faults(value)


def _is_unknown(fault: Fault) -> bool:
    return fault.problem == _UNKNOWN or "Additional properties are not allowed" in fault.problem


def _path(fault: Fault) -> str:
    extra = re.search(r"\('([^']+)' was unexpected\)", fault.problem)
    return ".".join(part for part in (fault.field, extra[1] if extra else "") if part)


def _take_out(value: Any, place: str) -> None:
    *steps, last = re.findall(r"[^.\[\]]+", place)
    for step in steps:
        value = value[int(step)] if isinstance(value, list) else value[step]
    value.pop(last, None)


def _defaults(resource: Resource, value: Object) -> Object:
    """Fill in what the server, or the kind's webhook, fills in."""
    spec = value.get("spec")
    if resource.kind == "JobSet":
        spec = {**spec}
        network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, **(spec.get("network") or {})}
        spec["network"] = {"subdomain": value["metadata"]["name"], **network}
        spec.setdefault("successPolicy", {"operator": "All"})
        spec["replicatedJobs"] = [{"groupName": "default", "replicas": 1, **job} for job in spec["replicatedJobs"]]
    elif resource.kind == "RayJob":
        spec = {"submissionMode": "K8sJobMode", "ttlSecondsAfterFinished": 0, "backoffLimit": 0, **spec}
    elif resource.kind == "Secret":
        value = {"type": "Opaque", **value}
        for key, text in (value.pop("stringData", None) or {}).items():
            value["data"] = {**(value.get("data") or {}), key: base64.b64encode(text.encode()).decode()}
    elif resource.kind == "Namespace":
        labels = {**(value["metadata"].get("labels") or {}), "kubernetes.io/metadata.name": value["metadata"]["name"]}
        value = {**value, "metadata": {**value["metadata"], "labels": labels}}
    elif resource.kind == "Pod":
        spec = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30, **spec}
    return {**value, "spec": spec} if spec is not None else value


def _unchanged(resource: Resource, value: Object, old: Object) -> None:
    """Refuse changes of what never changes. Source: jobset's webhook and CEL rules; Kubernetes' validation."""
    causes: list[tuple[str, str]] = []
    spec, before = value.get("spec") or {}, old.get("spec") or {}
    if resource.kind == "JobSet":
        for key in ("network", "successPolicy", "failurePolicy", "startupPolicy", "managedBy"):
            if spec.get(key) != before.get(key):
                causes.append((f"spec.{key}", "Invalid value: field is immutable"))
        free = bool(spec.get("suspend") or before.get("suspend"))
        if _fixed(spec["replicatedJobs"], free) != _fixed(before["replicatedJobs"], free):
            causes.append(("spec.replicatedJobs", "Invalid value: field is immutable"))
    if resource.kind in ("ConfigMap", "Secret") and old.get("immutable"):
        for key in ("data", "binaryData", "immutable"):
            if value.get(key) != old.get(key):
                causes.append((key, "Forbidden: field is immutable when `immutable` is set"))
    if resource.kind in ("JobSet", "RayJob") and not before.get("suspend") and not spec.get("suspend"):
        key = "kueue.x-k8s.io/queue-name"
        labels, was = value["metadata"].get("labels") or {}, old["metadata"].get("labels") or {}
        if labels.get(key) != was.get(key):
            causes.append((f"metadata.labels[{key}]", "Invalid value: field is immutable"))
    if causes:
        raise invalid(resource, value["metadata"]["name"], causes)


def _fixed(jobs: list[Object], free: bool) -> list[Object]:
    """Return what of `replicatedJobs` may not change; while suspended, pods may be told other places."""
    if not free:
        return jobs
    jobs = copy.deepcopy(jobs)
    for job in jobs:
        template = job["template"]["spec"]["template"]
        for key in ("labels", "annotations"):
            (template.get("metadata") or {}).pop(key, None)
        for key in ("nodeSelector", "tolerations", "schedulingGates"):
            template["spec"].pop(key, None)
        if not template.get("metadata"):
            template.pop("metadata", None)
    return jobs
