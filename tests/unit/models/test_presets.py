"""Configurations by dataset: the public ones name by name, taken by a spec, and overridden by it."""

from __future__ import annotations

import json
from typing import get_args

import numpy as np
import pytest

from twinstep.cli.app import run
from twinstep.spec.errors import SpecError
from twinstep.spec.job import DatasetName
from twinstep.spec.model import DLRMv3Spec
from twinstep.spec.parse import dump_spec, parse_spec
from twinstep.spec.presets import PRESETS, PresetName
from twinstep.worker.models.config import DLRMv3Config
from twinstep.worker.models.dlrmv3 import DLRMv3
from twinstep.worker.models.registry import build_meta_model, preset_config


def test_kuairand_is_the_public_configuration_down_to_every_parameter(
    kuairand: dict[str, np.ndarray], kuairand_config: DLRMv3Config
) -> None:
    public = json.loads(str(kuairand["config_json"]))
    preset = PRESETS["kuairand-1k"]
    assert list(preset.contextual) == list(public["contextual_feature_to_max_length"])
    assert [1 << bit for bit in range(preset.action_bits)] == public["action_weights"]
    assert dict(preset.tasks) == {task["task_name"]: task["task_weight"] for task in public["multitask_configs"]}
    config = preset_config(
        "kuairand-1k",
        rows={table.name: table.rows for table in kuairand_config.tables},
        embedding_dim=public["hstu_embedding_table_dim"],
        transducer_dim=public["hstu_transducer_embedding_dim"],
        num_layers=public["hstu_attn_num_layers"],
        num_heads=public["hstu_num_heads"],
        linear_dim=public["hstu_attn_linear_dim"],
        attention_dim=public["hstu_attn_qk_dim"],
        hidden_dim=public["hstu_preprocessor_hidden_dim"],
        dropout=public["hstu_linear_dropout_rate"],
        input_dropout=public["hstu_input_dropout_ratio"],
    )
    theirs = {k.removeprefix("params/"): v.shape for k, v in kuairand.items() if k.startswith("params/")}
    assert {name: tuple(p.shape) for name, p in DLRMv3(config).named_parameters()} == theirs
    assert config == kuairand_config


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_valid_spec_and_its_values_are_the_models(name: PresetName) -> None:
    preset = PRESETS[name]
    spec = parse_spec(f"name: a\nmodel: {{preset: {name}}}")
    assert isinstance(spec.model, DLRMv3Spec)
    for field, value in preset.sizes.items():
        assert getattr(spec.model, field) == value, field
    assert parse_spec(dump_spec(spec)) == spec
    rows = dict.fromkeys((*preset.item_features, *preset.contextual), 7)
    config = preset_config(name, rows=rows)
    assert tuple(f.name for f in config.contextual) == preset.contextual
    assert tuple(f.name for f in config.item_features) == preset.item_features
    assert {f.min_uih_length for f in config.contextual} == {preset.sizes.get("min_uih_length", 0)}
    assert preset.dataset in get_args(DatasetName)


def test_what_a_spec_gives_wins_over_its_preset() -> None:
    spec = parse_spec("name: a\nmodel: {preset: streaming, num_layers: 1, transducer_dim: 16}")
    assert isinstance(spec.model, DLRMv3Spec)
    assert (spec.model.num_layers, spec.model.transducer_dim, spec.model.num_heads) == (1, 16, 4)
    assert spec.model.action_init_std == 5.0


def test_a_preset_that_is_not_one_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec("name: a\nmodel: {preset: movielens1m}")
    (fault,) = caught.value.faults
    assert fault.field == "model.preset"
    assert fault.remedy == "preset: movielens-1m"


def test_full_attention_without_a_window_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec("name: a\nmodel: {full_attn_len: 4}")
    assert [(fault.field, fault.remedy) for fault in caught.value.faults] == [
        ("model.full_attn_len", "full_attn_len: 0")
    ]


def test_the_public_size_is_made_without_values() -> None:
    from twinstep.worker.data.synthetic import make_synthetic

    _, schema = make_synthetic(200)
    spec = parse_spec("name: a\nmodel: {preset: movielens-20m}\ndata: {dataset: synthetic}")
    model = build_meta_model(spec, schema)
    layer = model.get_parameter("_hstu_transducer._stu_module._stu_layers.4._uvqk_weight")
    assert tuple(layer.shape) == (512, 2 * 4 * (128 + 128))


def test_the_command_lists_models_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in PRESETS)
    assert run(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["models"]) == ["dlrm", "dlrmv3", "module"]
    assert [row["preset"] for row in found["presets"]] == list(PRESETS)
    assert found["presets"][2]["tasks"]["watch_time"] is None
