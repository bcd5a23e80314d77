"""Sizes and features of one DLRMv3 or DLRM, frozen; what a spec and a schema become before a module is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twinstep.worker.data.multi_hot import AnySchema


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One embedding table."""

    name: str
    rows: int
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextualConfig:
    """One contextual slot."""

    name: str
    table: str
    min_uih_length: int = 0
    """The feature is zeroed in rows with fewer history events and candidates together; 0: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFeatureConfig:
    """One id of an event or candidate."""

    name: str
    table: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """One task; binary ones stand before regressions."""

    name: str
    kind: Literal["binary", "regression"] = "binary"


@dataclass(frozen=True, kw_only=True, slots=True)
class STUConfig:
    """One STU layer."""

    dim: int
    """D: floats per token."""
    num_heads: int
    """H."""
    linear_dim: int
    """V: value width per head."""
    attention_dim: int
    """A: query and key width per head."""
    dropout: float = 0.0
    """Probability of zeroing a value before the output projection, in training."""
    group_norm: bool = False
    """Normalise each head alone, with one scale and shift per head."""
    alpha: float | None = None
    """Factor on q·k; None: A^(-1/2)."""
    max_attn_len: int = 0
    """Highest distance in rank that a token sees; 0: any."""
    full_attn_len: int = 0
    """Tokens of the last that many ranks before the candidates', and candidates, see beyond it; 0: none does."""
    relative_bias: Literal["none", "time", "position", "both"] = "none"
    """What of two tokens' distance is added to their score; the public DlrmHSTU has none."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight, in training."""

    @property
    def plain(self) -> str:
        """Why attention cannot be its fused operator; empty where it can."""
        reasons = ("a relative bias",) * (self.relative_bias != "none") + ("dropout",) * (self.attention_dropout > 0)
        return " and ".join(reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMv3Config:
    """One DLRMv3."""

    tables: tuple[TableConfig, ...]
    contextual: tuple[ContextualConfig, ...]
    item_features: tuple[ItemFeatureConfig, ...]
    """The first is the item itself (upstream's post id); the others are its `additional` features."""
    tasks: tuple[TaskConfig, ...]
    action_masks: tuple[int, ...]
    """One row of the action table per mask; an event has it if its action word shares a bit with the mask."""
    layer: STUConfig
    num_layers: int
    hidden_dim: int
    """Hidden width of the preprocessor's MLPs."""
    head_hidden_dim: int = 512
    """Hidden width of the item MLP and the heads."""
    action_dim: int = 8
    """Floats per action bit."""
    action_init_std: float = 0.1
    """Standard deviation of the normal that action embeddings start from."""
    position_rows: int = 8192
    """Rows of the position table; later positions share the last one."""
    time_rows: int = 2049
    """Rows of the time-bucket table."""
    loss_weight: float = 0.2
    """Factor on every task's loss."""
    postprocessor: Literal["timestamp", "layer_norm", "l2_norm"] = "timestamp"
    """How candidate tokens are normalised; `timestamp` adds hour and weekday."""
    input_dropout: float = 0.0
    """Probability of zeroing a value of the encoded sequence, in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BagConfig:
    """One multi-hot feature: a bag of ids, summed."""

    name: str
    table: str
    max_ids: int = 1
    """Id slots of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMConfig:
    """One DLRM."""

    num_dense: int
    """N: dense features of a row."""
    tables: tuple[TableConfig, ...]
    """All of one width."""
    features: tuple[BagConfig, ...]
    """Multi-hot features, in the order of the batch."""
    tasks: tuple[TaskConfig, ...]
    bottom_dims: tuple[int, ...] = (512, 256)
    """Hidden widths of the MLP over dense features; its last layer has the tables' width."""
    over_dims: tuple[int, ...] = (512, 256)
    """Hidden widths of the over-arch, the MLP over the interaction; its last layer gives one logit per task."""
    interaction: Literal["dot", "dcn"] = "dot"
    """`dot`: dot products of all pairs of vectors; `dcn`: DCN-v2's low-rank cross layers."""
    num_cross_layers: int = 3
    """Cross layers; `dot` has none."""
    cross_rank: int = 512
    """R: rank of a cross layer's matrix."""


def table_configs(schema: AnySchema, dim: int) -> tuple[TableConfig, ...]:
    """Return the tables of a schema, each of `dim` floats a row."""
    return tuple(TableConfig(name=table.name, rows=table.rows, dim=dim) for table in schema.tables)


def task_configs(schema: AnySchema) -> tuple[TaskConfig, ...]:
    """Return the tasks of a schema, in its order."""
    return tuple(TaskConfig(name=task.name, kind=task.kind) for task in schema.tasks)
