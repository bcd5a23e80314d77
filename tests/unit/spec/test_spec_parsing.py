"""From text to a JobSpec and back, and what a person is told when the text is wrong."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.nearest import suggest_name
from twinstep.spec.optimizers import OPTIMIZER_SETTINGS, OptimizersSpec
from twinstep.spec.parse import MAX_SPEC_BYTES, dump_spec, parse_spec, spec_json_schema, validate_spec
from twinstep.spec.text import load_yaml


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
        ("name: a\ndata: {batch_size: '4'}", "data.batch_size", "'4'", "whole number", "batch_size: 4"),
        ("name: a\ndata: {batch_size: ' 1_000'}", "data.batch_size", "' 1_000'", "whole number", "batch_size: 1000"),
        ("name: a\ndata: {batch_size: '99999999'}", "data.batch_size", "'9", "whole number", "batch_size: 65536"),
        ("name: a\ndata: {batch_size: many}", "data.batch_size", "'many'", "whole number", "batch_size: 32"),
        ("name: a\ndata: {batch_size: true}", "data.batch_size", "true", "whole number", "batch_size: 32"),
        ("name: a\ndata: {batch_size: null}", "data.batch_size", "null", "whole number", "batch_size: 32"),
        ("name: a\ndata: {batch_size: {a: 1}}", "data.batch_size", "{", "whole number", "batch_size: 32"),
        ("name: a\ndata: {batch_size: 4.5}", "data.batch_size", "4.5", "whole number", "batch_size: 4"),
        ("name: a\ndata: {batch_size: 1e99}", "data.batch_size", "1e+99", "whole number", "batch_size: 65536"),
        ("name: a\ndata: {batch_size: .inf}", "data.batch_size", "inf", "whole number", "batch_size: 65536"),
        ("name: a\ndata: {batch_size: 0b11}", "data.batch_size", "'0b11'", "whole number", "batch_size: 32"),
        ("name: a\ntrain: {steps: 1:30}", "train.steps", "'1:30'", "whole number", "steps: 400"),
        ("name: a\ntrain: {steps: 2026-01-02}", "train.steps", "'2026-01-02'", "whole number", "steps: 400"),
        ("name: a\ncompile: {cache: on}", "compile.cache", "'on'", "true, false", "cache: true"),
        ("name: a\ncompile: {cache: No}", "compile.cache", "'No'", "true, false", "cache: false"),
        ("name: a\ncompile: {cache: 1}", "compile.cache", "1", "true, false", "cache: true"),
        ('name: a\ncompile: {cache_dir: "a\\0b"}', "compile.cache_dir", "'a", "form", "cache_dir: null"),
        ("name: a\ncompile: {cache_dir: 7}", "compile.cache_dir", "7", "text", "cache_dir: '7'"),
        ("name: a\ndata: {uih_budget: 65}", "data.uih_budget", "65", "at most 64", "uih_budget: 64"),
        ("name: a\ndata: {uih_len: 8, uih_budget: 9}", "data.uih_budget", "9", "at most 8", "uih_budget: 8"),
        ("name: a\ndata: {rows: {user_id: x}}", "data.rows.user_id", "'x'", "whole number", "user_id: 1"),
        ("name: a\ndata: {rows: {a b: 3}}", "data.rows.a b", "", "form", "remove a b"),
        ("name: a\noptimizers: {dense: {betas: [0.5]}}", "optimizers.dense.betas.1", "", "", "betas: [0.5, 0.999]"),
        ("name: a\noptimizers: {dense: {betas: [2, 0.9]}}", "optimizers.dense.betas.0", "2", "less", "[0.999, 0.9]"),
        ("name: a\noptimizers: {dense: {betas: 0.9}}", "optimizers.dense.betas", "0.9", "a list", "[0.9, 0.999]"),
        ("name: a\naccelerator: {kind: gpu, model: h100}", "accelerator.count", "", "", "count: 1"),
        ("name: a\naccelerator: {kind: cpu, cpu: 1}", "accelerator.cpu", "1", "devices, kind", "remove cpu"),
        ("name: a\naccelerator: {}", "accelerator.kind", "", "cpu, tpu, gpu", "kind: cpu"),
        (
            "name: a\naccelerator: {kind: tpu, generation: v5p, topology: big}",
            "accelerator.topology",
            "'big'",
            "form",
            "topology: 2x2x1",
        ),
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
        ("data: {}", "name", "", "", "name: my-job"),
        ("name: null", "name", "null", "1 to 40", "name: my-job"),
        ("name: 7", "name", "7", "1 to 40", "name: my-job"),
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


@pytest.mark.parametrize("bits", [2000, 15_000, 24_000])  # past the floats; past what Python writes in decimal
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", [lambda n: n, lambda n: [n], lambda n: {"a": n}, lambda n: {n: n}])
def test_a_number_of_any_size_in_any_field_is_a_fault_of_that_field(bits: int, sign: int, kind: Any) -> None:
    number = sign << bits
    given = kind(number)
    for data in (
        {"name": given},
        {"name": "a", "train": {"steps": given}},
        {"name": "a", "train": given},
        {"name": "a", "optimizers": {"dense": {"lr": given, "betas": [given, given]}}},
        {"name": "a", "data": {"rows": {"user_id": given}}},
        {"name": "a", "model": {"kind": given}},
        {"name": "a", "accelerator": given},
        {"name": "a", "accelerator": {"kind": given}},
        {"name": "a", "no": given},
        {"name": "a", number: 1},
    ):
        with pytest.raises(SpecError) as caught:
            validate_spec(data)
        assert caught.value.faults
        for found in caught.value.faults:
            assert len(found.given) <= 120
            assert len(found.field + found.remedy) < 400
            assert len(found.field) > 0


@pytest.mark.parametrize(
    ("number", "words"),
    [("0x" + "f" * 6000, "1 field to mend"), ("9" * 3000, "1 field to mend"), ("9" * 6000, "line 2: a number has")],
)
def test_a_number_of_thousands_of_digits_in_yaml_is_one_clear_message(number: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_spec(f"name: a\ntrain: {{steps: {number}}}")


@pytest.mark.parametrize("where", ["", "data.rows."])
def test_of_thousands_of_faults_fifty_are_told_and_the_rest_counted(where: str) -> None:
    wrong = {f"key{index}": "x" for index in range(1200)}
    with pytest.raises(SpecError) as caught:
        validate_spec({"name": "a", "data": {"rows": wrong}} if where else {"name": "a", **wrong})
    assert [fault.field for fault in caught.value.faults] == [f"{where}key{index}" for index in range(50)]
    assert "1,200 fields to mend" in caught.value.problem
    assert "and 1,150 more" in caught.value.problem
    assert len(caught.value.remedy) < 1000


def mend(data: dict[str, Any], fault: Fault) -> None:
    """Do what a fault's remedy says, at its field."""
    parts = fault.field.split(".")
    if "[" in fault.remedy and parts[-1].isdecimal():
        parts.pop()  # a remedy for a part of a list gives the whole list
    *path, key = parts
    at: dict[Any, Any] = data
    for part in path:
        if not isinstance(at.get(part), dict):  # `accelerator: gpus` is short for a mapping; a part may be left out
            at[part] = {}
        at = at[part]
    if fault.remedy.startswith("did you mean "):
        at[fault.remedy.removeprefix("did you mean ").rstrip("?")] = at.pop(key)
    elif fault.remedy.startswith("remove "):
        at.pop(key if key in at else next(each for each in at if str(each) == key))
    else:
        at |= parse_plain(fault.remedy)


