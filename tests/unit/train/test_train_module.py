"""A user's own module trained from a job spec: on every backend and engine, stopped and gone on with, exported."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from twinstep.spec.errors import CaptureError, SpecError, TrainError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import parse_spec, validate_spec
from twinstep.spec.report import RunSummary
from twinstep.worker.checkpoint.errors import MisfitError
from twinstep.worker.inference.export import export
from twinstep.worker.inference.score import score
from twinstep.worker.train import run_spec
from twinstep.worker.train.explain import look_at
from twinstep.worker.train.parity import _refuse_dropout, parity_spec
from twinstep.worker.train.tables import look_at_tables

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_model" / "job.yaml"
HISTORIES = {"dataset": "synthetic", "synthetic_events": 2000, "batch_size": 8, "uih_len": 8, "num_candidates": 4}
CLICKS = {
    "dataset": "synthetic-clicks", "synthetic_events": 2000, "batch_size": 32,
    "synthetic": {"table_rows": [50, 300], "max_ids": 3},
}  # fmt: skip
EAGER = {"backend": "eager", "cache": False}
BAGS = """
import torch, twinstep
from torch import nn

class Clicks(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bags = config.bags
        self.tables = config.embedding_collection()
        self.out = nn.Linear(config.num_dense + len(config.bags) * config.tables[0].dim, len(config.tasks))

    def lookups(self, batch):
        ids = batch.ids.split([bag.max_ids for bag in self.bags], dim=1)
        slots = [torch.arange(bag.max_ids) < batch.lengths[:, f, None] for f, bag in enumerate(self.bags)]
        return [twinstep.Lookup(bag.table, *each) for bag, *each in zip(self.bags, ids, slots)]

    def forward(self, batch):
        bags = [bag for each in self.lookups(batch) for bag in self.tables.bags([each])]
        return self.out(torch.cat([batch.dense, *bags], dim=1)).t().reshape(batch.labels.shape)
"""


def example(**parts: dict[str, Any]) -> JobSpec:
    given = parse_spec(EXAMPLE.read_text()).model_dump(mode="json")
    given["model"] |= {"source": str(EXAMPLE.parent), "embedding_dim": 8, "arguments": {"hidden": 16}}
    given["data"] = HISTORIES
    given["compile"] = EAGER
    for name, part in parts.items():
        given[name] = {**given[name], **part}
    return validate_spec(given)


def trained(spec: JobSpec) -> RunSummary:
    summary = run_spec(spec, console=None)
    assert summary is not None
    return summary


def losses_of(spec: JobSpec, *, steps: int) -> float:
    final = trained(spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})).final_loss
    assert final is not None
    return final


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., JobSpec]:
    """Write a package's source, as if for a process of its own, and return a spec of it."""

    def write(text: str, name: str, **fields: Any) -> JobSpec:
        (tmp_path / "changing_ranker.py").write_text(text)
        sys.modules.pop("changing_ranker", None)
        importlib.invalidate_caches()
        model = {
            "kind": "module",
            "factory": f"changing_ranker:{name}",
            "source": str(tmp_path),
            "embedding_dim": 8,
        }
        given = {"name": "mine", "data": CLICKS, "compile": EAGER, "train": {"steps": 4}}
        return validate_spec({**given, **fields, "model": model})

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    yield write  # type: ignore[misc]
    sys.dont_write_bytecode = before
    sys.modules.pop("changing_ranker", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def test_the_example_learns_to_rank_held_out_events() -> None:
    first, last = (trained(example(train={"steps": steps})) for steps in (1, 120))
    assert first.ne is not None
    assert last.ne is not None
    assert last.ne < 0.95 * first.ne
    assert last.auc is not None
    assert last.auc > 0.7


@pytest.mark.parametrize("backend", ["xla", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])])
def test_the_step_of_the_example_is_eagers(backend: Literal["inductor", "xla"]) -> None:
    report = parity_spec(example(), backends=[backend], steps=3, gradients=False)
    assert report.ok, report.summary()


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_layer_that_drops_values_is_not_compared_with_xla(rate: float) -> None:
    for name, layer, field in (
        ("drop", nn.Dropout(rate), "p"),
        ("attend", nn.MultiheadAttention(8, 2, dropout=rate), "dropout"),
        ("recall", nn.LSTM(4, 4, 2, dropout=rate), "dropout"),
        ("encode", nn.TransformerEncoderLayer(8, 2, 8, dropout=rate), "dropout"),
    ):
        model = nn.ModuleDict({"module": nn.ModuleDict({name: layer})})
        model["module"].dropout = True  # type: ignore[assignment]  # a switch is no rate
        if not rate:
            _refuse_dropout(model)
            continue
        with pytest.raises(SpecError, match=rf"^{name}\S* drops values \({field} 0.1\)"):
            _refuse_dropout(model)


