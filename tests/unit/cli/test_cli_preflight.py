"""`twinstep preflight` and `twinstep plan`: pages for people, values for programs, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinstep.cli.app import run

TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}


def spec(tmp_path: Path, **more: Any) -> str:
    path = tmp_path / "job.yaml"
    body = {"name": "look", "data": {"dataset": "synthetic", "batch_size": 64, **more.pop("data", {})},
            "accelerator": TPU, **more}  # fmt: skip
    path.write_text(json.dumps(body))
    return str(path)


def test_a_spec_that_fits_is_shown_by_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", spec(tmp_path)]) == 0
    page = capsys.readouterr().out
    for words in ("v5p:2x2x1: 4 devices", "dense parameters", "tables", "in all", "of 91.0 GiB", "bound by", "fits"):
        assert words in page


def test_a_spec_that_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec(tmp_path, data={"rows": {"item_id": 2**31 - 1}}, model={"embedding_dim": 512})
    assert run(["preflight", path]) == 1
    page = capsys.readouterr().out
    assert "does not fit: the table item_id of 2,147,483,647 rows takes 4.0 TiB" in page
    assert "fits with accelerator.topology:" in page
    assert run(["preflight", path, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["preflight"]
    assert found["fits"] is False
    assert found["changes"][0]["fields"]
    assert found["hbm"] == sum(part["bytes"] for part in found["parts"])


def test_a_plan_explains_each_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec(tmp_path, data={"rows": {"item_id": 50_000_000}})
    assert run(["plan", path]) == 0
    page = capsys.readouterr().out
    assert "item_id" in page
    assert "fits:" in page
    assert run(["plan", path, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["plan"]["choices"]
    assert {each["table"]["name"] for each in choices} == {"user_id", "segment", "item_id"}
    assert all(each["why"] and each["options"] for each in choices)


def test_statistics_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", spec(tmp_path), "--stats", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
    for content in ("[" * 100_000, '{"tables": ', "\\"):
        (tmp_path / "seen.json").write_text(content)
        assert run(["plan", spec(tmp_path), "--stats", str(tmp_path / "seen.json")]) == 2
        assert "seen.json cannot be read" in capsys.readouterr().err
    for content in ('{"tables": {"batches": 1e999, "tables": []}}', '{"tables": {"batches": Infinity, "tables": []}}'):
        (tmp_path / "seen.json").write_text(content)
        assert run(["plan", spec(tmp_path), "--stats", str(tmp_path / "seen.json")]) == 2
        assert "not a report of `twinstep tables --json`" in capsys.readouterr().err


def test_a_host_is_looked_at_without_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", spec(tmp_path, accelerator="cpu")]) == 0
    assert "not held against a limit" in capsys.readouterr().out