def parse_plain(text: str) -> dict[str, Any]:
    found = load_yaml(f"{{{text}}}")
    assert isinstance(found, dict)
    return found


LEAVES = [
    tuple(path.split("."))
    for path in re.split(
        " ",
        "name model model.kind model.dropout model.num_heads model.bottom_dims data "
        "data.dataset data.split data.split.by data.split.eval_fraction "
        "data.batch_size data.uih_len data.uih_budget data.rows data.rows.t "
        "data.path data.tasks data.on_bad_row data.columns.actions data.columns.rating data.hash_rows.t "
        "data.cache_dir data.vocabulary data.unlisted data.columns.user data.columns.item data.columns.watch "
        "data.columns.user_features data.columns.item_features "
        "data.synthetic.item_features data.synthetic.item_features.user_id data.synthetic.table_rows "
        "data.synthetic.user_features.t optimizers.dense optimizers.dense.kind "
        "optimizers.dense.momentum optimizers.dense.betas optimizers.sparse.kind optimizers.sparse.betas "
        "optimizers.sparse.eps optimizers.sparse.lr accelerator accelerator.kind accelerator.devices "
        "accelerator.topology accelerator.count compile.backend compile.cache compile.cache_dir train.steps "
        "train.clip_norm debug.save_graph runtime.max_seconds runtime.threads zeal data.batchsize",
    )
]
hostile = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.integers(-2, 70)
    | st.text(alphabet=st.characters(codec="utf-8"), max_size=8)
    | st.sampled_from(["4", "1e3", "yes", "off", "1:30", "gpu", "tpu", "cpu", "dlrm", "sgd",
                       "adam", "xla", "v5p", "item_id", "user", "criteo", "parquet", "error", 0, 2, 0.5])
    | st.lists(st.floats() | st.text(max_size=3) | st.floats(0, 0.9), max_size=3)
    | st.lists(st.sampled_from(["liked", "watch_time", "item_id", "user_id", "a", "b"]), max_size=4)
    | st.dictionaries(st.sampled_from(["kind", "lr", "x", "int", "cpu"]), st.integers() | st.just("tpu"), max_size=2)
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LEAVES), hostile), max_size=6))
def test_doing_what_the_remedies_say_ends_in_a_valid_spec(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    data: dict[str, Any] = {"name": "a"}
    for path, value in changes:
        at: dict[Any, Any] = data
        for part in path[:-1]:
            at = at.setdefault(part, {}) if isinstance(at.setdefault(part, {}), dict) else {}
        at[path[-1]] = value
    for _ in range(12):  # a mended kind brings the fields of that kind, which may be wrong in their turn
        try:
            spec = validate_spec(data)
        except SpecError as error:
            faults = error.faults
        else:
            assert parse_spec(dump_spec(spec)) == spec
            return
        assert all(each.field and each.remedy and each.remedy in each.line() for each in faults)
        mend(data, faults[0])
    raise AssertionError(f"not mended: {data}")


@pytest.mark.parametrize("part", ["dense", "sparse"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize(("setting", "value"), [("momentum", 0.5), ("betas", [0.8, 0.99]), ("eps", 1e-3)])
def test_a_setting_that_a_kind_of_optimizer_ignores_is_refused_by_name(
    part: str, kind: str, setting: str, value: Any
) -> None:
    if (part, kind) == ("dense", "rowwise_adagrad"):
        return
    text = json.dumps({"name": "a", "optimizers": {part: {"kind": kind, setting: value}}})
    if kind in OPTIMIZER_SETTINGS[setting]:
        assert json.loads(getattr(parse_spec(text).optimizers, part).model_dump_json())[setting] == value
        return
    found = fault(text)
    assert found.field == f"optimizers.{part}.{setting}"
    assert found.problem == f"has no effect with kind: {kind}"
    assert found.given == json.dumps(value)
    assert OPTIMIZER_SETTINGS[setting][0] in found.allowed
    default = getattr(getattr(OptimizersSpec(), part), setting)
    assert parse_plain(found.remedy) == {setting: list(default) if isinstance(default, tuple) else default}


@given(st.text(max_size=80))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse_spec(text)


@given(st.text(max_size=80))
def test_a_suggested_name_is_valid(given_name: str) -> None:
    validate_spec({"name": suggest_name(given_name)})


@settings(deadline=None)
@given(
    batch=st.integers(1, 65536),
    length=st.integers(1, 8192),
    backend=st.sampled_from(["eager", "xla", "inductor"]),
    lr=st.floats(1e-9, 1e3),
    cache_dir=st.none()
    | st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=12)
    | st.sampled_from(["010", "0o17", "1e5", "on", "~", "null", "1:30", "0x1f", "<<", "=", "2026-01-02", ".5"]),
    rows=st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True), st.integers(1, 2**31 - 1), max_size=3
    ),
)
def test_a_spec_written_as_yaml_or_json_reads_back_equal(
    batch: int, length: int, backend: str, lr: float, cache_dir: str | None, rows: dict[str, int]
) -> None:
    spec = validate_spec(
        {
            "name": "a",
            "data": {"batch_size": batch, "uih_len": length, "rows": rows},
            "compile": {"backend": backend, "cache_dir": cache_dir},
            "optimizers": {"dense": {"lr": lr}},
        }
    )
    assert parse_spec(dump_spec(spec)) == spec
    assert validate_spec(yaml.safe_load(dump_spec(spec))) == spec, "for readers of YAML 1.1"
    assert parse_spec(spec.model_dump_json()) == spec


