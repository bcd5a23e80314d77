"""What an attention layer learns of two tokens' distance, in time and in rank, added to their scores.

After "Actions Speak Louder than Words", arXiv 2402.17152, section 3.1 (rab), with two departures: a distance in time is
bucketed as the positional encoder buckets ages, in integers, where the public research code takes a float logarithm
that falls differently on each backend; and it runs from the key to the query itself, not to the event after it.

# Shapes: B rows, S slots of a row, M packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinstep.worker.models.layout import Layout
from twinstep.worker.models.positional import time_bucket


@dataclass(frozen=True, slots=True)
class Distances:
    """Between all pairs of one batch's slots, the same for all layers."""

    seconds_BSS: Tensor
    """int64: from the key (last) to the query; 0 where the key is newer."""
    ranks_BSS: Tensor
    """int64: the same in tokens; candidates are all one rank after the newest event."""

    @staticmethod
    def of(layout: Layout, times_M: Tensor) -> Distances:
        """Measure a batch; `times_M` is each token's time, int64 seconds: a candidate's the query's, contextual 0."""
        times_BS = layout.unpack(times_M.unsqueeze(1)).squeeze(2)
        high_B1 = (layout.uih_lengths_B + layout.num_contextual).unsqueeze(1)
        ranks_BS = torch.minimum(layout.columns(), high_B1)
        return Distances(*((x.unsqueeze(2) - x.unsqueeze(1)).clamp(min=0) for x in (times_BS, ranks_BS)))


class RelativeBias(nn.Module):
    """time[sqrt of minutes between] + position[tokens between], one number per pair for all heads."""

    def __init__(self, *, time_rows: int | None, position_rows: int | None) -> None:
        """Make a table per distance that is looked at; None leaves one out. Further pairs share the last row."""
        super().__init__()
        self._time_bias_weight = None if time_rows is None else nn.Parameter(torch.zeros(time_rows))
        self._position_bias_weight = None if position_rows is None else nn.Parameter(torch.zeros(position_rows))

    def forward(self, distances: Distances) -> Tensor:
        """Return what is added to scores, [B, S, S] (query, key)."""
        parts = []
        if self._time_bias_weight is not None:
            bucket = time_bucket(distances.seconds_BSS, self._time_bias_weight.shape[0])
            parts.append(_look_up(self._time_bias_weight, bucket))
        if self._position_bias_weight is not None:
            rank = distances.ranks_BSS.clamp(max=self._position_bias_weight.shape[0] - 1)
            parts.append(_look_up(self._position_bias_weight, rank))
        return sum(parts[1:], start=parts[0])


def _look_up(weight: Tensor, index_BSS: Tensor) -> Tensor:
    return weight.index_select(0, index_BSS.flatten()).reshape(index_BSS.shape)
