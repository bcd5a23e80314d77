"""What must hold before torch is loaded: a compiler where one is needed, a cache that nobody else can write to."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from twinstep.spec.errors import SpecError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import environment
from twinstep.worker.train.environment import prepare_environment, usable_processors
from twinstep.worker.train.toolchain import check_compiler


def spec(**settings: Any) -> JobSpec:
    return validate_spec({"name": "t", "compile": {"backend": "xla", **settings}})


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_a_cache_that_is_made_is_its_owners_alone_whatever_the_umask(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "check_compiler", lambda: None)
    before = os.umask(0)
    try:
        prepare_environment(spec(cache_dir=str(tmp_path / "a" / "cache"), backend=backend))
    finally:
        os.umask(before)
    for made in (tmp_path / "a/cache", tmp_path / "a/cache" / backend):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
@pytest.mark.parametrize("which", [".", "xla"])
def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, which: str) -> None:
    (tmp_path / "cache/xla").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o755)
    prepare_environment(spec(cache_dir=str(tmp_path / "cache")))
    (tmp_path / "cache" / which).chmod(mode)
    with pytest.raises(UnavailableError, match="written by others") as caught:
        prepare_environment(spec(cache_dir=str(tmp_path / "cache")))
    assert "compile.cache_dir" in caught.value.remedy
    prepare_environment(spec(cache_dir=str(tmp_path / "cache"), cache=False))
    prepare_environment(spec(cache_dir=str(tmp_path / "cache"), backend="eager"))


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UnavailableError, match="belongs to another user"):
        prepare_environment(spec(cache_dir=str(tmp_path)))


def test_a_cache_that_cannot_be_made_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnavailableError, match="cannot be made") as caught:
            prepare_environment(spec(cache_dir=str(place)))
        assert "compile.cache: false" in caught.value.remedy


@pytest.mark.inductor
def test_a_compiler_that_is_here_passes() -> None:
    check_compiler()


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        (None, "is not here", "apt-get install g++"),
        ("echo 'fatal error: no room' >&2; exit 4", "fails: fatal error: no room", "install g++"),
        ("exit 7", "fails: exit code 7", "install g++"),
    ],
)
def test_a_compiler_that_is_not_here_or_fails_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str, remedy: str
) -> None:
    compiler = tmp_path / "cc" if text is None else script(tmp_path / "cc", text)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").write_text("")
    with pytest.raises(UnavailableError) as caught:
        prepare_environment(validate_spec({"name": "t", "compile": {"backend": "inductor"}}))
    assert str(compiler) in caught.value.problem
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert "compile.backend: xla" in caught.value.remedy


def test_a_file_that_cannot_be_run_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cc").write_text("not a program")
    monkeypatch.setenv("CXX", str(tmp_path / "cc"))
    with pytest.raises(UnavailableError, match="cannot be run"):
        check_compiler()


def test_a_compiler_without_pythons_headers_says_which_package_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "cc", "echo 'fatal error: Python.h: no such file' >&2; exit 1")))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UnavailableError, match=r"Python\.h") as caught:
        check_compiler()
    assert "python3-dev" in caught.value.remedy


def test_a_run_without_a_compiler_ends_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: a\ncompile: {backend: inductor}\n")
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['twinstep', 'train', {str(tmp_path / 'spec.yaml')!r}]\n"
        "from twinstep.cli import main; main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CXX": "/nonexistent/g++"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    assert "C++ compiler" in found.stderr
    assert "compile.backend: xla" in found.stderr
    assert "Traceback" not in found.stderr


def test_processors_are_those_this_process_may_use() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from twinstep.worker.train.environment import usable_processors; print(usable_processors())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "1\n"
    assert usable_processors() == len(os.sched_getaffinity(0))


def with_devices(devices: int) -> JobSpec:
    return validate_spec(
        {
            "name": "t",
            "compile": {"backend": "xla", "cache": False},
            "accelerator": {"kind": "cpu", "devices": devices},
        }
    )


def test_devices_of_the_host_are_asked_of_xla_beside_what_flags_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=3")
    prepare_environment(with_devices(8))
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8"
    assert environment.mesh_axes(with_devices(8)) == {"data": 8}
    assert environment.mesh_axes(with_devices(1)) is None


def for_slice(topology: str, slices: int = 1) -> JobSpec:
    return validate_spec(
        {
            "name": "t",
            "compile": {"backend": "xla", "cache": False},
            "accelerator": {"kind": "tpu", "generation": "v5p", "topology": topology, "slices": slices},
            "data": {"batch_size": 1024},
        }
    )


@pytest.fixture
def a_host_with_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").write_text("")
    monkeypatch.setattr(environment, "ROOT", tmp_path)


def as_process(monkeypatch: pytest.MonkeyPatch, *, slices: int, hosts: int) -> None:
    values = (slices, hosts, 0, 0, "h:8482")
    names = ("SLICES", "HOSTS_PER_SLICE", "SLICE", "HOST", "COORDINATOR")
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(f"TWINSTEP_{name}", str(value))


def test_a_host_without_chips_trains_no_tpu_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/vfio").write_text("")  # the driver is there, and no chip
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    with pytest.raises(SpecError, match="this host has no TPU chips") as caught:
        prepare_environment(for_slice("2x2x1"))
    assert "twinstep render" in caught.value.remedy


@pytest.mark.usefixtures("a_host_with_chips")
@pytest.mark.parametrize(("topology", "slices", "hosts"), [("2x2x1", 1, 1), ("4x4x8", 1, 32), ("4x4x4", 2, 16)])
def test_a_slices_hosts_run_one_process_each(
    monkeypatch: pytest.MonkeyPatch, topology: str, slices: int, hosts: int
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    as_process(monkeypatch, slices=slices, hosts=hosts)
    prepare_environment(for_slice(topology, slices))
    assert os.environ["JAX_PLATFORMS"] == "tpu,cpu"
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x"  # the host's CPU is not cut into devices


@pytest.mark.usefixtures("a_host_with_chips")
def test_processes_that_are_not_one_to_a_host_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    as_process(monkeypatch, slices=1, hosts=4)
    with pytest.raises(SpecError, match=r"v5p 4x4x8 have 32 hosts, and the run has 4 process"):
        prepare_environment(for_slice("4x4x8"))


@pytest.mark.usefixtures("a_host_with_chips")
def test_a_tpu_host_without_libtpu_is_told_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="libtpu is not installed"):
        prepare_environment(for_slice("2x2x1"))


@pytest.mark.slow
def test_a_run_on_two_devices_ends_where_one_ends(tmp_path: Path) -> None:
    found = []
    for devices in (1, 2):
        path = tmp_path / f"{devices}.yaml"
        path.write_text(
            "name: devices\n"
            "model: {embedding_dim: 4, transducer_dim: 8, num_layers: 1, num_heads: 1, hidden_dim: 8}\n"
            "data: {dataset: synthetic, synthetic_events: 500, batch_size: 4, uih_len: 8, num_candidates: 2}\n"
            "compile: {backend: xla, cache: false}\n"
            f"accelerator: {{kind: cpu, devices: {devices}}}\n"
            "train: {steps: 4}\n"
        )
        command = [sys.executable, "-m", "twinstep", "train", str(path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
        found.append(json.loads(done.stdout)["summary"])
    assert found[0]["ne"] == pytest.approx(found[1]["ne"], rel=1e-4)
    assert found[0]["auc"] == pytest.approx(found[1]["auc"], abs=1e-3)