def test_a_short_accelerator_means_the_whole_one() -> None:
    assert parse_spec("name: a\naccelerator: cpu") == parse_spec("name: a\naccelerator: {kind: cpu, devices: 1}")
    tpu = parse_spec("name: a\naccelerator: {kind: tpu, generation: v5p, topology: 4x4x8}")
    assert tpu.accelerator.kind == "tpu"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", "0.001", "1.0e-3", "+.001", ".1e-2"])
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


@pytest.mark.parametrize(
    ("text", "value"),
    [("10", 10), ("010", 10), ("0x10", 16), ("0o10", 8), ("+10", 10), ("'010'", None), ("1_0", None), ("1:30", None)],
)
def test_whole_numbers_are_those_of_yaml_1_2(text: str, value: int | None) -> None:
    if value is None:
        assert fault(f"name: a\ndata: {{batch_size: {text}}}").field == "data.batch_size"
    else:
        assert parse_spec(f"name: a\ndata: {{batch_size: {text}}}").data.batch_size == value


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "N", "Yes", "1:30", "2026-01-02", "=", "0b1"])
def test_words_that_older_yaml_takes_for_something_else_are_text(word: str) -> None:
    assert parse_spec(f"name: a\ncompile: {{cache_dir: {word}}}").compile.cache_dir == word


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_true_is_true(word: str) -> None:
    assert parse_spec(f"name: a\ndebug: {{save_graph: {word}}}").debug.save_graph


