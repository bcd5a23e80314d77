"""Tables that are called as something that PyTorch's modules have: `type`, `items`, `training`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from twinstep.preflight.parameters import parameters
from twinstep.preflight.shapes import data_shape
from twinstep.spec.base import TableName
from twinstep.spec.parse import validate_spec
from twinstep.spec.table_names import MARK, TAKEN, module_name, table_name
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.embedding.hybrid.given import given_collection, without
from twinstep.worker.inference.export import export
from twinstep.worker.models.registry import build_model
from twinstep.worker.train import run_spec
from twinstep.worker.train.parity import parity_spec

NAMES = [*dir(nn.ModuleDict()), "item_id", "a-b"]
SPEC: dict[str, Any] = {
    "name": "odd-names",
    "model": {
        "embedding_dim": 8, "transducer_dim": 8, "num_layers": 1, "num_heads": 1, "linear_dim": 4, "attention_dim": 4,
        "hidden_dim": 8,
    },
    "data": {
        "dataset": "synthetic", "synthetic_events": 300, "batch_size": 4, "uih_len": 8, "num_candidates": 2,
        "synthetic": {"user_features": {"type": 5, "training": 3}, "item_features": {"items": 4, "forward": 4}},
    },
    "compile": {"backend": "eager"},
    "train": {"steps": 2},
}  # fmt: skip


def test_every_name_that_a_module_has_is_known_and_a_table_may_have_it() -> None:
    special = {name for name in NAMES if name.startswith("__") and name.endswith("__")}
    assert set(dir(nn.ModuleDict())) - special <= TAKEN
    collection = EmbeddingCollection({name: (row + 1, 2) for row, name in enumerate(NAMES)})
    assert list(collection.weights) == NAMES
    for row, name in enumerate(NAMES):
        TypeAdapter(TableName).validate_python(name)
        nn.init.constant_(collection.weights[name], row)
        assert collection(name, torch.tensor([row]), torch.tensor([True])).unique().tolist() == [row]
        assert torch.get_default_dtype() == collection.get_parameter(f"embeddings.{module_name(name)}.weight").dtype


def test_a_name_of_a_module_is_no_other_tables_name() -> None:
    assert [table_name(module_name(name)) for name in NAMES] == NAMES
    assert len({module_name(name) for name in NAMES}) == len(NAMES)
    with pytest.raises(ValueError, match="pattern"):
        TypeAdapter(TableName).validate_python(f"type{MARK}")


def test_such_features_train_go_on_and_are_exported(tmp_path: Path) -> None:
    spec = SPEC | {"checkpoint": {"path": str(tmp_path / "run"), "every_steps": 1}}
    first = run_spec(validate_spec(spec), console=None)
    more = run_spec(validate_spec(spec | {"train": {"steps": 3}}), console=None)
    assert first is not None
    assert more is not None
    assert (first.steps, more.steps) == (2, 3)
    assert export(str(tmp_path / "run"), str(tmp_path / "out"), int8="row").scores["int8"]


def test_preflight_names_the_tensors_that_the_model_has() -> None:
    spec = validate_spec(SPEC)
    model = build_model(spec, load_dataset(spec.data).schema)
    counted = {each.name for each in parameters(spec, data_shape(spec.data)) if each.role != "buffer"}
    assert counted == {name for name, _ in model.named_parameters()}


def test_such_tables_may_be_elsewhere() -> None:
    spec = validate_spec(SPEC)
    model = build_model(spec, load_dataset(spec.data).schema)
    left = without(model, ["type", "items", "item_id"])
    kept = {table_name(name.split(".")[-2]) for name, _ in left.named_parameters() if ".embeddings." in name}
    assert kept == {"training", "forward", "user_id", "segment"}
    collection: Any = given_collection(left)
    rows = collection("training", torch.tensor([2]), torch.tensor([True]))
    assert torch.equal(rows[0], model.get_parameter("_embedding_collection.embeddings.training~.weight")[2])


def test_the_compiled_step_takes_them() -> None:
    report = parity_spec(validate_spec(SPEC), backends=["xla"], steps=2, gradients=False)
    assert report.ok, report.summary()
