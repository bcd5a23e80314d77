"""From text to a JobSpec and back, and what a person is told when the text is wrong."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import MAX_SPEC_BYTES, dump_spec, parse_spec, spec_json_schema, suggest_name, validate_spec


def fault(text: str) -> Any:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert caught.value.remedy
    assert len(caught.value.faults) == 1, caught.value.faults
    return caught.value.faults[0]


@pytest.mark.parametrize(
    ("text", "field", "given", "allowed", "remedy"),
    [
        ("name: a\nfoo: 1", "foo", "1", "accelerator", "remove foo"),
        ("name: a\ndata: {batchsize: 4}", "data.batchsize", "4", "batch_size", "batch_size?"),
        ("name: a\ndata: {batch_size: 0}", "data.batch_size", "0", "at least 1", "batch_size: 1"),
        ("name: a\ndata: {batch_size: -7}", "data.batch_size", "-7", "at least 1", "batch_size: 1"),
        ("name: a\ndata: {batch_size: '4'}", "data.batch_size", "'4'", "whole number", "batch_size"),
        ("name: a\ndata: {batch_size: true}", "data.batch_size", "true", "whole number", "batch_size"),
        ("name: a\ndata: {batch_size: 4.5}", "data.batch_size", "4.5", "whole number", "batch_size"),
        ("name: a\ndata: {batch_size: 1e99}", "data.batch_size", "1e+99", "whole number", "batch_size"),
        ("name: a\ndata: {dataset: ml100k}", "data.dataset", "'ml100k'", "ml-100k", "dataset: ml-100k"),
        ("name: a\ndata: {dataset: null}", "data.dataset", "null", "ml-100k", "dataset: "),
        ("name: a\ndata: 7", "data", "7", "mapping", "data"),
        ("name: a\ndata: []", "data", "[]", "mapping", "data"),
        ("name: a\ndata: {split: {eval_fraction: 1}}", "data.split.eval_fraction", "1", "less than 1", "0.999"),
        ("name: a\noptimizers: {dense: {lr: 0}}", "optimizers.dense.lr", "0", "more than 0", "lr: 0.001"),
        ("name: a\noptimizers: {dense: {lr: .nan}}", "optimizers.dense.lr", "nan", "", "lr"),
        ("name: a\noptimizers: {dense: {kind: lion}}", "optimizers.dense.kind", "'lion'", "adam", "kind: "),
        ("name: a\noptimizers: {dense: {kind: rowwise_adagrad}}", "optimizers.dense.kind", "'row", "sgd", "kind: "),
        ("name: a\naccelerator: gpus", "accelerator.kind", "'gpus'", "cpu, tpu, gpu", "kind: gpu"),
        ("name: a\naccelerator: {kind: cpu, devices: 0}", "accelerator.devices", "0", "at least 1", "devices: 1"),
        ("name: Abc_Def", "name", "'Abc_Def'", "lower-case", "name: abc-def"),
        ("name: 9run", "name", "'9run'", "letter", "name: run"),
        ("name: run-", "name", "'run-'", "letter", "name: run"),
        ("name: ''", "name", "''", "1 to 40", "name: my-job"),
        ("name: " + "a" * 100, "name", "'aaaa", "1 to 40", "name: " + "a" * 40),
        ("data: {}", "name", "", "", "add `name:`"),
    ],
)
def test_a_fault_names_field_value_what_is_allowed_and_the_nearest_valid_value(
    text: str, field: str, given: str, allowed: str, remedy: str
) -> None:
    found = fault(text)
    assert found.field == field
    assert found.given.startswith(given)
    assert allowed in found.allowed
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds nothing"),
        ("- a\n- b", "holds a list"),
        ("just text", "holds a single value"),
        ("a: [", "not valid YAML"),
        ("name: &x a\nmodel: *x", "aliases"),
        ("name: a\nname: b", "stands twice"),
        ("? [a, b]\n: 1", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: " + "[" * 60 + "]" * 60, "nested too deeply"),
        ("name: a\n" + "# " * MAX_SPEC_BYTES, "bytes"),
    ],
)
def test_text_that_is_no_spec_is_one_clear_message(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse_spec(text)
    assert caught.value.remedy


def test_bytes_that_are_no_text_are_one_clear_message() -> None:
    with pytest.raises(SpecError, match="UTF-8"):
        parse_spec(b"name: \xff\xfe")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*JobSpec.model_fields, "kind", "lr", "rows", "split", "x"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_plain_data_is_a_spec_or_a_spec_error(data: Any) -> None:
    with contextlib.suppress(SpecError):
        validate_spec(data)


@given(st.text(max_size=80))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse_spec(text)


@given(st.text(max_size=80))
def test_a_suggested_name_is_valid(given_name: str) -> None:
    validate_spec({"name": suggest_name(given_name)})


@given(
    batch=st.integers(1, 65536),
    length=st.integers(1, 8192),
    backend=st.sampled_from(["eager", "xla", "inductor"]),
    lr=st.floats(1e-9, 1e3),
    rows=st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True), st.integers(1, 2**31 - 1), max_size=3
    ),
)
def test_a_spec_written_as_yaml_or_json_reads_back_equal(
    batch: int, length: int, backend: str, lr: float, rows: dict[str, int]
) -> None:
    spec = validate_spec(
        {
            "name": "a",
            "data": {"batch_size": batch, "uih_len": length, "rows": rows},
            "compile": {"backend": backend},
            "optimizers": {"dense": {"lr": lr}},
        }
    )
    assert parse_spec(dump_spec(spec)) == spec
    assert parse_spec(spec.model_dump_json()) == spec


def test_a_short_accelerator_means_the_whole_one() -> None:
    assert parse_spec("name: a\naccelerator: cpu") == parse_spec("name: a\naccelerator: {kind: cpu, devices: 1}")
    tpu = parse_spec("name: a\naccelerator: {kind: tpu, generation: v5p, topology: 4x4x8}")
    assert tpu.accelerator.kind == "tpu"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", "0.001", "1.0e-3"])
def test_a_number_with_an_exponent_is_a_number(text: str) -> None:
    assert parse_spec(f"name: a\noptimizers: {{dense: {{lr: {text}}}}}").optimizers.dense.lr == 1e-3


def test_a_spec_cannot_be_changed() -> None:
    spec = parse_spec("name: a")
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "b"  # type: ignore[misc]


def test_partly_given_optimizers_keep_the_defaults_of_their_own_kind() -> None:
    spec = parse_spec("name: a\noptimizers: {sparse: {lr: 0.5}}")
    assert spec.optimizers.sparse.kind == "rowwise_adagrad"


def test_every_field_says_what_it_means() -> None:
    def models(schema: dict[str, Any]) -> list[dict[str, Any]]:
        return [schema, *schema.get("$defs", {}).values()]

    for model in models(spec_json_schema()):
        for name, field in model["properties"].items():
            assert field.get("description") or "$ref" in field, name
        assert model["additionalProperties"] is False
    json.dumps(spec_json_schema())


def test_every_part_of_a_spec_is_frozen_and_closed() -> None:
    def parts(model: type[BaseModel]) -> list[type[BaseModel]]:
        return [model, *(each for child in model.__subclasses__() for each in parts(child))]

    from twinstep.spec.job import Spec

    for part in parts(Spec):
        assert part.model_config["frozen"]
        assert part.model_config["extra"] == "forbid"


def test_yaml_words_that_mean_booleans_are_named_as_what_they_became() -> None:
    assert yaml.safe_load("a: on") == {"a": True}
    assert fault("name: a\ncompile: {cache_dir: on}").given == "true"