@pytest.mark.parametrize(
    "tag", ["!!int 3", "!!bool maybe", "!!timestamp x", "!!set {a}", "!!binary aGk=", "! a", "!x a"]
)
def test_tags_are_refused_with_their_line(tag: str) -> None:
    with pytest.raises(SpecError, match=r"line 2: tags .* are not allowed"):
        parse_spec(f"name: a\ncompile: {tag}")


def test_a_model_and_a_dataset_must_fit_each_other() -> None:
    assert parse_spec("name: a\nmodel: {kind: dlrm}").data.dataset == "synthetic-clicks"
    assert parse_spec("name: a").data.dataset == "ml-100k"
    for text, remedy in (
        ("name: a\nmodel: {kind: dlrm}\ndata: {dataset: ml-100k}", "dataset: synthetic-clicks"),
        ("name: a\ndata: {dataset: synthetic-clicks}", "dataset: ml-100k"),
    ):
        with pytest.raises(SpecError) as caught:
            parse_spec(text)
        assert [(fault.field, fault.remedy) for fault in caught.value.faults] == [("data.dataset", remedy)]


def test_a_field_of_the_other_model_is_named_with_the_fields_of_the_one_that_was_asked_for() -> None:
    for text, allowed in (
        ("name: a\nmodel: {cross_rank: 4}", "num_heads"),
        ("name: a\nmodel: {kind: dlrm, num_heads: 4}", "cross_rank"),
    ):
        with pytest.raises(SpecError) as caught:
            parse_spec(text)
        (fault,) = caught.value.faults
        assert fault.field.startswith("model.")
        assert allowed in fault.allowed
