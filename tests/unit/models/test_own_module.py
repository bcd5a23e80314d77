"""A user's own nn.Module: found by name, called, held to its contract; every wrong turn said in a sentence."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import twinstep
from twinstep.spec.errors import SpecError, TrainError, TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.data.batch import Batch
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.models.module import GradedModule, check_lookups, module_config
from twinstep.worker.models.registry import build_meta_model, build_model

HISTORIES = {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2}
CLICKS = {
    "dataset": "synthetic-clicks", "synthetic_events": 400, "batch_size": 8,
    "synthetic": {"table_rows": [50, 300], "max_ids": 3},
}  # fmt: skip
COUNT = itertools.count()
GOOD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, config, scale=1.0):
        super().__init__()
        self.config, self.scale = config, scale
        self.tables = config.embedding_collection()
        self.out = nn.Linear(config.tables[0].dim, len(config.tasks))

    def lookups(self, batch):
        import twinstep
        table = self.config.item_features[0].table
        return [twinstep.Lookup(table, batch.cand_ids[0].flatten(), batch.candidates_valid().flatten())]

    def forward(self, batch):
        rows = [self.tables(each.table, each.ids, each.valid) for each in self.lookups(batch)]
        return self.out(rows[0] * self.scale).t().reshape(batch.labels.shape)

def build(config, **arguments):
    return Model(config, **arguments)
"""


def spec_of(folder: Path, text: str = GOOD, *, name: str = "build", **fields: Any) -> JobSpec:
    """A spec of a package of its own in `folder`, under a name that no other test has imported."""
    package = f"own_{next(COUNT)}"
    (folder / f"{package}.py").write_text(text)
    model = {"kind": "module", "factory": f"{package}:{name}", "source": str(folder), "embedding_dim": 8}
    return validate_spec({"name": "mine", "data": HISTORIES, **fields, "model": model | fields.get("model", {})})


def built(spec: JobSpec) -> tuple[Any, Any]:
    """The model of a spec, and its first batch."""
    dataset = load_dataset(spec.data)
    return build_model(spec, dataset.schema), Loader(dataset, spec.data, seed=0).train_batch(0)[0]


def problem(spec: JobSpec) -> TwinstepError:
    """What is said of a spec's module: where it is built, or where it is called first."""
    with pytest.raises((SpecError, TrainError)) as caught:
        _used(spec)
    assert caught.value.remedy
    return caught.value


def _used(spec: JobSpec) -> None:
    model, batch = built(spec)
    model.train()
    model(batch)
    check_lookups(model, batch)


def test_its_logits_are_graded_as_a_built_in_models_and_its_first_values_follow_the_seed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model={"arguments": {"scale": 2.0}})
    before = torch.random.get_rng_state()
    (model, batch), (again, _) = built(spec), built(spec)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(model, GradedModule)
    assert model.module.scale == 2.0
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    output = model(batch)
    assert output.logits.shape == batch.labels.shape
    counts = batch.weights > 0
    plain = torch.nn.functional.binary_cross_entropy_with_logits(output.logits[counts], batch.labels[counts])
    torch.testing.assert_close(output.loss, plain)
    weight = dict(model.named_parameters())["module.tables.embeddings.item_id.weight"]
    assert 0 < float(weight.detach().std()) < 2 * spec.embedding.init_std
    check_lookups(model, batch)
    meta = build_meta_model(spec, load_dataset(spec.data).schema)
    assert {name: each.shape for name, each in meta.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }


def test_a_config_says_what_the_data_has() -> None:
    for data in (HISTORIES, CLICKS):
        spec = validate_spec({"name": "m", "data": data, "model": {"kind": "module", "factory": "a:b"}})
        schema = load_dataset(spec.data).schema
        config = module_config(spec, schema)
        assert isinstance(config, twinstep.ModuleConfig)
        assert [(each.name, each.rows) for each in config.tables] == [(each.name, each.rows) for each in schema.tables]
        assert {each.dim for each in config.tables} == {32}
        assert bool(config.item_features) == (data is HISTORIES)
        assert bool(config.bags) == (data is CLICKS)
    assert config.num_dense == len(schema.dense)


