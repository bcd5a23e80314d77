"""The command explain: tables, JSON, text of a stage and the picture, for a spec as a user would write it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from twinstep.cli.app import run

SPEC = """
name: tiny
model: {embedding_dim: 4, transducer_dim: 8, num_layers: 1, num_heads: 1, hidden_dim: 8}
data: {dataset: synthetic, synthetic_events: 500, batch_size: 4, uih_len: 8, num_candidates: 2}
compile: {backend: xla}
"""


def spec(tmp_path: Path, text: str = SPEC) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return str(path)


def test_a_spec_is_explained_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "step.svg"
    assert run(["explain", spec(tmp_path), "--draw", str(place), "--values"]) == 0
    out = capsys.readouterr().out
    for section in ("stages", "passes", "roles", "regions"):
        assert f"\n{section}\n" in out
    assert "batch size 4" in out
    assert "batch_size=4" in out
    assert "[B, 2]" in out  # candidates' times, in the list of values
    assert ElementTree.parse(place).getroot().tag.endswith("svg")  # noqa: S314  our own file


def test_json_holds_the_same_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", spec(tmp_path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)["explain"]
    assert {"stages", "passes", "roles"} <= set(found)
    tables = [row for row in found["roles"] if row["role"] == "table"]
    assert int(tables[0]["values"]) >= 2


def test_a_stage_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", spec(tmp_path), "--stage", "transformed"]) == 0
    assert "torch.ops.aten.mm.default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "code", "said"),
    [
        (SPEC.replace("xla", "eager"), [], 2, "compile.backend is eager"),
        (SPEC, ["--stage", "melted"], 2, "melted"),
        (SPEC, ["--draw", "/nowhere/step.svg"], 1, "/nowhere/step.svg"),
    ],
)
def test_bad_input_is_named(
    text: str, options: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", spec(tmp_path, text), *options]) == code
    _, err = capsys.readouterr()
    assert said in err
    assert "fix:" in err
