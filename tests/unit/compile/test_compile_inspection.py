"""What a Runner shows: tables that agree with the graph, texts of three stages, a picture that any reader can parse."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile import Runner, StepCompiler
from twinstep.worker.compile.draw import LANES, MOST_BOXES
from twinstep.worker.compile.inspection import Inspectable

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<b>&"\x1b[1m'


class Deep(nn.Module):
    """Forty layers, one with a name that is no XML, and a table."""

    def __init__(self, layers: int = 40) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        self.add_module(HOSTILE, nn.Linear(4, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return getattr(self, HOSTILE)(torch.tanh(self.layers(self.table(ids)))).squeeze(-1)


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer.zero_grad()
    loss = model(batch["ids"]).square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss}


def compiler(layers: int) -> tuple[StepCompiler, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Deep(layers)
    made = StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")
    return made, {"ids": torch.arange(6)}


@pytest.fixture(scope="module")
def deep() -> Inspectable:
    made, batch = compiler(40)
    return made.look(batch)


@pytest.fixture(scope="module")
def runner() -> Runner:
    made, batch = compiler(1)
    return made.runner(batch)


def test_the_tables_count_what_the_graph_holds(deep: Inspectable) -> None:
    found = deep.explain().as_dict()
    nodes = [node for node in deep.captured.graph.graph.nodes if node.op != "output"]
    assert sum(int(row["values"]) for row in found["roles"]) == len(nodes)
    by_role = {row["role"]: row for row in found["roles"]}
    assert by_role["table"]["bytes"] == f"{12 * 4 * 4} B"
    assert int(by_role["parameter"]["values"]) == 2 * 41
    changed = {row["pass"]: row["nodes"] for row in found["passes"]}
    assert changed["drop_copies"] == str(deep.captured.changed["drop_copies"])
    regions = {row["region"] for row in found["regions"]}
    assert "optimizer" in regions
    assert any(region.endswith("more") for region in regions)  # forty layers do not fit


def test_text_rich_and_json_say_the_same(deep: Inspectable) -> None:
    explanation = deep.explain()
    screen = Console(width=200, record=True, file=io.StringIO())
    screen.print(explanation)
    shown = screen.export_text()
    for section in explanation.sections:
        assert section.title in shown
        assert section.title in str(explanation)
    assert json.loads(json.dumps(explanation.as_dict()))


def test_every_value_is_listed_on_demand(deep: Inspectable) -> None:
    explanation = deep.explain()
    assert len(explanation.values().rows) == len(explanation.annotations.values)
    tables = explanation.values("table").as_rows()
    assert [row["of"] for row in tables] == ["table.weight"]


def test_the_three_stages_are_texts(runner: Runner) -> None:
    captured, transformed, lowered = (runner.graph(stage) for stage in ("captured", "transformed", "lowered"))
    assert captured.count(" = ") > transformed.count(" = ")  # passes removed copies
    assert "torch.ops.aten.embedding.default" in transformed
    assert "HloModule" in lowered
    with pytest.raises(CompileError, match="no stage is called 'melted'"):
        runner.graph("melted")  # type: ignore[arg-type]


def test_the_picture_is_valid_has_a_legend_and_few_boxes(deep: Inspectable, tmp_path: Path) -> None:
    place = tmp_path / "step.svg"
    deep.draw(place)
    root = ElementTree.parse(place).getroot()  # noqa: S314  our own file
    boxes = {lane: root.findall(f".//{SVG}g[@class='{lane}']") for lane in LANES}
    assert all(1 <= len(found) <= MOST_BOXES for found in boxes.values()), {k: len(v) for k, v in boxes.items()}
    texts = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert {"table", "parameter", "gradient", "new state"} <= set(texts)
    assert any("<b>&" in text for text in texts)  # escaped in the file, whole when read
    assert "\x1b" not in place.read_text()
    assert not [each for each in root.iter() if "href" in "".join(each.attrib)]  # self-contained


def test_a_picture_of_another_format_is_refused_with_the_name_to_give(deep: Inspectable, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"step\.png ends in \.png.*step\.svg"):
        deep.draw(tmp_path / "step.png")
    assert not [*tmp_path.iterdir()]


def test_a_picture_that_cannot_be_written_is_an_error(deep: Inspectable, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="cannot be written"):
        deep.draw(tmp_path / "nowhere" / "step.svg")