def test_slots_of_a_packed_batch_hold_its_tokens(tmp_path: Path) -> None:
    data: dict[str, Any]
    for data in (HISTORIES, {**HISTORIES, "uih_budget": 5}):
        _, batch = built(spec_of(tmp_path, data=data))
        assert isinstance(batch, Batch)
        ids, valid = batch.in_slots(batch.uih_ids), batch.slots_valid()
        assert valid.sum(1).tolist() == batch.uih_lengths.tolist()
        for row, slot in itertools.product(*map(range, valid.shape)):
            token = int(batch.slot_token[row, slot])
            assert bool(valid[row, slot]) == (token < len(batch.token_slot))
            expected = batch.uih_ids[:, token] if valid[row, slot] else torch.zeros_like(batch.uih_ids[:, 0])
            assert torch.equal(ids[:, row, slot], expected)
        assert torch.equal(batch.candidates_valid(), batch.weights[0] > 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"factory": "not_there_at_all:build"}}, r"holds no not_there_at_all"),
        ({"model": {"source": "/not/a/folder"}}, r"no folder here"),
        ({"model": {"factory": "not_there_at_all:build", "source": None}}, r"there is no 'not_there_at_all'"),
        ({"model": {"factory": "json:loads", "source": None}}, r"fails.*TypeError|takes .* is called with"),
        ({"name": "bild"}, r"names 'bild'"),
        ({"name": "torch"}, r"cannot be called"),
        ({"model": {"arguments": {"depth": 2}}}, r"fails at .*depth|takes .*depth"),
    ],
    ids=str,
)
def test_a_factory_that_cannot_be_called_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    found = problem(spec_of(tmp_path, **change))
    assert re.search(said, found.problem), found.problem


def test_a_module_of_the_same_name_from_elsewhere_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(GOOD)
    found = problem(spec_of(tmp_path, model={"factory": "json:build"}))
    assert "which Python finds before" in found.problem
    assert sys.modules["json"].loads("1") == 1


def test_a_package_that_is_linked_into_the_folder_is_the_folders(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "source").mkdir()
    spec = spec_of(tmp_path / "real", model={"source": str(tmp_path / "source")})
    file = f"{spec.model.factory.partition(':')[0]}.py"  # type: ignore[union-attr]
    (tmp_path / "source" / file).symlink_to(tmp_path / "real" / file)
    assert isinstance(built(spec)[0], GradedModule)


