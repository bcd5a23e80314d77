"""The command parity: exit codes, table, JSON and the page, for a spec as a user would write it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from twinstep.cli.app import run
from twinstep.worker.compile.parity import report as page
from twinstep.worker.compile.parity.compare import Difference, Tolerance
from twinstep.worker.compile.parity.result import BackendReport, Culprit, ParityReport, TensorReport

SPEC = """
name: tiny
model: {embedding_dim: 4, transducer_dim: 8, num_layers: 1, num_heads: 1, hidden_dim: 8}
data: {dataset: synthetic, synthetic_events: 500, batch_size: 4, uih_len: 8, num_candidates: 2}
"""


def spec(tmp_path: Path, text: str = SPEC) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return str(path)


def test_a_spec_is_held_to_eager_and_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "report.html"
    options = ["--backend", "xla", "--steps", "20", "--no-gradients", "--html", str(place)]
    assert run(["parity", spec(tmp_path), *options]) == 0
    out = capsys.readouterr().out
    assert "xla: within tolerance of eager over 20 steps" in out
    assert re.search(r"^xla +loss +(task_)?loss", out, re.MULTILINE)
    assert "<svg" in place.read_text()


def test_json_is_one_line_and_over_tolerance_is_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinstep.worker.compile.lower import xla_ops

    monkeypatch.setitem(xla_ops.OWN_OPS, torch.ops.aten.sigmoid.default, lambda x: x)
    options = ["--backend", "xla", "--steps", "1", "--no-gradients", "--no-bisect", "--json"]
    assert run(["parity", spec(tmp_path), *options]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)["parity"]
    assert found["ok"] is False
    assert found["backends"][0]["first_divergent"]["step"] == 1
    assert found["backends"][0]["culprit"] is None


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (SPEC, ["--steps", "0"], "--steps"),
        (SPEC, ["--backend", "cuda"], "cuda"),
        (SPEC, ["--html", "/nowhere/report.html"], "no directory /nowhere"),
        (SPEC.replace("hidden_dim: 8", "hidden_dim: 8, dropout: 0.5"), [], "model.dropout is 0.5"),
        (SPEC.replace("hidden_dim: 8", "hidden_dim: 8, attention_dropout: 0.1"), [], "model.attention_dropout is 0.1"),
        (SPEC + "accelerator: {kind: gpu, model: h100, count: 8}\n", [], "accelerator"),
        ("name: A", [], "name"),
    ],
)
def test_bad_input_is_exit_code_two_and_names_it(
    text: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["parity", spec(tmp_path, text), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "fix:" in err


class Tags(HTMLParser):
    """Opens and closes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made_up(*ratios: float, name: str) -> ParityReport:
    steps = tuple(Difference(ratio * 1e-4, ratio * 1e-4, ratio, 2, (0,)) for ratio in ratios)
    tensor = TensorReport(
        kind="parameter", name=name, dtype="float32", shape=(3, 4), tolerance=Tolerance(1e-4, 1e-7), steps=steps
    )
    backend = BackendReport(
        backend="xla",
        tensors=(tensor,),
        compile_seconds=1.0,
        culprit=Culprit(kind="pass", name="<script>", strategy="fused_update"),
    )
    return ParityReport(name="a<b", steps=len(ratios), backends=(backend,), threads=2, versions={"torch": "2"})


def test_the_page_is_whole_loads_nothing_and_escapes_names() -> None:
    html = page.render(made_up(0.0, 0.5, 3.0, float("inf"), float("nan"), name="<img src=x onerror=alert(1)>"))
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    names = {name for name, _ in tags.seen}
    assert "svg" in names
    assert not names & {"script", "img", "link", "iframe"}
    assert not [value for _, attrs in tags.seen for key, value in attrs.items() if key in ("src", "href")]
    assert "url(" not in html
    assert "http" not in html
    assert len(html) < 20_000
    line = next(attrs for name, attrs in tags.seen if name == "polyline")
    points = [tuple(map(float, each.split(","))) for each in line["points"].split()]
    assert len(points) == 5
    assert all(0 <= x <= page.WIDTH and 0 <= y <= page.HEIGHT for x, y in points)
    heights = [y for _, y in points]
    assert heights[0] > heights[1] > heights[2] > heights[3] == heights[4]
