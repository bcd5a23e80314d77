"""The command data: words, JSON and a page for a spec as a user would write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinstep.cli.app import run

SPEC = """
name: tiny
data: {dataset: synthetic, synthetic_events: 2000, batch_size: 16, uih_len: 30, uih_budget: 4, num_candidates: 2}
"""


def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return str(path)


def test_it_says_what_padding_wastes_and_which_budget_to_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "data.html"
    assert run(["data", spec(tmp_path), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for words in ("all padded to uih_len", "the spec's budget", "recommended: data.uih_budget:", "█", "1.00%"):
        assert words in out
    assert page.read_text().startswith("<!doctype html>")


def test_json_holds_the_same_numbers_and_the_target_is_heeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for target in ("0.01", "0.2"):
        assert run(["data", spec(tmp_path), "--json", "--target-loss", target]) == 0
        found.append(json.loads(capsys.readouterr().out)["data"])
    strict, loose = found
    assert strict["recommended"]["lost"] <= 0.01 < loose["recommended"]["lost"] <= 0.2
    assert strict["recommended"]["budget"] > loose["recommended"]["budget"]
    assert strict["current"]["budget"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--target-loss", "1.5"], "target-loss"), (["--html", "/nowhere/data.html"], "there is no directory /nowhere")],
)
def test_what_cannot_be_done_is_said(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", spec(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


def test_rows_without_histories_have_no_budget_to_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text("{name: rows, model: {kind: dlrm}, data: {dataset: synthetic-clicks}}")
    assert run(["data", str(path)]) == 2
    assert "rows without histories" in capsys.readouterr().err
