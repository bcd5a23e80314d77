"""Objects checked before they are sent: what a cluster would refuse is found here, with its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinstep.platform.scheduler.render.quota import pods_of, quota
from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.platform.scheduler.validate.check import check, faults_of
from twinstep.platform.scheduler.validate.rules import quantity
from twinstep.platform.scheduler.validate.schemas import CustomResources
from twinstep.spec.errors import SpecError, UnavailableError
from twinstep.spec.parse import parse_spec

ROOT = Path(__file__).parents[3]
CRDS = ROOT.parent / "shared" / "crds"
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))


@pytest.fixture(scope="module")
def crds() -> CustomResources:
    if not CRDS.is_dir():
        pytest.skip("the custom resource definitions are not beside this checkout")
    return CustomResources(CRDS)


def run_of(name: str) -> RenderedRun:
    return render(parse_spec((ROOT / "examples" / "clusters" / f"{name}.yaml").read_bytes()))


def jobset() -> dict[str, Any]:
    return copy.deepcopy(run_of("tpu-v5p-4x4x8").workload)


def rayjob() -> dict[str, Any]:
    return copy.deepcopy(run_of("gpu-128x-h100").workload)


def job(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["spec"]["replicatedJobs"][0]["template"]["spec"]
    return found


def container(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job(value)["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_examples_render_to_is_taken_by_the_definitions(example: Path, crds: CustomResources) -> None:
    check(render(parse_spec(example.read_bytes())).objects, crds)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_queues_for_an_example_are_taken_and_cover_every_request(example: Path, crds: CustomResources) -> None:
    spec = parse_spec(example.read_bytes())
    run = render(spec)
    objects = quota(spec, run)
    check(objects, crds)
    assert all(crds.find(each["apiVersion"], each["kind"]) for each in objects)
    group = objects[2]["spec"]["resourceGroups"][0]
    given = dict.fromkeys(group["coveredResources"], 0.0)
    for flavor in group["flavors"]:
        assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
        for each in flavor["resources"]:
            given[each["name"]] += quantity(each["nominalQuota"]) or 0
    for count, pod in pods_of(run.workload):
        for container in pod["containers"]:
            for name, text in container["resources"]["requests"].items():
                given[name] -= count * (quantity(text) or 0)
    assert all(0 <= left < 2**31 for left in given.values()), given
    chips = next(name for name in given if name.startswith(("google", "nvidia")))
    assert given[chips] == 0


def test_a_quota_for_a_job_without_a_queue_is_refused() -> None:
    text = EXAMPLES[0].read_text().replace("  queue: training\n", "")
    spec = parse_spec(text)
    with pytest.raises(SpecError, match="queue"):
        quota(spec, render(spec))


def set_at(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(target: dict[str, Any]) -> None:
        *path, last = place.split(".")
        for part in path:
            target = target[int(part)] if isinstance(target, list) else target[part]
        target[int(last) if isinstance(target, list) else last] = value

    return change


def twice(value: dict[str, Any]) -> None:
    container(value)["env"].append({"name": "HOME", "value": "x"})


def two_jobs(value: dict[str, Any]) -> None:
    value["spec"]["replicatedJobs"].append(copy.deepcopy(value["spec"]["replicatedJobs"][0]))


J = "spec.replicatedJobs.0.template.spec"
BY_SCHEMA = [
    ("misspelt field", set_at(f"{J}.paralelism", 1), "paralelism"),
    ("text for a number", set_at(f"{J}.backoffLimit", "0"), "backoffLimit"),
    ("boolean for a number", set_at(f"{J}.backoffLimit", True), "backoffLimit"),
    ("beyond int32", set_at("spec.ttlSecondsAfterFinished", 2**31), "ttlSecondsAfterFinished"),
    ("negative replicas", set_at("spec.replicatedJobs.0.replicas", -1), "replicas"),
    ("number in the environment", set_at(f"{J}.template.spec.containers.0.env.0.value", 1), "env"),
    ("name twice in the environment", twice, "env"),
    ("job name twice", two_jobs, "replicatedJobs"),
    ("no list", set_at("spec.replicatedJobs", {}), "replicatedJobs"),
]


@pytest.mark.parametrize(("change", "place"), [(c, p) for _, c, p in BY_SCHEMA], ids=[name for name, _, _ in BY_SCHEMA])
def test_a_schema_fault_is_found_with_its_place(
    change: Callable[[dict[str, Any]], None], place: str, crds: CustomResources
) -> None:
    value = jobset()
    assert faults_of(value, crds) == []
    change(value)
    found = faults_of(value, crds)
    assert found
    assert any(place in fault.field for fault in found), found


BOTH = set_at(f"{J}.podFailurePolicy.rules.0.onExitCodes", {"operator": "In", "values": [1]})
BY_RULE = [
    ("no restart policy", set_at(f"{J}.template.spec.restartPolicy", "OnFailure"), "restartPolicy"),
    ("success among failures", set_at(f"{J}.podFailurePolicy.rules.1.onExitCodes.values", [0, 2]), "success"),
    ("exit codes out of order", set_at(f"{J}.podFailurePolicy.rules.1.onExitCodes.values", [75, 2]), "sorted"),
    ("no such container", set_at(f"{J}.podFailurePolicy.rules.1.onExitCodes.containerName", "x"), "no container"),
    ("both kinds of rule", BOTH, "exactly one"),
    ("no such job", set_at("spec.coordinator.replicatedJob", "x"), "no job"),
    ("coordinator beyond the pods", set_at("spec.coordinator.podIndex", 32), "completions"),
    ("rule without a name", set_at("spec.failurePolicy.rules.0.name", "1x"), "name of a rule"),
    ("doubled rule", set_at("spec.failurePolicy.rules.1.name", "preempted"), "twice"),
    ("too long a name", set_at("metadata.name", "a" * 27), "too long"),
    ("upper-case name", set_at("metadata.name", "Run"), "no name"),
    ("overflow", set_at("spec.replicatedJobs.0.replicas", 2**31 - 1), "overflows"),
    ("half a chip", set_at(f"{J}.template.spec.containers.0.resources.limits.google~com/tpu", "4.5"), "whole"),
    ("unequal chips", set_at(f"{J}.template.spec.containers.0.resources.requests.google~com/tpu", "2"), "equal"),
    ("more than the limit", set_at(f"{J}.template.spec.containers.0.resources.requests.memory", "9Ti"), "limit"),
    ("no quantity", set_at(f"{J}.template.spec.containers.0.resources.requests.memory", "lots"), "quantity"),
    ("no volume", set_at(f"{J}.template.spec.volumes", []), "no volume"),
    ("label with a trailing dot", set_at("metadata.labels.x", "a."), "label"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "word"), [(c, w) for _, c, w in BY_RULE], ids=[name for name, _, _ in BY_RULE])
def test_what_a_webhook_would_refuse_is_found(change: Callable[[dict[str, Any]], None], word: str) -> None:
    value = jobset()
    assert faults_of(value) == []
    _change_with_dots(change, value)
    found = faults_of(value)
    assert any(word in fault.problem or word in fault.allowed for fault in found), found


def _change_with_dots(change: Callable[[dict[str, Any]], None], value: dict[str, Any]) -> None:
    resources = container(value)["resources"]
    for part in resources.values():
        if "google.com/tpu" in part:
            part["google~com/tpu"] = part.pop("google.com/tpu")
    change(value)
    for part in resources.values():
        if "google~com/tpu" in part:
            part["google.com/tpu"] = part.pop("google~com/tpu")


RAY = [
    ("mode", set_at("spec.submissionMode", "http"), "mode"),
    ("kept cluster", set_at("spec.shutdownAfterJobFinishes", False), "shutdownAfterJobFinishes"),
    ("bounds", set_at("spec.rayClusterSpec.workerGroupSpecs.0.minReplicas", 17), "bounds"),
    ("head", set_at("spec.rayClusterSpec.workerGroupSpecs.0.groupName", "head"), "Kueue"),
    ("number", set_at("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0), "text"),
    ("name", set_at("metadata.name", "a" * 48), "too long"),
    ("deadline", set_at("spec.activeDeadlineSeconds", 0), "positive"),
]


@pytest.mark.parametrize(("change", "word"), [(c, w) for _, c, w in RAY], ids=[name for name, _, _ in RAY])
def test_what_kuberay_would_refuse_is_found(change: Callable[[dict[str, Any]], None], word: str) -> None:
    value = rayjob()
    assert faults_of(value) == []
    change(value)
    found = faults_of(value)
    assert any(word in fault.problem or word in fault.allowed for fault in found), found


def test_without_definitions_the_pods_inside_are_checked_still() -> None:
    for value, pod in ((jobset(), lambda v: job(v)["template"]["spec"]),):
        pod(value)["contaners"] = []
        assert any("contaners" in fault.problem for fault in faults_of(value))
    ray = rayjob()
    ray["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["hostNetwork"] = "yes"
    assert any("hostNetwork" in fault.field for fault in faults_of(ray))


def test_one_error_names_object_and_field() -> None:
    run = run_of("tpu-v5p-2x2x1")
    run.workload["spec"]["coordinator"]["podIndex"] = 1
    with pytest.raises(SpecError) as caught:
        check(run.objects)
    assert caught.value.faults[0].field == f"JobSet/{run.name}: spec.coordinator.podIndex"


def test_a_config_map_over_its_limit_is_found() -> None:
    run = run_of("tpu-v5p-2x2x1")
    run.objects[0]["data"]["more"] = "x" * 2**20
    assert any("too large" in fault.problem for fault in faults_of(run.objects[0]))


def test_a_directory_that_holds_no_definitions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="not there"):
        CustomResources(tmp_path / "gone")
    (tmp_path / "a.yaml").write_text("a: 1")
    with pytest.raises(UnavailableError, match="no custom resource definition"):
        CustomResources(tmp_path).find("v1", "A")


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4), ("500m", 0.5), ("16Gi", 16 * 2**30), ("1.5k", 1500), ("x", None), ("1 Gi", None)]
)
def test_quantities_are_read(text: str, value: float | None) -> None:
    assert quantity(text) == value
