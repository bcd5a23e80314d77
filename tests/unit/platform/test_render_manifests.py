"""A spec and what it becomes in a cluster: numbers, names, words that arrive byte for byte, security, drift."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.platform.scheduler.render.names import check_names, jobset_names, label_value, object_name
from twinstep.platform.scheduler.render.rayjob import entrypoint
from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.platform.scheduler.validate.check import check
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import parse_spec, validate_spec

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))


def rendered(accelerator: dict[str, Any], *, name: str = "a-job", **kubernetes: Any) -> RenderedRun:
    backend = "xla" if accelerator["kind"] == "tpu" else "inductor"
    spec = {
        "name": name,
        "accelerator": accelerator,
        "compile": {"backend": backend},
        "kubernetes": {"image": "registry.example.com/worker:1", **kubernetes},
    }
    return render(validate_spec(spec))


V5P_128 = {"kind": "tpu", "generation": "v5p", "topology": "4x4x8"}
H100_128 = {"kind": "gpu", "model": "h100", "count": 128}


def pods_of(run: RenderedRun) -> Iterator[dict[str, Any]]:
    """Yield the pod specs of a workload."""
    spec = run.workload["spec"]
    if run.workload["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield job["template"]["spec"]["template"]["spec"]
        return
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]
    yield spec["submitterPodTemplate"]["spec"]


def environment(run: RenderedRun) -> dict[str, str]:
    """Return what a worker's process would see: the kubelet's `$$` folded, references to fields left out."""
    workers = [pod for pod in pods_of(run) if pod["containers"][0]["name"] in ("worker", "ray-worker")]
    entries = workers[0]["containers"][0]["env"]
    return {entry["name"]: kubelet(entry["value"]) for entry in entries if "value" in entry}


def kubelet(text: str) -> str:
    """Expand as the kubelet does: `$(NAME)` of a name that is not set stays, `$$` becomes `$`."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else f"EXPANDED{found[1]}", text)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_renders_to_its_manifest(example: Path) -> None:
    kind, _, rest = example.stem.partition("-")
    manifest = ROOT / "manifests" / {"tpu": "gke-tpu", "gpu": "gpu"}[kind] / f"{rest}.yaml"
    text = manifest.read_text(encoding="utf-8").split("\n", 1)[1]
    assert text == render(parse_spec(example.read_bytes())).yaml, "run manifests/generate.py"


