"""What CRDs say in CEL and webhooks check in code, mirrored by hand: a schema alone lets it through, the cluster not.

Each rule takes an object and yields faults; the tables name the rule's source. Rules on updates are not here: objects
are created, and replaced by new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twinstep.platform.scheduler.render.names import DerivedName, jobset_names, rayjob_names
from twinstep.spec.base import INT32_MAX
from twinstep.spec.errors import Fault

MAX_OBJECT = 1_500_000  # bytes etcd takes for one object, by default
MAX_ANNOTATIONS = 256 * 1024
MAX_CONFIG_MAP = 1024 * 1024
EXTENDED = ("google.com/", "nvidia.com/")

Object = Mapping[str, Any]
Rule = Callable[[Object], Iterator[Fault]]

_DNS_1035 = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
_LABEL_NAME = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_RULE_NAME = re.compile(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(m|[kMGTPE]i?|Ki)?$")
_SUFFIX = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def quantity(text: str) -> float | None:
    """Return a Kubernetes quantity (`500m`, `16Gi`) as a number; None where it is none."""
    found = _QUANTITY.match(text)
    return float(found[1]) * _SUFFIX[found[2] or ""] if found else None


def any_object(value: Object) -> Iterator[Fault]:
    """Yield faults of names, labels and annotations. Source: apimachinery's validation of metadata."""
    metadata = value["metadata"]
    for key, text in (metadata.get("labels") or {}).items():
        if not _LABEL_NAME.match(key):
            yield _fault("metadata.labels", "has a name that no label can have", key, "PREFIX/NAME, 63 characters")
        if len(text) > 63 or not _LABEL_VALUE.match(text):
            yield _fault(f"metadata.labels.{key}", "is no value of a label", text, "at most 63 of A-Z a-z 0-9 - _ .")
    size = sum(len(key) + len(text.encode()) for key, text in (metadata.get("annotations") or {}).items())
    if size > MAX_ANNOTATIONS:
        yield _fault("metadata.annotations", "are too large", f"{size} bytes", f"{MAX_ANNOTATIONS} bytes")
    if not _DNS_1035.match(metadata["name"]) or len(metadata["name"]) > 63:
        yield _fault("metadata.name", "is no name", metadata["name"], "a DNS label that starts with a letter")


def config_map(value: Object) -> Iterator[Fault]:
    """Yield a fault where the data is too large."""
    size = sum(len(text.encode()) for text in value.get("data", {}).values())
    if size > MAX_CONFIG_MAP:
        yield _fault("data", "is too large", f"{size} bytes", f"{MAX_CONFIG_MAP} bytes")


def jobset_limits(value: Object) -> Iterator[Fault]:
    """Yield faults of names and counts. Source: jobset pkg/webhooks/jobset_webhook.go, ValidateCreate."""
    spec = value["spec"]
    for index, job in enumerate(spec["replicatedJobs"]):
        place = f"spec.replicatedJobs[{index}]"
        replicas, body = job.get("replicas", 1), job["template"]["spec"]
        completions, parallelism = body.get("completions", 1), body.get("parallelism", 1)
        if parallelism * replicas > INT32_MAX:
            yield _fault(f"{place}.replicas", "times parallelism overflows", f"{parallelism * replicas}", "2147483647")
        if body.get("completionMode") == "Indexed":
            names = jobset_names(value["metadata"]["name"], slices=max(1, replicas), hosts=max(1, completions))
            yield from _too_long(names if spec.get("coordinator") else names[:-1])
        for key in ("dependsOn",):
            if index == 0 and job.get(key):
                yield _fault(f"{place}.{key}", "stands on the first job, which has none before it", "", "none")


