"""Container files: what they must and must not hold, their locks, and their install commands, run outside a container.

There is no container engine in a test, so the RUN lines are run in a folder of their own. The control plane's runs
whole, from COPY to a started command. The workers' locks are of gigabytes: pip is asked whether it could install each
line, and the worker is run with nothing but what its lock names.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import twinstep
from twinstep.platform.scheduler.render.pods import USER
from twinstep.platform.scheduler.render.rayjob import RAY_VERSION

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
IMAGES = [path.name.removesuffix(".Dockerfile") for path in FILES]


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


def instructions(name: str) -> list[Instruction]:
    """The instructions of a container file, comments left out, lines joined."""
    lines = (ROOT / f"containers/{name}.Dockerfile").read_text().splitlines()
    joined = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages(name: str) -> list[list[Instruction]]:
    found: list[list[Instruction]] = []
    for each in instructions(name):
        if each.word == "FROM":
            found.append([])
        found[-1].append(each)
    return found


def test_there_is_one_file_for_each_kind_of_pod() -> None:
    assert IMAGES == ["control-plane", "worker-gpu", "worker-tpu"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_small_runs_as_nobody_and_takes_nothing_from_elsewhere(name: str) -> None:
    text = (ROOT / f"containers/{name}.Dockerfile").read_text()
    found = instructions(name)
    words = [each.word for each in found]
    for each in found:
        if each.word == "FROM":
            image, _, tag = each.rest.split()[0].partition(":")
            assert image == "python"
            assert re.fullmatch(r"3\.\d+-slim", tag), "a tag that says what it is, never latest"
    assert {"ADD", "ARG", "VOLUME", "ONBUILD"} & set(words) == set()
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host|pypi|\bcurl ", text)
    assert not re.search(r"secret|password|token|api_?key", text, re.IGNORECASE)
    last = stages(name)[-1]
    (user,) = [each.rest for each in last if each.word == "USER"]
    assert user == f"{USER}:{USER}", "a number, which Kubernetes can check, and the one that manifests run"
    after = [each.word for each in last][[each.word for each in last].index("USER") + 1 :]
    assert set(after) <= {"ENV", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert sum(each.word == "RUN" and "pip install" in each.rest for each in found) == 1
    assert "--no-deps" in text
    (copied,) = [each.rest for each in last if each.word == "COPY"]
    assert copied.startswith("--from=build "), "sources and pip's work stay in the first stage"


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_is_tracked_and_let_through(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for each in stages(name)[0]:
        if each.word == "COPY":
            for source in each.rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source.split('/')[0]}" in ignored
                shown = subprocess.run(
                    ["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=True
                )
                assert shown.stdout.strip(), f"{source} is not tracked"


@pytest.mark.parametrize("name", IMAGES)
def test_an_images_name_is_the_one_that_manifests_ask_for(name: str) -> None:
    text = (ROOT / f"containers/{name}.Dockerfile").read_text()
    tagged = re.search(r"^# Build .* -f containers/(\S+) -t (\S+) \.$", text, re.MULTILINE)
    assert tagged is not None
    assert tagged[1] == f"{name}.Dockerfile"
    image, _, version = tagged[2].partition(":")
    assert version == twinstep.__version__
    if name == "control-plane":
        used = {
            line.split("image:")[1].strip()
            for path in (ROOT / "manifests/control-plane/base").glob("*.yaml")
            for line in path.read_text().splitlines()
            if re.match(r"\s+image: ", line)
        }
        assert used == {image}
        return
    kind = name.removeprefix("worker-")
    folder = {"tpu": "gke-tpu", "gpu": "gpu"}[kind]
    for path in (ROOT / "manifests" / folder).glob("*.yaml"):
        used = set(re.findall(r"^\s+image: (\S+)$", path.read_text(), re.MULTILINE))
        assert used == {f"registry.example.com/{image}:{version}"}, path.name


# The locks.


@pytest.fixture(scope="module")
def derive() -> ModuleType:
    """locks/derive.py as a module."""
    found = importlib.util.spec_from_file_location("locks_derive", ROOT / "locks/derive.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def lock(name: str) -> list[str]:
    return (ROOT / f"locks/{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", ["worker-gpu", "worker-tpu"])
def test_a_workers_lock_follows_from_the_full_lock(derive: ModuleType, name: str) -> None:
    there = {re.sub("[-_.]+", "-", each.name).lower() for each in importlib.metadata.distributions()}
    if missing := {line.split("==")[0] for line in lock("full")} - there:
        pytest.skip(f"this environment is not that of the full lock, it lacks {', '.join(sorted(missing))}")
    assert derive.lock(name) == lock(name), "run python locks/derive.py"
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][A-Za-z0-9.]*", line) for line in lock(name))


def test_each_worker_has_what_its_accelerator_needs_and_not_the_others() -> None:
    names = {image: {line.split("==")[0] for line in lock(image)} for image in ("worker-gpu", "worker-tpu")}
    assert {"torch", "triton", "torchrec", "fbgemm-gpu", "ray"} <= names["worker-gpu"]
    assert {"torch", "torchax", "jax", "libtpu", "jax-tpu-embedding"} <= names["worker-tpu"]
    assert not {"fbgemm-gpu-cpu", "libtpu", "fastapi", "sqlalchemy", "pytest"} & names["worker-gpu"]
    assert not {"fbgemm-gpu", "ray", "triton", "fastapi", "sqlalchemy", "pytest"} & names["worker-tpu"]
    assert f"ray=={RAY_VERSION}" in lock("worker-gpu"), "manifests name Ray's version"


# What runs in a test's stead of the heavy images: the worker sees only distributions of its lock.
ONLY_LOCKED = """
import importlib.abc, importlib.machinery, importlib.metadata, re, sys