def test_no_manifest_is_left_of_an_example_that_went() -> None:
    found = subprocess.run(
        [sys.executable, "manifests/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stdout


def test_a_slice_is_one_indexed_job_with_a_pod_per_host() -> None:
    run = rendered(V5P_128)
    job = run.workload["spec"]["replicatedJobs"][0]
    body = job["template"]["spec"]
    assert (job["replicas"], body["completions"], body["parallelism"], body["completionMode"]) == (1, 32, 32, "Indexed")
    pod = next(pods_of(run))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x8",
    }
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["google.com/tpu"] == resources["requests"]["google.com/tpu"] == "4"
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert (run.numbers["pods"], run.numbers["devices"], run.numbers["chips"]) == (32, 128, 128)


def test_only_the_topology_differs_between_4_chips_and_128() -> None:
    small, large = (
        (ROOT / "examples" / "clusters" / f"tpu-{name}.yaml").read_text().splitlines()
        for name in ("v5p-2x2x1", "v5p-4x4x8")
    )
    different = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
    assert [a.replace("2x2x1", "4x4x8") for a, _ in different] == [b for _, b in different]


def test_slices_are_replicas_and_each_takes_a_node_pool() -> None:
    run = rendered({"kind": "tpu", "generation": "v5p", "topology": "4x4x4", "slices": 2})
    assert run.workload["spec"]["replicatedJobs"][0]["replicas"] == 2
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert run.workload["metadata"]["annotations"][key] == "cloud.google.com/gke-nodepool"
    aware = rendered(V5P_128, queue="q", topology_aware=True)
    assert key not in aware.workload["metadata"]["annotations"]


def test_kueue_finds_a_node_pool_for_each_slice_and_not_one_for_all() -> None:
    def annotations(slices: int) -> dict[str, str]:
        accelerator = {"kind": "tpu", "generation": "v5p", "topology": "4x4x4", "slices": slices}
        (job,) = rendered(accelerator, queue="q", topology_aware=True).workload["spec"]["replicatedJobs"]
        assert job["replicas"] == slices
        pod = job["template"]["spec"]["template"]["metadata"]["annotations"]
        assert all(each.startswith("kueue.x-k8s.io/podset-") for each in pod)
        return {each.removeprefix("kueue.x-k8s.io/podset-"): value for each, value in pod.items()}

    pool = "cloud.google.com/gke-nodepool"
    assert annotations(1) == {"required-topology": pool}
    assert annotations(2) == {"slice-required-topology": pool, "slice-size": "16"}


def test_a_gpu_job_has_a_head_without_work_and_a_worker_per_node() -> None:
    run = rendered(H100_128)
    cluster = run.workload["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    group = cluster["workerGroupSpecs"][0]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"], group["numOfHosts"]) == (16, 16, 16, 1)
    worker = group["template"]["spec"]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in worker["volumes"]
    part = rendered({"kind": "gpu", "model": "h100", "count": 4})
    group = part.workload["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert group["replicas"] == 1
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_queued_job_waits_for_kueue() -> None:
    for accelerator in (V5P_128, H100_128):
        run = rendered(accelerator, queue="training", priority="high")
        labels = run.workload["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "training"
        assert labels["kueue.x-k8s.io/priority-class"] == "high"
        assert run.workload["spec"]["suspend"] is True
        assert "suspend" not in rendered(accelerator).workload["spec"]


def test_the_failure_policy_tells_a_preempted_slice_from_a_wrong_spec() -> None:
    policy = rendered(V5P_128, max_restarts=7).workload["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    # What the Job controller writes into a Job's Failed condition (Kubernetes, pkg/controller/job).
    messages = {
        "Pod ns/a-slice-0-3-x has condition DisruptionTarget matching FailJob rule at index 0": "preempted",
        "Container worker for pod ns/a-0-x failed with exit code 75 matching FailJob rule at index 1": "preempted",
        "Container worker for pod ns/a-0-x failed with exit code 2 matching FailJob rule at index 1": "notRetryable",
    }
    for message, want in messages.items():
        found = [
            rule["name"]
            for rule in policy["rules"]
            if any(re.fullmatch(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
        ]
        assert found == [want], message


@pytest.mark.parametrize("accelerator", [V5P_128, H100_128])
def test_kubernetes_ends_late_only_what_no_control_plane_does_and_lets_it_wait(accelerator: dict[str, Any]) -> None:
    """Its deadlines count pods that wait for nodes, which a control plane leaves out."""
    spec = {"name": "a", "accelerator": accelerator, "kubernetes": {"image": "registry.example.com/worker:1"}}
    spec["compile"] = {"backend": "xla" if accelerator["kind"] == "tpu" else "inductor"}

    def deadlines(limits: dict[str, float], **more: Any) -> list[str]:
        found = render(validate_spec({**spec, "runtime": limits}), **more)
        check(found.objects, None)
        return re.findall('"(?:activeDeadlineSeconds": [0-9]+|DeadlineExceeded)', json.dumps(found.workload))

    late = ['"DeadlineExceeded'] if accelerator["kind"] == "tpu" else []  # ends for good, and is not started again
    assert sorted(deadlines({"max_seconds": 0.5})) == sorted([*late, '"activeDeadlineSeconds": 1'])
    both = {"max_seconds": 3600, "max_wait_seconds": 7200}
    assert sorted(deadlines(both)) == sorted([*late, '"activeDeadlineSeconds": 10800'])
    assert deadlines({"max_wait_seconds": 7200}) == []
    assert deadlines(both, run_id="run-1") == []
    assert deadlines(both, followed=True) == []


def test_no_batch_of_gpus_is_warned_of() -> None:
    """Ranks share any batch: dummy rows fill the last blocks."""
    spec = {"name": "a", "accelerator": H100_128, "kubernetes": {"image": "registry.example.com/worker:1"}}
    sizes = {size: render(validate_spec({**spec, "data": {"batch_size": size}})).warnings for size in (1, 100, 128)}
    assert sizes[1] == sizes[100] == sizes[128]


# ---- words arrive byte for byte ----

TRICKY = [
    '"',
    "'",
    "a\nb",
    ": #",
    "{x}",
    "`id`",
    "$(HOSTNAME)",
    "$$",
    "a; b && c",
    "yes",
    "0123",
    "1e3",
    "x:",
    "",
    "é☃",
]


@settings(deadline=None, max_examples=60)
@given(words=st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=20)), min_size=1, max_size=6))
def test_an_entrypoint_reaches_the_process_byte_for_byte(words: list[str]) -> None:
    words = [re.sub(r"[\x00\ud800-\udfff\r]", "", word) for word in words]
    line = kubelet(yaml.safe_load(yaml.safe_dump(entrypoint(tuple(words)))))
    script = f"{sys.executable} -c 'import sys,json; print(json.dumps(sys.argv[1:]))' {line}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=30).stdout
    assert json.loads(shown) == words


def test_a_rayjobs_line_is_the_same_for_every_job_and_its_head_knows_the_rest() -> None:
    runs = [rendered({**H100_128, "count": count}, grace_seconds=100) for count in (4, 128)]
    assert len({run.workload["spec"]["entrypoint"] for run in runs}) == 1
    for run, count in zip(runs, ("4", "128"), strict=True):
        for pod in list(pods_of(run))[:2]:
            told = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
            assert told["TWINSTEP_PROCESSES"] == count
            assert told["TWINSTEP_SPEC"] == "/etc/twinstep/job.json"
            assert told["RAY_USAGE_STATS_ENABLED"] == "0"
            # A node drains for less than its pod's grace, or it is killed while ranks still save.
            assert (
                float(told["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] or 0)
                < 100
                == int(told["RAY_JOB_STOP_WAIT_TIME_S"] or 0)
            )


@settings(deadline=None, max_examples=60)
@given(value=st.one_of(st.sampled_from(TRICKY), st.text(alphabet=st.characters(codec="utf-8"), max_size=40)))
def test_a_users_environment_arrives_byte_for_byte(value: str) -> None:
    value = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", "", value)
    run = rendered(V5P_128, env={"A": value})
    back = list(yaml.safe_load_all(run.yaml))
    assert back == list(run.objects)
    assert environment(run)["A"] == value


def test_each_name_of_the_environment_stands_once_and_the_users_wins_over_defaults() -> None:
    run = rendered(V5P_128, env={"XDG_CACHE_HOME": "/mine"}, secret_env={"TOKEN": "store/key"})
    entries = next(pods_of(run))["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    assert environment(run)["XDG_CACHE_HOME"] == "/mine"
    assert {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "store", "key": "key"}}} in entries


@pytest.mark.parametrize("name", ["TPU_WORKER_ID", "MEGASCALE_NUM_SLICES", "TWINSTEP_RUN_TOKEN", "RAY_ADDRESS"])
def test_names_that_the_cluster_sets_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="not valid") as caught:
        rendered(V5P_128, env={name: "x"})
    assert name in caught.value.faults[0].problem


def test_a_runs_token_is_never_in_its_objects() -> None:
    spec = parse_spec(EXAMPLES[0].read_bytes())
    run = render(spec, job_id="j", run_id="r", api_url="http://twinstep.platform:8765")
    secret = {
        "name": "TWINSTEP_RUN_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": f"{run.name}-token", "key": "token"}},
    }
    workers = [pod for pod in pods_of(run) if pod["containers"][0]["name"] in ("worker", "ray-worker")]
    assert secret in workers[0]["containers"][0]["env"]
    assert all(each["kind"] != "Secret" for each in run.objects)