IN_FILE = r" at .*own_\d+\.py:\d+"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import torch\n", "import torch, no_such_thing\n", r"needs the module 'no_such_thing'" + "|" + IN_FILE),
        ("import torch\n", "import torch\n1 / 0\n", r"fails when it is imported" + IN_FILE + ".*ZeroDivisionError"),
        ("import torch\n", "import torch\nraise SystemExit(3)\n", r"fails when it is imported" + IN_FILE),
        ("import torch\n", "import torch\ndef broken(:\n", r"fails when it is imported" + IN_FILE + ".*SyntaxError"),
        ("    return Model(", "    raise KeyError('depth')\n    return Model(", r"fails" + IN_FILE + ".*KeyError"),
        ("    return Model(config, **arguments)", "    return Model", r"returns the class Model itself"),
        ("    return Model(config, **arguments)", "    pass", r"returns nothing, not an nn.Module"),
        ("    return Model(config, **arguments)", "    return nn.ReLU()", r"without a parameter"),
        ("config.embedding_collection()", "config.embedding_collection(['itm'])", r"no table 'itm'"),
        ("        self.out =", "        self.more = config.embedding_collection()\n        self.out =", r"2 embedding"),
        ("rows[0] * self.scale", "rows[0] * self.scal", r"forward of .* fails" + IN_FILE + ".*AttributeError"),
        (".reshape(batch.labels.shape)", "", r"logits of the shape \[1, 8\].*not \[1, 4, 2\]"),
        (".reshape(batch.labels.shape)", ".reshape(batch.labels.shape).long()", r"torch.int64"),
        (".reshape(batch.labels.shape)", ".reshape(batch.labels.shape).detach()", r"depends on no parameter"),
        ("return self.out(rows", "return {}, self.out(rows", r"returns a tuple, not logits"),
        ("return self.out(rows", "x = self.out(rows", r"returns nothing, not logits"),
    ],
)
def test_a_module_that_cannot_be_trained_is_told_why(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    found = problem(spec_of(tmp_path, GOOD.replace(old, new, 1)))
    assert re.search(said, found.problem), found.problem


def test_lookups_that_are_not_the_forwards_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace("for each in self.lookups(batch)]", "for each in self.lookups(batch)[::-1]]").replace(
        "        return [twinstep.Lookup(table,",
        "        return [twinstep.Lookup('user_id', batch.contextual_ids[:, 0], batch.num_candidates > 0),"
        " twinstep.Lookup(table,",
    ).replace("rows[0] *", "rows[0][:8] *")  # fmt: skip
    found = problem(spec_of(tmp_path, text))
    assert "lookup 1 is of user_id by the module's lookups, of item_id by its forward" in found.problem


def test_a_table_of_another_width_is_refused(tmp_path: Path) -> None:
    text = GOOD.replace(
        "config.embedding_collection()",
        "__import__('twinstep.worker.embedding.collection', fromlist=['x']).EmbeddingCollection({'item_id': (5, 8)})",
    )
    assert "makes the table item_id of [5, 8]" in problem(spec_of(tmp_path, text)).problem


def test_only_tables_that_a_module_makes_are_to_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinstep.worker.models.memory.COPIES", 2**50)
    spec = spec_of(tmp_path)
    with pytest.raises(TrainError, match="the tables and their gradients take"):
        built(spec)
    assert build_meta_model(spec, load_dataset(spec.data).schema) is not None
    built(spec_of(tmp_path, GOOD.replace("config.embedding_collection()", "nn.Embedding(9, 8)")))


SPARSECORE = {"embedding": {"engine": "sparsecore"}, "compile": {"backend": "xla"}}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def lookups(", "def looked_up(", r"without a method lookups"),
        ("config.embedding_collection()", "nn.Embedding(9, 8)", r"makes no embedding collection"),
        ("nn.Linear(config.tables[0].dim, len(config.tasks))", "nn.ReLU()", r"makes tables alone"),
    ],
)
def test_an_engine_of_tables_says_what_it_needs(tmp_path: Path, old: str, new: str, said: str) -> None:
    found = problem(spec_of(tmp_path, GOOD.replace(old, new), **SPARSECORE))
    assert re.search(said, found.problem), found.problem


def test_a_module_without_a_collection_is_taken_where_no_spec_named_an_engine(tmp_path: Path) -> None:
    slice_ = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
    text = GOOD.replace("config.embedding_collection()", "nn.Embedding(config.tables[0].rows, 8)").replace(
        "self.tables(each.table, each.ids, each.valid)", "self.tables(each.ids)"
    )
    spec = spec_of(tmp_path, text, accelerator=slice_)
    assert spec.embedding.engine == "ring"
    model, batch = built(spec)
    assert model(batch).logits.shape == batch.labels.shape


def test_a_loss_of_its_own_is_trained_and_refused_where_it_could_not_be_weighed(tmp_path: Path) -> None:
    text = GOOD.replace("return self.out(rows", "logits = self.out(rows").replace(
        ".reshape(batch.labels.shape)\n",
        ".reshape(batch.labels.shape)\n        return logits, logits.square().mean()\n",
        1,
    )
    model, batch = built(spec_of(tmp_path, text))
    output = model(batch)
    torch.testing.assert_close(output.loss, output.logits.square().mean())
    assert output.task_losses.shape == (1,)
    divided = {"embedding": {"engine": "torchrec"}, "compile": {"backend": "eager"}}
    assert "a loss of its own" in problem(spec_of(tmp_path, text, **divided)).problem
