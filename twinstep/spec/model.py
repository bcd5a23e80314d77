"""The models a job can train, and their sizes; `job.py` has one of them as its field `model`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictInt

from twinstep.spec.base import Number, Spec, with_kind

Width = Annotated[StrictInt, Field(ge=1, le=16384)]
Widths = Annotated[tuple[Width, ...], Field(max_length=16)]


class DLRMv3Spec(Spec):
    """DLRMv3: an HSTU transducer over a user's history and the candidates, with multitask heads."""

    kind: Literal["dlrmv3"] = "dlrmv3"
    """The model."""
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
    """Hidden width of the preprocessor's and the item MLPs."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing a value before a layer's output projection, in training."""


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


def _model(value: Any) -> Any:
    """Let a model of no kind be DLRMv3."""
    return with_kind(value, default="dlrmv3")


Model = Annotated[Annotated[DLRMv3Spec | DLRMSpec, Field(discriminator="kind")], BeforeValidator(_model)]
