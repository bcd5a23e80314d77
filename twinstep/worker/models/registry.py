"""Models by kind: from a JobSpec and a dataset's schema to an initialised module. `train/` calls `build_model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from twinstep.spec.job import JobSpec
from twinstep.spec.model import DLRMSpec, DLRMv3Spec
from twinstep.spec.parse import validate_spec
from twinstep.spec.presets import PRESETS, PresetName
from twinstep.worker.data.events import DataSchema, FeatureSchema, TableSchema, TaskSchema
from twinstep.worker.data.multi_hot import AnySchema, MultiHotSchema
from twinstep.worker.models.config import (
    BagConfig,
    ContextualConfig,
    DLRMConfig,
    DLRMv3Config,
    ItemFeatureConfig,
    STUConfig,
    table_configs,
    task_configs,
)
from twinstep.worker.models.dlrm import DLRM, init_dlrm
from twinstep.worker.models.dlrmv3 import DLRMv3
from twinstep.worker.models.init import init_dlrmv3
from twinstep.worker.models.memory import check_memory
from twinstep.worker.models.module import build_module

MIN_POSITION_ROWS = 256


def build_model(spec: JobSpec, schema: AnySchema, *, processes: int = 1) -> nn.Module:
    """Return the model that `spec` asks for, filled from `spec.train.seed`; `model(batch)` gives a ModelOutput.

    The same spec and schema give the same bits; torch's own generator is left alone.

    Args:
        processes: that hold the tables on devices, each its own rows; of several, tables are declared, and not filled.

    Raises:
        TrainError: the tables cannot fit into this machine's memory.
        SpecError, TrainError: of a user's own module, see `build_module`.
    """
    return MODELS[spec.model.kind](spec, schema, processes)


def build_meta_model(spec: JobSpec, schema: AnySchema) -> nn.Module:
    """Return the model that `spec` asks for on the meta device: names, shapes and dtypes, no values."""
    with torch.device("meta"):
        return MODELS[spec.model.kind](spec, schema, 1)


def dlrmv3_config(spec: JobSpec, schema: DataSchema) -> DLRMv3Config:
    """Return the configuration of DLRMv3 that a spec and a schema describe."""
    model = spec.model
    assert isinstance(model, DLRMv3Spec)  # noqa: S101
    longest = len(schema.contextual) + spec.data.uih_len + 1
    return DLRMv3Config(
        tables=table_configs(schema, model.embedding_dim),
        contextual=tuple(
            ContextualConfig(name=f.name, table=f.table, min_uih_length=model.min_uih_length) for f in schema.contextual
        ),
        item_features=tuple(ItemFeatureConfig(name=f.name, table=f.table) for f in schema.item_features),
        tasks=task_configs(schema),
        action_masks=tuple(1 << bit for bit in range(schema.action_bits)),
        layer=STUConfig(
            dim=model.transducer_dim,
            num_heads=model.num_heads,
            linear_dim=model.linear_dim,
            attention_dim=model.attention_dim,
            dropout=model.dropout,
            group_norm=model.group_norm,
            max_attn_len=model.max_attn_len,
            full_attn_len=model.full_attn_len,
            relative_bias=model.relative_bias,
            attention_dropout=model.attention_dropout,
        ),
        num_layers=model.num_layers,
        hidden_dim=model.hidden_dim,
        head_hidden_dim=model.head_hidden_dim or model.hidden_dim,
        # Doubling, so that a longer history seldom changes the table's shape.
        position_rows=model.position_rows or max(MIN_POSITION_ROWS, 1 << (longest - 1).bit_length()),
        time_rows=model.time_rows,
        action_init_std=model.action_init_std,
        loss_weight=model.loss_weight,
        postprocessor=model.postprocessor,
        input_dropout=model.input_dropout,
    )


def preset_config(name: PresetName, *, rows: Mapping[str, int], **sizes: Any) -> DLRMv3Config:
    """Return the configuration of a row of `spec/presets.py`: for public weights, it is the public model's.

    Args:
        rows: rows of each table; a feature looks itself up in the table of its own name.
        sizes: fields of a spec's model that differ from the preset's.

    Raises:
        SpecError: a size is not valid.
        KeyError: a feature's table has no rows.
    """
    preset = PRESETS[name]
    spec = validate_spec({"name": name, "model": {"preset": name, **sizes}})
    schema = DataSchema(
        tables=tuple(TableSchema(name=f, rows=rows[f]) for f in (*preset.item_features, *preset.contextual)),
        contextual=tuple(FeatureSchema(name=f, table=f) for f in preset.contextual),
        item_features=tuple(FeatureSchema(name=f, table=f) for f in preset.item_features),
        tasks=tuple(TaskSchema(name=task, bits=bits) for task, bits in preset.tasks.items()),
        action_bits=preset.action_bits,
    )
    return dlrmv3_config(spec, schema)


def dlrm_config(spec: JobSpec, schema: MultiHotSchema) -> DLRMConfig:
    """Return the configuration of DLRM that a spec and a schema describe."""
    model = spec.model
    assert isinstance(model, DLRMSpec)  # noqa: S101
    return DLRMConfig(
        num_dense=len(schema.dense),
        tables=table_configs(schema, model.embedding_dim),
        features=tuple(BagConfig(name=f.name, table=f.table, max_ids=f.max_ids) for f in schema.features),
        tasks=task_configs(schema),
        bottom_dims=model.bottom_dims,
        over_dims=model.over_dims,
        interaction=model.interaction,
        num_cross_layers=model.num_cross_layers,
        cross_rank=model.cross_rank,
    )


def _build_dlrmv3(spec: JobSpec, schema: AnySchema, processes: int) -> nn.Module:
    assert isinstance(schema, DataSchema)  # noqa: S101  a spec's validation saw to it
    config = dlrmv3_config(spec, schema)
    if torch.get_default_device().type == "meta":
        return DLRMv3(config)
    check_memory(config.tables, processes)
    model = DLRMv3(config, declared=processes > 1)
    init_dlrmv3(model, table_std=spec.embedding.init_std, seed=spec.train.seed)
    return model


def _build_dlrm(spec: JobSpec, schema: AnySchema, processes: int) -> nn.Module:
    assert isinstance(schema, MultiHotSchema)  # noqa: S101  a spec's validation saw to it
    config = dlrm_config(spec, schema)
    if torch.get_default_device().type == "meta":
        return DLRM(config)
    check_memory(config.tables, processes)
    model = DLRM(config, declared=processes > 1)
    init_dlrm(model, seed=spec.train.seed)
    return model


def _build_module(spec: JobSpec, schema: AnySchema, processes: int) -> nn.Module:
    return build_module(spec, schema)


MODELS: dict[str, Callable[[JobSpec, AnySchema, int], nn.Module]] = {
    "dlrmv3": _build_dlrmv3,
    "dlrm": _build_dlrm,
    "module": _build_module,
}
