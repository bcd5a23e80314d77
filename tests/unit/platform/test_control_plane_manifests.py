"""The manifests of the control plane: whole, restricted, with no right more than is used, and kustomize builds them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml

from twinstep.cli.app import app
from twinstep.platform.scheduler.cluster.kinds import KINDS, rules
from twinstep.platform.scheduler.validate.schemas import core_faults

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "manifests" / "control-plane"
FOLDERS = sorted(path.parent for path in FOLDER.glob("*/kustomization.yaml") if path.parent.name != "example")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
Object = dict[str, Any]


def objects_in(folder: Path) -> list[Object]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = set(kustomization["resources"])
    assert named == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}, "each file is a resource"
    return [each for name in sorted(named) for each in yaml.safe_load_all((folder / name).read_text())]


EVERY = [each for folder in FOLDERS for each in objects_in(folder)]


def one(kind: str, name: str = "") -> Object:
    (found,) = [each for each in EVERY if each["kind"] == kind and (not name or each["metadata"]["name"] == name)]
    return found


PODS = [each["spec"]["template"]["spec"] for each in EVERY if each["kind"] in ("Deployment", "Job")]


@pytest.mark.parametrize("value", EVERY, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_the_api_server_would_take_each(value: Object) -> None:
    if value["kind"] == "ServiceMonitor":
        return  # a custom resource whose schema is not at hand
    assert not core_faults(value)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["containers"][0]["name"])
def test_pods_meet_the_restricted_standard(pod: Object) -> None:
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all(set(volume) & {"emptyDir", "secret", "configMap"} for volume in pod["volumes"])
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_only_what_speaks_to_the_api_server_has_a_token_of_it() -> None:
    assert one("ServiceAccount")["automountServiceAccountToken"] is False
    assert one("Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    assert one("Job")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_selectors_find_the_pods_of_the_deployment_and_no_others() -> None:
    deployment, job = one("Deployment")["spec"], one("Job")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 2
    service, monitor = one("Service"), one("ServiceMonitor")
    for selector in (
        deployment["selector"]["matchLabels"],
        service["spec"]["selector"],
        one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= job["template"]["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in deployment["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {end["port"] for end in monitor["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}


def test_no_right_is_for_everything_or_reads_a_secret() -> None:
    for role in (each for each in EVERY if each["kind"] in ("Role", "ClusterRole")):
        assert role["kind"] == "Role", "a right holds in a namespace, not in a cluster"
        for rule in role["rules"]:
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            if "secrets" in rule["resources"]:
                assert not {"get", "list", "watch"} & set(rule["verbs"])
    roles = {each["metadata"]["name"] for each in EVERY if each["kind"] == "Role"}
    bound = {each["roleRef"]["name"] for each in EVERY if each["kind"] == "RoleBinding"}
    assert roles == bound


def test_the_roles_allow_what_the_control_plane_asks_and_no_more() -> None:
    def rights(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
        return {
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    allowed = {each["metadata"]["name"]: rights(each["rules"]) for each in EVERY if each["kind"] == "Role"}
    assert allowed["twinstep-leader"] == rights(rules("Lease"))
    assert allowed["twinstep-runs"] == rights(rules(*(kind for kind in KINDS if kind != "Lease")))


def test_secrets_are_named_and_never_written_here() -> None:
    assert not [each for each in EVERY if each["kind"] == "Secret"]
    for container in (container for pod in PODS for container in pod["containers"]):
        for entry in container.get("env", ()):
            assert "URL" not in entry["name"] or "valueFrom" in entry, "a database's URL holds its password"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kustomize_builds_each_folder(folder: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which has kustomize, on this machine")
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True).stdout
    kinds = [each["kind"] for each in yaml.safe_load_all(built)]
    assert sorted(kinds) == sorted(each["kind"] for each in objects_in(folder))


def test_the_example_holds_the_control_plane_and_its_rights_where_jobs_run() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which has kustomize, on this machine")
    command = ["kubectl", "kustomize", str(FOLDER / "example")]
    built = list(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    found = {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in built}
    (settings,) = [each["data"] for each in built if each["kind"] == "ConfigMap"]
    for namespace in settings["TWINSTEP_NAMESPACES"].split(","):
        assert {("Namespace", None, namespace), ("Role", namespace, "twinstep-runs")} <= found
        assert ("RoleBinding", namespace, "twinstep-runs") in found
    subjects = [subject for each in built if each["kind"] == "RoleBinding" for subject in each["subjects"]]
    assert {("ServiceAccount", each["namespace"], each["name"]) for each in subjects} <= found
    service = urlsplit(settings["TWINSTEP_WORKERS_URL"]).hostname or ""
    name, namespace, _ = service.split(".")
    assert ("Service", namespace, name) in found


def test_containers_are_started_with_options_that_there_are_and_settings_that_are_read() -> None:
    read = "".join(path.read_text() for path in (ROOT / "twinstep").rglob("*.py"))
    for pod in PODS:
        (container,) = pod["containers"]
        command, *options = container["args"]
        known = {name for each in COMMANDS[command].params for name in each.opts}
        assert {option for option in options if option.startswith("--")} <= known
        assert all(f'"{entry["name"]}"' in read for entry in container["env"] if entry["name"] != "HOME")
    for name in one("ConfigMap")["data"]:
        assert f'"{name}"' in read
