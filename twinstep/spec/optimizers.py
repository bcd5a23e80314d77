"""The two optimizers of a step, as a job spec asks for them; `job.py` has them as its field `optimizers`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import Number, Spec

OPTIMIZER_SETTINGS = {
    "momentum": ("sgd",),
    "betas": ("adam", "adamw"),
    "eps": ("adam", "adamw", "adagrad", "rowwise_adagrad"),
}
"""Which kinds of optimizer look at a setting; others refuse it, for a setting without effect is a mistake."""


class OptimizerSpec(Spec):
    """What every optimizer has."""

    kind: str
    """The optimizer."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Weight decay, as torch.optim defines it for the kind."""
    momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """SGD's momentum; other kinds refuse another value than the default."""
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's and AdamW's decay rates; other kinds refuse other values than the default."""
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    """Added to denominators; sgd has none, and refuses another value than the default."""

    @field_validator(*OPTIMIZER_SETTINGS)
    @classmethod
    def _has_an_effect(cls, value: Any, info: ValidationInfo) -> Any:
        kind, name = info.data.get("kind"), info.field_name or ""
        default, kinds = cls.__pydantic_fields__[name].default, OPTIMIZER_SETTINGS[name]
        if kind is not None and kind not in kinds and value != default:
            raise PydanticCustomError(
                "between_fields",
                "has no effect with kind: {kind}",
                {"kind": kind, "allowed": f"the default, or kind: {' or '.join(kinds)}", "nearest": default},
            )
        return value


class DenseOptimizerSpec(OptimizerSpec):
    """The optimizer of every parameter outside the embedding tables."""

    kind: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    """The `torch.optim` optimizer."""
    lr: Annotated[Number, Field(gt=0)] = 5e-4
    """Learning rate."""


class SparseOptimizerSpec(OptimizerSpec):
    """The optimizer of the embedding tables."""

    kind: Literal["sgd", "adam", "adamw", "adagrad", "rowwise_adagrad"] = "rowwise_adagrad"
    """A `torch.optim` optimizer, or rowwise_adagrad, which keeps one sum of squares per row."""
    lr: Annotated[Number, Field(gt=0)] = 0.01
    """Learning rate."""


class OptimizersSpec(Spec):
    """The two optimizers of a step."""

    dense: DenseOptimizerSpec = DenseOptimizerSpec()
    """For every parameter outside the embedding tables."""
    sparse: SparseOptimizerSpec = SparseOptimizerSpec()
    """For the embedding tables."""
