"""What the transducer hands to the heads: candidate tokens, normalised, with hour and weekday of their times or not.

# Shapes: R candidate rows, D token width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from twinstep.worker.models.layers import Linear

PERIODS = ((3600, 24), (86400, 7))  # (seconds per unit, units per period): hour of day, day of week
MIN_NORM = 1e-6
TURN = 2 * 3.14  # the public model says 3.14, not pi; weights trained with it expect it


class TimestampLayerNormPostprocessor(nn.Module):
    """LayerNorm(Linear(concat[x, cos and sin of hour and weekday]))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._layer_norm = nn.LayerNorm(dim)
        self._time_feature_combiner = Linear(dim + 2 * len(PERIODS), dim)

    def forward(self, x_RD: Tensor, times_R: Tensor) -> Tensor:
        """[R, D] and [R] int64 seconds → [R, D]."""
        combined = torch.cat((x_RD, time_features(times_R).to(x_RD.dtype)), dim=1)
        out: Tensor = self._layer_norm(self._time_feature_combiner(combined))
        return out


class LayerNormPostprocessor(nn.Module):
    """LayerNorm(x); the time is not looked at."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._layer_norm = nn.LayerNorm(dim)

    def forward(self, x_RD: Tensor, times_R: Tensor) -> Tensor:
        """[R, D] and [R] int64 seconds → [R, D]."""
        out: Tensor = self._layer_norm(x_RD)
        return out


class L2NormPostprocessor(nn.Module):
    """x / max(|x|, 1e-6); the time is not looked at."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x_RD: Tensor, times_R: Tensor) -> Tensor:
        """[R, D] and [R] int64 seconds → [R, D]."""
        norm_R1: Tensor = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True)
        return x_RD / norm_R1.clamp(min=MIN_NORM)


def time_features(times_R: Tensor) -> Tensor:
    """Return cos and sin of the hour, then of the weekday, [R, 4] float32.

    Whole seconds are bucketed in integers: in float32 a bucket's edge falls differently on each backend.
    """
    features = []
    for seconds, units in PERIODS:
        unit = torch.remainder(torch.div(times_R, seconds, rounding_mode="floor"), units)
        angle = unit.to(torch.float32) / units * TURN
        features += [torch.cos(angle), torch.sin(angle)]
    return torch.stack(features, dim=1)


POSTPROCESSORS: dict[str, Callable[[int], nn.Module]] = {
    "timestamp": TimestampLayerNormPostprocessor,
    "layer_norm": LayerNormPostprocessor,
    "l2_norm": L2NormPostprocessor,
}
"""By name in a configuration; called with D."""
