"""`twinstep topologies` and `twinstep render` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from twinstep.cli.app import run

ROOT = Path(__file__).parents[3]
SPEC = str(ROOT / "examples" / "clusters" / "tpu-v5p-4x4x8.yaml")


def test_render_prints_the_manifest_alone_and_the_rest_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["render", SPEC]) == 0
    shown = capsys.readouterr()
    assert [each["kind"] for each in yaml.safe_load_all(shown.out)] == [
        "ConfigMap",
        "ServiceAccount",
        "NetworkPolicy",
        "JobSet",
    ]
    assert "32 pods, 128 devices" in shown.err
    assert "warning: " in shown.err


def test_render_as_json_has_objects_numbers_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["render", SPEC, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["numbers"]["chips"] == 128
    assert found["objects"][-1]["kind"] == "JobSet"


def test_a_job_for_this_machine_is_an_error_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["render", str(ROOT / "examples" / "smoke.yaml")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "accelerator.kind" in shown.err


def test_a_directory_without_definitions_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["render", SPEC, "--crds", str(tmp_path / "gone")]) == 2
    assert "not there" in capsys.readouterr().err


def test_topologies_are_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topologies", "v6e"]) == 0
    assert "8x16" in capsys.readouterr().out
    assert run(["topologies", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tpus"], found["gpus"][0]["per_node"]) == ([], 8)
    assert run(["topologies", "v5p"]) == 0
    assert "larger ones, of up to 6,144 chips, with --up-to 6144" in capsys.readouterr().out
    assert run(["topologies", "v6e"]) == 0
    assert "larger ones" not in capsys.readouterr().out
    assert run(["topologies", "v9"]) == 2
    assert "v5p" in capsys.readouterr().err
