"""Settings of `data`: names that clash, and what a dataset would ignore, are refused by name with the nearest value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinstep.spec.base import MAX_TABLES
from twinstep.spec.errors import SpecError
from twinstep.spec.job import DATA_SETTINGS, DATASETS_OF_FILES, DATASETS_OF_ROWS, DataSpec
from twinstep.spec.parse import dump_spec, parse_spec
from twinstep.spec.text import load_yaml


def fault(text: str) -> Any:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert len(caught.value.faults) == 1, caught.value.faults
    return caught.value.faults[0]


def parse_plain(text: str) -> Any:
    return load_yaml(f"{{{text}}}")


CLASHES = [
    ("item_features: [cat], user_features: [cat]", "item_features", "names cat, which is a feature already", []),
    ("item_features: [a, user_id, b]", "item_features", "names user_id, which is a feature already", ["a", "b"]),
    ("item_features: [a, item_id]", "item_features", "names item_id, which is a feature already", ["a"]),
    ("item: sku, user_features: [sku, a]", "user_features", "names sku, which is a feature already", ["a"]),
    ("user_features: [a, b, a]", "user_features", "names one twice", ["a", "b"]),
    ("item_features: [a, a]", "item_features", "names one twice", ["a"]),
    ("user: item_id", "item", "is the user's column too", "item"),
    ("user: a, item: a", "item", "is the user's column too", "item_id"),
    ("actions: [liked, click]", "actions", "names liked, which is the task of the rating", ["click"]),
    ("actions: [liked]", "actions", "names liked, which is the task of the rating", []),
    ("actions: [watch_time], watch: s", "watch", "gives the task watch_time, which an action is", None),
]


@pytest.mark.parametrize(("columns", "field", "problem", "nearest"), CLASHES)
def test_names_of_columns_that_clash_are_refused(columns: str, field: str, problem: str, nearest: Any) -> None:
    found = fault(f"name: a\ndata: {{dataset: parquet, path: /d, columns: {{{columns}}}}}")
    assert (found.field, found.problem) == (f"data.columns.{field}", problem)
    assert parse_plain(found.remedy) == {field: nearest}


def test_names_of_columns_that_do_not_clash_are_taken() -> None:
    for columns in (
        "rating: null, actions: [liked, watch_time]",
        "user_features: [user_id, a], item_features: [b]",
        "user_features: [a], item_features: [user_id]",
        "watch: watch_time",
    ):
        parse_spec(f"name: a\ndata: {{dataset: parquet, path: /d, columns: {{{columns}}}}}")


@pytest.mark.parametrize(("data", "field"), [
    ("columns: {item: a.b}", "columns.item"),
    ("columns: {user: a.b}", "columns.user_features"),
    ("columns: {user_features: [a.b]}", "columns.user_features.0"),
    ("columns: {item_features: [a.b]}", "columns.item_features.0"),
    ("synthetic: {user_features: {a.b: 3}}", "synthetic.user_features"),
    ("synthetic: {item_features: {a.b: 3}}", "synthetic.item_features"),
])  # fmt: skip
def test_a_feature_that_has_a_table_has_no_dot(data: str, field: str) -> None:
    dataset = "synthetic" if data.startswith("synthetic") else "parquet, path: /d"
    found = fault(f"name: a\ndata: {{dataset: {dataset}, {data}}}")
    assert found.field.startswith(f"data.{field}")
    assert found.remedy


def test_columns_without_a_table_may_have_dots() -> None:
    columns = "user: a.b, user_features: [c], time: d.e, rating: f.g, actions: [h.i]"
    parse_spec(f"name: a\ndata: {{dataset: parquet, path: /d, columns: {{{columns}}}}}")


@pytest.mark.parametrize("part", ["rows", "hash_rows", "columns.user_features", "columns.item_features"])
def test_a_spec_names_no_more_tables_than_can_be_looked_at(part: str) -> None:
    names = [f"t{index}" for index in range(MAX_TABLES + 1)]
    given: Any = names if part.startswith("columns") else dict.fromkeys(names, 3)
    data: Any = {"dataset": "parquet", "path": "/d"}
    data |= {"columns": {part.split(".")[1]: given}} if part.startswith("columns") else {part: given}
    found = fault(json.dumps({"name": "a", "data": data}))
    assert found.field == f"data.{part}"


EVERY = ("ml-100k", "ml-1m", "ml-20m", "kuairand-1k", "parquet", "synthetic", "synthetic-clicks", "criteo")


@pytest.mark.parametrize("dataset", EVERY)
@pytest.mark.parametrize(
    ("setting", "value"),
    [("hash_rows", {"C1": 5}), ("cache_dir", "/c"), ("vocabulary", "/v"), ("unlisted", "error"), ("split", "user")],
)
def test_a_setting_that_a_dataset_ignores_is_refused_by_name(dataset: str, setting: str, value: Any) -> None:
    data: dict[str, Any] = {"dataset": dataset, setting: {"by": value} if setting == "split" else value}
    if dataset in DATASETS_OF_FILES:
        data["path"] = "/d"
    rows = dataset in DATASETS_OF_ROWS
    text = json.dumps({"name": "a", "model": {"kind": "dlrm" if rows else "dlrmv3"}, "data": data})
    looked_at = DATA_SETTINGS.get(setting, tuple(each for each in EVERY if each not in DATASETS_OF_ROWS))
    if dataset in looked_at:
        spec = parse_spec(text)
        assert parse_spec(dump_spec(spec)) == spec
        return
    found = fault(text)
    part, default = ("split.by", "time") if setting == "split" else (setting, getattr(DataSpec(), setting))
    assert (found.field, found.problem) == (f"data.{part}", f"has no effect with dataset: {dataset}")
    assert parse_plain(found.remedy) == {part.rsplit(".", maxsplit=1)[-1]: default}


@pytest.mark.parametrize(("setting", "dataset"), [("cache_dir", "criteo"), ("vocabulary", "parquet")])
@pytest.mark.parametrize(
    ("path", "whole"),
    [("kept", "/data/kept"), ("./a/b/", "/data/b"), ("gs://bucket/v", "/data/v"), ("~who/x", "/data/x"), ("~", "")],
)
def test_a_folder_of_a_run_is_given_by_its_whole_path(setting: str, dataset: str, path: str, whole: str) -> None:
    model = "dlrm" if dataset == "criteo" else "dlrmv3"
    data = {"dataset": dataset, "path": "/d"}
    found = fault(json.dumps({"name": "a", "model": {"kind": model}, "data": data | {setting: path}}))
    assert found.field == f"data.{setting}"
    assert parse_plain(found.remedy) == {setting: whole or f"/data/{setting}"}
    for fine in ("/kept", "~/kept"):
        parse_spec(json.dumps({"name": "a", "model": {"kind": model}, "data": data | {setting: fine}}))