locked = {line.split("==")[0] for line in open(sys.argv[1]).read().split()} | {"twinstep"}
instead = {"fbgemm-gpu-cpu": "fbgemm-gpu"}  # the same package for CPUs
owners = importlib.metadata.packages_distributions()

class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        names = {re.sub("[-_.]+", "-", each).lower() for each in owners.get(name.split(".")[0], ())}
        if names and not {instead.get(each, each) for each in names} & locked:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Gate()
for name in sys.argv[2].split(","):
    __import__(name)
from twinstep.cli import main
sys.argv = ["twinstep", *sys.argv[3:]]
sys.exit(main())
"""

SMOKE = """
name: tiny
data: {dataset: synthetic, synthetic_events: 400, batch_size: 4, uih_len: 6, num_candidates: 2}
model: {embedding_dim: 4, transducer_dim: 4, num_layers: 1, num_heads: 1, linear_dim: 4, attention_dim: 4}
optimizers: {dense: {kind: sgd}, sparse: {kind: sgd}}
compile: {backend: eager}
train: {steps: 2}
"""


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("worker-gpu", "twinstep.worker.train.ray_job,twinstep.worker.compile.lower.inductor,torchrec"),
        ("worker-tpu", "twinstep.worker.compile.lower.xla,twinstep.worker.embedding.sparsecore.device.tpu"),
    ],
)
def test_the_worker_runs_with_what_its_lock_names_and_no_more(name: str, modules: str, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(SMOKE)
    words = [str(ROOT / f"locks/{name}.txt"), modules, "train", str(spec)]
    done = subprocess.run(
        [sys.executable, "-c", ONLY_LOCKED, *words],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


# The install commands.


def install_command(name: str, prefix: Path) -> str:
    """The RUN line that installs, with another place for the environment."""
    (run,) = [each.rest for each in stages(name)[0] if each.word == "RUN"]
    return run.replace("/opt/twinstep", str(prefix)).replace("python -m venv", f"{sys.executable} -m venv")


def copied(name: str, to: Path) -> None:
    """Do what the COPY lines of the first stage do."""
    for each in stages(name)[0]:
        if each.word == "COPY":
            *sources, target = each.rest.split()
            for source in sources:
                place = to / target / Path(source).name if target.endswith("/") else to / target
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)


def clean_environment(home: Path) -> dict[str, str]:
    """Pip's own settings and nothing of this project's."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    return {**kept, "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}


@pytest.mark.slow
def test_the_control_planes_install_command_makes_one_that_starts(tmp_path: Path) -> None:
    source, prefix, home = tmp_path / "src", tmp_path / "opt", tmp_path / "home"
    home.mkdir()
    copied("control-plane", source)
    environment = clean_environment(home)
    done = subprocess.run(
        ["bash", "-euc", install_command("control-plane", prefix)],
        cwd=source, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    entry = yaml.safe_load(next(each.rest for each in stages("control-plane")[-1] if each.word == "ENTRYPOINT"))
    started = {**environment, "PATH": f"{prefix}/bin:{environment['PATH']}", "PYTHONSAFEPATH": "1"}
    code = "import twinstep.platform.server, twinstep.cli; print(twinstep.__file__)"
    where = subprocess.run(
        [entry[0], "-c", code], cwd=home, env=started, capture_output=True, text=True, timeout=60, check=True
    )
    assert where.stdout.startswith(str(prefix)), "the installed package, not the sources"
    for words in (["--version"], ["topologies"], ["up", "--help"]):
        subprocess.run([*entry, *words], cwd=home, env=started, capture_output=True, timeout=60, check=True)
    listed = subprocess.run(
        [entry[0], "-m", "pip", "list", "--format=freeze"],
        cwd=home, env=started, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    names = {re.sub("[-_.]+", "-", line.split("==")[0]).lower() for line in listed}
    assert names == {line.split("==")[0] for line in lock("control-plane")} | {"twinstep", "pip", "setuptools"} - (
        {"setuptools"} - names
    )