def jobset_policies(value: Object) -> Iterator[Fault]:
    """Yield faults of policies. Source: the CRD's CEL rules, and the webhook's checks of targets and patterns."""
    spec = value["spec"]
    names = [job["name"] for job in spec["replicatedJobs"]]
    depends = any(job.get("dependsOn") for job in spec["replicatedJobs"])
    if depends and (spec.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder":
        yield _fault("spec.startupPolicy", "excludes dependsOn", "InOrder", "one of the two")
    rules = (spec.get("failurePolicy") or {}).get("rules") or []
    for index, rule in enumerate(rules):
        place = f"spec.failurePolicy.rules[{index}]"
        name = rule.get("name", "")
        if not _RULE_NAME.match(name) or len(name) > 128:
            yield _fault(f"{place}.name", "is no name of a rule", name, "letters, digits and _ , : within")
        if name in [other.get("name") for other in rules[:index]]:
            yield _fault(f"{place}.name", "stands twice", name, "each name once")
        for target in rule.get("targetReplicatedJobs", ()):
            if target not in names:
                yield _fault(f"{place}.targetReplicatedJobs", "names no job", target, ", ".join(names))
        for pattern in rule.get("onJobFailureMessagePatterns", ()):
            yield from _pattern(place, pattern)
    coordinator = spec.get("coordinator")
    if coordinator:
        yield from _coordinator(spec, coordinator, names)


def _coordinator(spec: Object, coordinator: Object, names: list[str]) -> Iterator[Fault]:
    if coordinator["replicatedJob"] not in names:
        place = "spec.coordinator.replicatedJob"
        yield _fault(place, "names no job", coordinator["replicatedJob"], ", ".join(names))
        return
    job = spec["replicatedJobs"][names.index(coordinator["replicatedJob"])]
    if coordinator.get("jobIndex", 0) >= job.get("replicas", 1):
        yield _fault("spec.coordinator.jobIndex", "is beyond the replicas", str(coordinator["jobIndex"]), "fewer")
    if coordinator.get("podIndex", 0) >= job["template"]["spec"].get("completions", 0):
        yield _fault("spec.coordinator.podIndex", "is beyond the completions", str(coordinator["podIndex"]), "fewer")


def _pattern(place: str, pattern: str) -> Iterator[Fault]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield _fault(f"{place}.onJobFailureMessagePatterns", f"is no pattern: {error}", pattern, "RE2")


def jobset_jobs(value: Object) -> Iterator[Fault]:
    """Yield faults of each child Job's pod failure policy. Source: Kubernetes' validation of batch/v1 Jobs."""
    for index, job in enumerate(value["spec"]["replicatedJobs"]):
        place, body = f"spec.replicatedJobs[{index}].template.spec", job["template"]["spec"]
        policy, pod = body.get("podFailurePolicy"), body["template"]["spec"]
        if policy and pod.get("restartPolicy") != "Never":
            yield _fault(f"{place}.podFailurePolicy", "needs restartPolicy", str(pod.get("restartPolicy")), "Never")
        containers = [each["name"] for each in pod["containers"]]
        for number, rule in enumerate((policy or {}).get("rules", ())):
            yield from _failure_rule(f"{place}.podFailurePolicy.rules[{number}]", rule, containers)
        yield from pod_rules(pod, f"{place}.template.spec")


def _failure_rule(place: str, rule: Object, containers: list[str]) -> Iterator[Fault]:
    on = [key for key in ("onExitCodes", "onPodConditions") if key in rule]
    if len(on) != 1:
        yield _fault(place, "must have exactly one of onExitCodes and onPodConditions", ", ".join(on), "one")
    codes = rule.get("onExitCodes")
    if codes:
        values = codes["values"]
        if values != sorted(set(values)) or len(values) > 255 or not values:
            yield _fault(f"{place}.onExitCodes.values", "must be sorted, each once", str(values), "1 to 255 of them")
        if codes["operator"] == "In" and 0 in values:
            yield _fault(f"{place}.onExitCodes.values", "has success among the failures", "0", "other than 0")
        if codes.get("containerName") not in (None, *containers):
            name = str(codes["containerName"])
            yield _fault(f"{place}.onExitCodes.containerName", "names no container", name, ", ".join(containers))


def rayjob_limits(value: Object) -> Iterator[Fault]:
    """Yield faults of a RayJob. Source: KubeRay controllers/ray/utils/validation.go and the CRD's CEL rules."""
    spec = value["spec"]
    yield from _too_long(rayjob_names(value["metadata"]["name"]))
    mode = spec.get("submissionMode", "K8sJobMode")
    modes = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
    if mode not in modes:  # the schema has no list of them
        yield _fault("spec.submissionMode", "is no mode", mode, ", ".join(modes))
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield _fault("spec.ttlSecondsAfterFinished", "has no effect", "", "shutdownAfterJobFinishes: true")
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield _fault("spec.suspend", "needs shutdownAfterJobFinishes", "true", "both")
    if spec.get("deletionStrategy") and spec.get("shutdownAfterJobFinishes"):
        yield _fault("spec.deletionStrategy", "excludes shutdownAfterJobFinishes", "", "one of the two")
    if spec.get("activeDeadlineSeconds", 1) < 1:
        yield _fault("spec.activeDeadlineSeconds", "must be positive", str(spec["activeDeadlineSeconds"]), "1 or more")
    groups = spec["rayClusterSpec"].get("workerGroupSpecs", ())
    for index, group in enumerate(groups):
        yield from _group(group, f"spec.rayClusterSpec.workerGroupSpecs[{index}]")
    yield from _ray_pods(spec["rayClusterSpec"])


def _group(group: Object, place: str) -> Iterator[Fault]:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 0)
    if least > most or not least <= group.get("replicas", least) <= most:
        counts = f"{least} ≤ {group.get('replicas')} ≤ {most}"
        yield _fault(place, "has replicas out of its own bounds", counts, "minReplicas ≤ replicas ≤ maxReplicas")
    if group["groupName"] == "head":
        yield _fault(f"{place}.groupName", "is Kueue's name for the head", "head", "another name")


