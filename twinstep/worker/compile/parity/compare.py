"""Compare two tensors, and the one table of how far apart they may be. Pure: no clock, no backend, no model.

An element's error |got − want| is held against what it may be: `absolute + relative × scale`, where the scale is the
largest |want| of the tensor (for losses, each element's own; for gradients and state, the largest in the run so far,
since a moment or a lone bias passes through zero), plus what `noise.py` allows it. A tensor's `ratio` is
its worst error over what was allowed there: above 1 it is over its tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["loss", "output", "gradient", "parameter", "buffer", "optimizer"]
KINDS: tuple[Kind, ...] = ("loss", "output", "gradient", "parameter", "buffer", "optimizer")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an element may be from eager's."""

    relative: float
    """Share of the scale."""
    absolute: float
    """Beside it, in the tensor's own units: what a tensor of zeros may differ by."""


Tolerances = Mapping[Kind, Tolerance]


def _row(loss: float, other: float, absolute: float) -> dict[Kind, Tolerance]:
    kinds: dict[Kind, Tolerance] = {kind: Tolerance(other, absolute) for kind in KINDS}
    kinds["loss"] = Tolerance(loss, absolute)
    kinds["gradient"] = Tolerance(10 * other, absolute)  # of a trajectory that is off by `other` already
    return kinds


TOLERANCES: Mapping[tuple[str, torch.dtype], Tolerances] = {
    ("inductor", torch.float64): _row(1e-12, 1e-10, 1e-15),
    ("inductor", torch.float32): _row(1e-5, 1e-4, 1e-7),
    ("inductor", torch.float16): _row(1e-2, 2e-2, 1e-4),
    ("inductor", torch.bfloat16): _row(3e-2, 6e-2, 1e-3),
    ("xla", torch.float32): _row(1e-5, 1e-4, 1e-7),
    ("xla", torch.float16): _row(1e-2, 2e-2, 1e-4),
    ("xla", torch.bfloat16): _row(3e-2, 6e-2, 1e-3),
    ("eager", torch.float64): _row(0.0, 0.0, 0.0),
    ("eager", torch.float32): _row(0.0, 0.0, 0.0),
    ("eager", torch.float16): _row(0.0, 0.0, 0.0),
    ("eager", torch.bfloat16): _row(0.0, 0.0, 0.0),
}
"""By backend and dtype, for up to 20 steps. float32: losses within 1e-5, parameters within 1e-4; a narrow dtype keeps
8 (bfloat16) or 11 (float16) bits of a number, and sums in another order differ by several of its last ones."""

EXACT = Tolerance(0.0, 0.0)
"""For integers and booleans."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor is from eager's."""

    max_abs: float
    """Largest |got − want|; infinite where one is NaN or infinite and the other is not the same."""
    max_rel: float
    """`max_abs` over the scale; for losses the largest element-wise."""
    ratio: float
    """Worst error over what was allowed there; above 1 is over."""
    weighed: int
    """Elements whose tolerance was widened beyond twice the ordinary for noise in their gradient (see `noise.py`)."""
    at: tuple[int, ...]
    """Index of the worst element."""
    note: str = ""
    """What is wrong beside numbers: another shape, NaN on one side."""

    @property
    def over(self) -> bool:
        """Whether the tensor is over its tolerance."""
        return not self.ratio <= 1.0


def difference(
    got: Tensor,
    want: Tensor,
    tolerance: Tolerance,
    *,
    elementwise: bool = False,
    at_least: float = 0.0,
    allowance: Tensor | None = None,
) -> Difference:
    """Return how far `got` is from `want`.

    Args:
        elementwise: take each element's own |want| for its scale, not the tensor's largest.
        at_least: the least scale: the largest |want| of steps before.
        allowance: what each element may be off beside the tolerance, of want's shape.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        said = f"{list(got.shape)} {got.dtype} for {list(want.shape)} {want.dtype}"
        return Difference(math.inf, math.inf, math.inf, 0, (), said.replace("torch.", ""))
    if want.numel() == 0:
        return Difference(0.0, 0.0, 0.0, 0, ())
    wanted, found = want.detach().double(), got.detach().double()
    error = _error(found, wanted)
    finite = torch.where(torch.isfinite(wanted), wanted, 0.0).abs()
    scale = finite if elementwise else finite.max().clamp(min=at_least).expand_as(finite)
    ordinary = tolerance.absolute + tolerance.relative * scale
    allowed = ordinary if allowance is None else ordinary + allowance.double()
    ratios = torch.where(error == 0, 0.0, error / allowed)  # 0 / 0: equal; x / 0: over by any measure
    worst = int(ratios.argmax())
    relative = torch.where(error == 0, 0.0, error / scale)
    note = "NaN or infinite on one side only" if torch.isinf(error).any() else ""
    return Difference(
        max_abs=float(error.max()),
        max_rel=float(relative.max()),
        ratio=float(ratios.reshape(-1)[worst]),
        weighed=0 if allowance is None else int((allowance > ordinary).sum()),
        at=tuple(int(each) for each in torch.unravel_index(torch.tensor(worst), want.shape)),
        note=note,
    )


def _error(got: Tensor, want: Tensor) -> Tensor:
    """Return |got − want|: 0 where both are NaN or the same infinity, infinite where only one is."""
    same = (got == want) | (got.isnan() & want.isnan())
    apart = ~same & ~(got.isfinite() & want.isfinite())
    error = torch.where(same, 0.0, (got - want).abs())
    return torch.where(apart, math.inf, error)