def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    place = {"path": str(tmp_path / "saved"), "every_steps": 3}
    whole = trained(example(train={"steps": 9}))
    trained(example(train={"steps": 6}, checkpoint=place))
    gone_on = trained(example(train={"steps": 9}, checkpoint=place))
    assert (gone_on.final_loss, gone_on.auc) == (whole.final_loss, whole.auc)


def test_a_checkpoint_of_another_structure_is_refused_with_the_tensors_that_differ(
    tmp_path: Path, package: Callable[..., JobSpec]
) -> None:
    saved = {"checkpoint": {"path": str(tmp_path / "saved"), "every_steps": 4}}
    trained(package(BAGS, "Clicks", **saved))
    wider = BAGS.replace("self.out = nn.Linear(", "self.more = nn.Linear(3, 3)\n        self.out = nn.Linear(")
    with pytest.raises(MisfitError, match=r"module\.more\.weight"):
        trained(package(wider, "Clicks", **saved))
    with pytest.raises(MisfitError, match=r"model\.factory"):
        trained(package(BAGS + "\nOther = Clicks\n", "Other", **saved))


def test_the_pages_model_is_trained(package: Callable[..., JobSpec]) -> None:
    page = (ROOT / "docs" / "howto" / "own-model.md").read_text()
    text = page.partition("```python runs\n")[2].partition("```")[0]
    spec = package(text, "build", data=HISTORIES)
    assert losses_of(spec, steps=30) < losses_of(spec, steps=1)