def ray_groups(cluster: Object) -> list[Object]:
    """Return a Ray cluster's groups: the head's, then the workers'."""
    return [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())]


def _ray_pods(cluster: Object) -> Iterator[Fault]:
    for group in ray_groups(cluster):
        name = group.get("groupName", "head")
        for key, text in (group.get("rayStartParams") or {}).items():
            if not isinstance(text, str):
                yield _fault(f"{name}.rayStartParams.{key}", "must be text", str(text), f"'{text}'")
        if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(group["rayStartParams"]):
            yield _fault(f"{name}.resources", "stands in rayStartParams too", "", "one of the two")
        yield from pod_rules(group["template"]["spec"], f"{name}.template.spec")


def pod_rules(pod: Object, place: str) -> Iterator[Fault]:
    """Yield faults of a pod's volumes, ports, environment and resources. Source: Kubernetes' validation of pods."""
    volumes = [each["name"] for each in pod.get("volumes", ())]
    for name in sorted({name for name in volumes if volumes.count(name) > 1}):
        yield _fault(f"{place}.volumes", "stands twice", name, "each name once")
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        where = f"{place}.{container['name']}"
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield _fault(f"{where}.volumeMounts", "names no volume", mount["name"], ", ".join(volumes))
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        if len(set(paths)) < len(paths):
            yield _fault(f"{where}.volumeMounts", "has a path twice", ", ".join(paths), "each path once")
        names = [entry["name"] for entry in container.get("env", ())]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield _fault(f"{where}.env", "stands twice", name, "each name once")
        yield from _resources(container.get("resources", {}), f"{where}.resources")


def _resources(resources: Object, place: str) -> Iterator[Fault]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, text in [*requests.items(), *limits.items()]:
        if quantity(str(text)) is None:
            yield _fault(f"{place}.{name}", "is no quantity", str(text), "a number with a unit: 500m, 16Gi")
            return
    for name, text in requests.items():
        most = limits.get(name)
        if most is not None and (quantity(str(text)) or 0) > (quantity(str(most)) or 0):
            yield _fault(f"{place}.requests.{name}", "is more than the limit", str(text), f"at most {most}")
    for name, text in limits.items():
        if name.startswith(EXTENDED):
            if not float(quantity(str(text)) or 0).is_integer():
                yield _fault(f"{place}.limits.{name}", "must be whole", str(text), "a whole number")
            if str(requests.get(name, text)) != str(text):
                yield _fault(f"{place}.requests.{name}", "must equal the limit", str(requests[name]), str(text))


def _too_long(names: tuple[DerivedName, ...]) -> Iterator[Fault]:
    for each in names:
        if len(each.text) > each.most:
            yield _fault("metadata.name", f"makes a {each.of} that is too long", each.text, f"{each.most} characters")


def _fault(field: str, problem: str, given: str, allowed: str) -> Fault:
    return Fault(field=field, problem=problem, given=given[:120], allowed=allowed, remedy=f"mend {field}")


RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("v1", "ConfigMap"): (config_map,),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): (jobset_limits, jobset_policies, jobset_jobs),
    ("ray.io/v1", "RayJob"): (rayjob_limits,),
}
"""Rules by kind, beside `any_object`, which holds for all."""
