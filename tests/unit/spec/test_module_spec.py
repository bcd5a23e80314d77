"""`model: {kind: module}` in a spec: text that is held to its form, and never looked up."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.preflight.check import preflight
from twinstep.spec.errors import SpecError
from twinstep.spec.job import DATASETS_OF_ROWS, JobSpec
from twinstep.spec.parse import dump_spec, parse_spec, validate_spec
from twinstep.spec.paths import check_paths, with_whole_paths

MODULE = {"kind": "module", "factory": "nobody_has_this.ranker:build"}
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def spec_of(model: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    return validate_spec({"name": "mine", "model": {**MODULE, **(model or {})}, **fields})


def fault(**fields: Any) -> Any:
    with pytest.raises(SpecError) as caught:
        validate_spec({"name": "mine", "model": MODULE} | fields)
    (found,) = caught.value.faults
    return found


def test_a_module_takes_every_dataset_and_histories_by_default() -> None:
    assert spec_of().data.dataset == "ml-100k"
    for name in (*DATASETS_OF_ROWS, "synthetic"):
        data = {"dataset": name} | ({"path": "/data"} if name == "criteo" else {})
        assert spec_of(data=data).data.dataset == name


def test_whoever_reads_a_spec_imports_nothing() -> None:
    before = set(sys.modules)
    preflight(spec_of(accelerator=TPU))
    assert not {name for name in set(sys.modules) - before if name.startswith("nobody_has_this")}


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("my_package.ranker.build", "my_package.ranker:build"),
        ("my_package/ranker.py:build", "my_package.ranker:build"),
        ("ranker", "ranker:build"),
        ("my-package.ranker:build", "my_package.ranker:build"),
        ("a:b; import os", "a:b__import_os"),
        ("", "my_package.ranker:build"),
        ("1:2", "my_package.ranker:build"),
        (3, "my_package.ranker:build"),
    ],
)
def test_a_wrong_factory_is_answered_with_the_nearest(given: Any, nearest: str) -> None:
    found = fault(model={"kind": "module", "factory": given})
    assert (found.field, found.remedy) == ("model.factory", f"factory: '{nearest}'")
    spec_of({"factory": nearest})


def test_a_factory_is_required_and_a_misspelt_field_is_named() -> None:
    assert fault(model={"kind": "module"}).remedy == "factory: 'my_package.ranker:build'"
    assert fault(model={**MODULE, "argument": {}}).remedy == "did you mean arguments?"


@given(arguments=st.dictionaries(st.sampled_from("abc"), JSON, max_size=3))
@settings(max_examples=30, deadline=None)
def test_arguments_come_back_as_they_were_given(arguments: dict[str, Any]) -> None:
    spec = spec_of({"arguments": arguments})
    assert spec.model.arguments == arguments  # type: ignore[union-attr]
    assert parse_spec(dump_spec(spec)) == spec
    assert validate_spec(json.loads(spec.model_dump_json())) == spec


@pytest.mark.parametrize(
    "bad",
    [float("nan"), [float("inf")], 2**63, {"x": "\0"}, "\ud800", [[[[[[[[[1]]]]]]]]], {"x": {"\x07": 1}}, {1: 2}, {3}],
)
def test_an_argument_that_would_not_come_back_is_named_and_left_out(bad: Any) -> None:
    found = fault(model={**MODULE, "arguments": {"good": 1, "bad": bad}})
    assert found.field.startswith("model.arguments")
    assert "bad" in found.problem or "bad" in found.field


@pytest.mark.parametrize("source", ["src", "~/src", "s3://bucket/src"])
def test_a_source_that_no_pod_has_is_refused(source: str) -> None:
    found = fault(model={**MODULE, "source": source}, accelerator=TPU)
    assert (found.field, found.remedy) == ("model.source", "source: null")
    assert spec_of({"source": "/app"}, accelerator=TPU).model.source == "/app"  # type: ignore[union-attr]


def test_a_relative_source_leads_from_where_a_job_is_submitted_or_is_refused() -> None:
    spec = spec_of({"source": "src"})
    assert with_whole_paths(spec, "/home/me").model.source == "/home/me/src"  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=r"model\.source"):
        check_paths(spec)
    check_paths(JobSpec(name="none"))


def test_preflight_counts_the_tables_and_what_the_spec_says_and_says_so() -> None:
    data = {"dataset": "synthetic-clicks", "batch_size": 64}
    own = preflight(spec_of({"embedding_dim": 16}, data=data, accelerator=TPU))
    built_in = preflight(
        validate_spec({"name": "b", "model": {"kind": "dlrm", "embedding_dim": 16}, "data": data, "accelerator": TPU})
    )
    parts = [{part.name: part.bytes for part in each.parts} for each in (own, built_in)]
    assert parts[0]["tables"] == parts[1]["tables"]
    assert parts[0]["table optimizer"] == parts[1]["table optimizer"]
    assert parts[0]["dense parameters"] == 0
    assert any("no other parameter" in note and "--aot" in note for note in own.notes)
    said = preflight(spec_of({"dense_parameters": 10**9}, data=data, accelerator=TPU))
    assert {part.name: part.bytes for part in said.parts}["dense parameters"] >= 4 * 10**9 // 4
    assert said.parameters == own.parameters // 16 * 32 + 10**9