@pytest.mark.slow
def test_two_processes_that_divide_its_tables_train_what_one_does(tmp_path: Path) -> None:
    """In processes of their own, as `twinstep train` starts them."""
    scores = []
    for processes, embedding in ((2, {"engine": "torchrec", "sharding": {"item_id": "row_wise"}}), (1, {})):
        given = example(train={"steps": 20}).model_dump(mode="json")
        given["embedding"] |= embedding
        given["runtime"]["processes"] = processes
        (tmp_path / "job.json").write_text(json.dumps(given))
        done = subprocess.run(
            [sys.executable, "-m", "twinstep", "train", str(tmp_path / "job.json"), "--json"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        scores.append(json.loads(done.stdout.splitlines()[-1])["summary"]["ne"])
    assert math.isclose(*scores, rel_tol=1e-4)


def test_changed_source_is_another_program(tmp_path: Path, package: Callable[..., JobSpec]) -> None:
    cached = {"compile": {"backend": "xla", "cache_dir": str(tmp_path / "cache")}}
    first = trained(package(BAGS, "Clicks", **cached)).final_loss
    assert trained(package(BAGS, "Clicks", **cached)).final_loss == first
    changed = BAGS.replace("return self.out(", "return 3 * self.out(")
    second = trained(package(changed, "Clicks", **cached)).final_loss
    assert first is not None
    assert second is not None
    assert abs(first - second) > 1e-4
    assert math.isclose(second, losses_of(package(changed, "Clicks"), steps=4), rel_tol=1e-5)


@pytest.mark.parametrize("engine", ["sparsecore", "torchrec"])
def test_engines_of_tables_train_it_as_dense_tables_do(engine: str, package: Callable[..., JobSpec]) -> None:
    how = {"compile": {"backend": "xla" if engine == "sparsecore" else "eager", "cache": False}}
    own = losses_of(package(BAGS, "Clicks", embedding={"engine": engine}, **how), steps=5)
    assert math.isclose(own, losses_of(package(BAGS, "Clicks"), steps=5), rel_tol=1e-5)


def test_tables_alone_or_none_at_all_are_trained(package: Callable[..., JobSpec]) -> None:
    alone = """
from torch import nn
class Sum(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table, self.slots = config.tables[0].name, config.bags[0].max_ids
        self.tables = TABLES
    def forward(self, batch):
        return self.rows(batch.ids[:, :self.slots]).sum((1, 2)).reshape(batch.labels.shape)
    def rows(self, ids):
        return ROWS
"""
    for tables, rows in (
        ("config.embedding_collection()", "self.tables(self.table, ids, ids >= 0)"),
        ("nn.Embedding(config.tables[0].rows, 4)", "self.tables(ids)"),
    ):
        spec = package(alone.replace("TABLES", tables).replace("ROWS", rows), "Sum")
        assert losses_of(spec, steps=30) < losses_of(spec, steps=1)


def test_a_forward_that_depends_on_data_is_refused_with_its_own_line(package: Callable[..., JobSpec]) -> None:
    text = BAGS.replace(
        "        bags = [bag", "        if batch.dense.sum() > 0:\n            pass\n        bags = [bag"
    )
    with pytest.raises(CaptureError, match=r"changing_ranker\.py:\d+: if batch\.dense\.sum\(\) > 0:"):
        trained(package(text, "Clicks", compile={"backend": "xla", "cache": False}))
    spec = package(BAGS.replace("return self.out(", "return {'x': 1} or self.out("), "Clicks")
    with pytest.raises(TrainError, match=r"the forward of changing_ranker:Clicks returns a dict") as caught:
        trained(spec.model_copy(update={"compile": spec.compile.model_copy(update={"backend": "xla"})}))
    assert "return a tensor of the shape [1, 32, 1]" in caught.value.remedy


def test_the_folder_that_an_export_names_is_not_imported_from_unasked(
    tmp_path: Path, package: Callable[..., JobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = package(
        BAGS + "\nimport pathlib\npathlib.Path(__file__).with_name('ran').touch()\n",
        "Clicks",
        train={"steps": 1, "eval_batches": 1},
        checkpoint={"path": str(tmp_path / "saved"), "every_steps": 1},
    )
    trained(spec)
    where, out = str(tmp_path / "export"), tmp_path / "scores.csv"
    export(str(tmp_path / "saved"), where)
    sys.modules.pop("changing_ranker")
    sys.path.remove(str(tmp_path))
    (tmp_path / "ran").unlink()
    with pytest.raises(SpecError, match=f"no changing_ranker; the folder .*not taken unasked: {tmp_path}") as caught:
        score(where, out)
    assert "--source" in caught.value.remedy
    assert not (tmp_path / "ran").exists()
    assert score(where, out, source=tmp_path).candidates
    assert (tmp_path / "ran").exists()
    sys.modules.pop("changing_ranker")
    sys.path.remove(str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert score(where, tmp_path / "again.csv").candidates
    monkeypatch.undo()


def test_it_is_exported_scored_explained_and_its_tables_are_looked_at(tmp_path: Path) -> None:
    summary = trained(example(train={"steps": 6}, checkpoint={"path": str(tmp_path / "saved"), "every_steps": 6}))
    export(str(tmp_path / "saved"), str(tmp_path / "out"))
    scored = score(str(tmp_path / "out"), tmp_path / "scores.csv", source=EXAMPLE.parent)
    assert scored.scores.values()["auc"] == summary.auc
    seen = look_at_tables(example(), batches=1)
    assert {each["table"] for each in seen["tables"]} == {"item_id", "user_id", "segment"}
    assert look_at(example(compile={"backend": "xla"})) is not None