# ---- names ----


@settings(deadline=None)
@given(
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True),
    slices=st.sampled_from([("16x24x24", 1), ("16x24x24", 2), ("4x4x4", 100), ("2x2x2", 1024)]),
    kind=st.sampled_from(["tpu", "gpu"]),
)
def test_every_valid_job_name_fits_every_derived_name(name: str, slices: tuple[str, int], kind: str) -> None:
    accelerator = {"kind": "tpu", "generation": "v7x", "topology": slices[0], "slices": slices[1]}
    run = rendered(accelerator if kind == "tpu" else H100_128, name=name)
    check(run.objects)
    assert run.workload["metadata"]["annotations"]["twinstep.dev/title"] == name
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", run.name)


def test_a_name_over_the_budget_is_refused_with_what_it_makes() -> None:
    check_names(jobset_names("a" * 26, slices=1, hosts=32))
    with pytest.raises(SpecError, match="coordinator label"):
        check_names(jobset_names("a" * 27, slices=1, hosts=32))


def test_the_same_run_has_the_same_name_and_another_another() -> None:
    assert object_name("job", "run-1/1") == object_name("job", "run-1/1")
    assert object_name("job", "run-1/1") != object_name("job", "run-1/2")
    spec = parse_spec(EXAMPLES[0].read_bytes())
    assert render(spec, run_id="a").yaml == render(spec, run_id="a").yaml
    assert render(spec, run_id="a").name != render(spec, run_id="b").name


@given(st.text(max_size=200))
def test_any_text_becomes_a_labels_value(text: str) -> None:
    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", label_value(text))


# ---- security ----


@pytest.mark.parametrize("accelerator", [V5P_128, H100_128], ids=["tpu", "gpu"])
def test_pods_meet_the_restricted_standard(accelerator: dict[str, Any]) -> None:
    """Source: Kubernetes' Pod Security Standards, profile restricted."""
    for pod in pods_of(rendered(accelerator)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("hostPath" not in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("profile", ["tpu-memlock", "tpu-privileged", "host-network"])
def test_a_pod_that_leaves_the_standard_is_asked_for_and_warned_of(profile: str) -> None:
    run = rendered(V5P_128, security=profile)
    assert any(profile in warning for warning in run.warnings)
    check(run.objects)


def test_the_network_policy_closes_the_run_off() -> None:
    for accelerator in (V5P_128, H100_128):
        run = rendered(accelerator)
        policy = next(each for each in run.objects if each["kind"] == "NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        labels = run.workload["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert all(rule.get("from") for rule in policy["ingress"])


# ---- what cannot be rendered ----


def test_a_job_for_this_machine_is_not_rendered() -> None:
    with pytest.raises(SpecError, match="this machine"):
        render(validate_spec({"name": "a"}))


def test_a_job_without_an_image_is_refused_and_a_default_taken() -> None:
    spec = validate_spec({"name": "a", "accelerator": V5P_128, "compile": {"backend": "xla"}})
    with pytest.raises(SpecError, match="image"):
        render(spec)
    assert next(pods_of(render(spec, default_image="w:1")))["containers"][0]["image"] == "w:1"
    found = render(spec, default_image="worker-{kind}:1")
    assert {each["image"] for pod in pods_of(found) for each in pod["containers"]} == {
        f"worker-{spec.accelerator.kind}:1"
    }
