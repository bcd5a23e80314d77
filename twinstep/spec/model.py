"""The models a job can train, and their sizes; `job.py` has one of them as its field `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import Number, Spec, with_kind
from twinstep.spec.module import ModuleSpec
from twinstep.spec.presets import PresetName, with_preset

Width = Annotated[StrictInt, Field(ge=1, le=16384)]
Length = Annotated[StrictInt, Field(ge=0, le=16384)]
Probability = Annotated[Number, Field(ge=0, lt=1)]
Widths = Annotated[tuple[Width, ...], Field(max_length=16)]


class DLRMv3Spec(Spec):
    """DLRMv3: an HSTU transducer over a user's history and the candidates, with multitask heads."""

    kind: Literal["dlrmv3"] = "dlrmv3"
    """The model."""
    preset: PresetName | None = None
    """Take the sizes of a public configuration where none are given here: `twinstep models` lists them."""
    embedding_dim: Width = 32
    """E: floats per row of every embedding table."""
    transducer_dim: Width = 64
    """D: floats per token inside the transducer."""
    num_layers: Annotated[StrictInt, Field(ge=1, le=64)] = 2
    """STU layers."""
    num_heads: Annotated[StrictInt, Field(ge=1, le=64)] = 2
    """H: attention heads per layer."""
    linear_dim: Width = 32
    """V: value width per head."""
    attention_dim: Width = 32
    """A: query and key width per head."""
    hidden_dim: Width = 64
    """Hidden width of the preprocessor's MLPs."""
    head_hidden_dim: Width | None = None
    """Hidden width of the item MLP and the heads; null means hidden_dim."""
    group_norm: StrictBool = False
    """Normalise each head's attention alone, not all heads together."""
    max_attn_len: Length = 0
    """Most tokens back that a token sees; 0: all of its history."""
    full_attn_len: Length = 0
    """So many of the newest events, and all candidates, see beyond max_attn_len; 0: none does."""
    relative_bias: Literal["none", "time", "position", "both"] = "none"
    """What is learnt of two tokens' distance and added to their score; attention then runs without its kernels."""
    postprocessor: Literal["timestamp", "layer_norm", "l2_norm"] = "timestamp"
    """How candidate tokens are normalised before the heads; `timestamp` adds hour and weekday of the
    candidate's own time, as the public model does."""
    dropout: Probability = 0.0
    """Probability of zeroing a value before a layer's output projection, in training."""
    input_dropout: Probability = 0.0
    """Probability of zeroing a value of the sequence that the layers are given, in training."""
    attention_dropout: Probability = 0.0
    """Probability of zeroing an attention weight, in training; attention then runs without its kernels."""
    min_uih_length: Annotated[StrictInt, Field(ge=0, le=8192)] = 0
    """Contextual features count in rows of that many events and candidates together; 0: in all."""
    loss_weight: Annotated[Number, Field(gt=0)] = 1.0
    """Factor on every task's loss."""
    action_init_std: Annotated[Number, Field(gt=0)] = 0.1
    """Standard deviation of the normal that action embeddings start from."""
    position_rows: Annotated[StrictInt, Field(ge=1, le=65536)] | None = None
    """Rows of the position table, later positions share the last; null: a power of two that holds uih_len."""
    time_rows: Annotated[StrictInt, Field(ge=2, le=32768)] = 2049
    """Rows of the time table, one per square root of a minute; older events share the last."""

    @field_validator("full_attn_len")
    @classmethod
    def _has_a_window(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("max_attn_len") == 0:
            raise PydanticCustomError(
                "between_fields",
                "has no effect with max_attn_len: 0",
                {"allowed": "0, or a model.max_attn_len above 0", "nearest": 0},
            )
        return value

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers."""
        return self.dropout > 0 or self.input_dropout > 0 or self.attention_dropout > 0


class DLRMSpec(Spec):
    """DLRM: dense and multi-hot features, crossed by dot products or by DCN-v2's low-rank layers."""

    kind: Literal["dlrm"]
    """The model."""
    embedding_dim: Width = 32
    """E: floats per row of every embedding table."""
    bottom_dims: Widths = (128, 64)
    """Hidden widths of the MLP over dense features; a last layer of width E follows."""
    over_dims: Widths = (128, 64)
    """Hidden widths of the over-arch, the MLP over the interaction; a last layer of one logit per task follows."""
    interaction: Literal["dot", "dcn"] = "dcn"
    """`dot`: dot products of all pairs of vectors; `dcn`: DCN-v2's low-rank cross layers."""
    num_cross_layers: Annotated[StrictInt, Field(ge=1, le=16)] = 3
    """Cross layers of `dcn`; `dot` ignores it."""
    cross_rank: Width = 64
    """R: rank of a cross layer's matrix; `dot` ignores it."""

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers."""
        return False


def _model(value: Any) -> Any:
    """Let a model of no kind be DLRMv3, and take what its preset says."""
    named = with_kind(value, default="dlrmv3")
    return with_preset(named) if isinstance(named, Mapping) and named.get("kind") == "dlrmv3" else named


Model = Annotated[Annotated[DLRMv3Spec | DLRMSpec | ModuleSpec, Field(discriminator="kind")], BeforeValidator(_model)]
