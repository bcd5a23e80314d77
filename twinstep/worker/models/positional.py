"""Position and time of each token, as two learned tables added to the scaled token.

Buckets are computed in integers, so that every backend finds the same one.

# Shapes: M packed tokens, D token width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SECONDS_PER_UNIT = 60  # the time table counts square roots of minutes


class HSTUPositionalEncoder(nn.Module):
    """x · sqrt(D) + position[i] + time[j]."""

    def __init__(self, dim: int, *, position_rows: int, time_rows: int) -> None:
        super().__init__()
        self._position_embeddings_weight = nn.Parameter(torch.empty(position_rows, dim))
        self._timestamp_embeddings_weight = nn.Parameter(torch.empty(time_rows, dim))
        self._scale = dim**0.5

    def forward(self, x_MD: Tensor, positions_M: Tensor, ages_M: Tensor) -> Tensor:
        """Encode the tokens.

        Args:
            positions_M: int64, at least 0; those beyond the table share its last row.
            ages_M: int64 seconds from the token to its row's query time; below 0 counts as 0.
        """
        position = positions_M.clamp(0, self._position_embeddings_weight.shape[0] - 1)
        bucket = time_bucket(ages_M, self._timestamp_embeddings_weight.shape[0])
        encoded: Tensor = (
            x_MD * self._scale
            + self._position_embeddings_weight.index_select(0, position)
            + self._timestamp_embeddings_weight.index_select(0, bucket)
        )
        return encoded


def positions(columns: Tensor, high: Tensor, num_contextual: int) -> Tensor:
    """Return the index into the position table: contextual columns as they are, then 1 + C for the newest event.

    Args:
        columns: [B, S] int64, packed columns.
        high: [B, 1] int64, column of the row's first candidate; candidates all get C.
    """
    back = high - torch.minimum(columns, high) + num_contextual
    return torch.where(columns < num_contextual, columns, back)


def time_bucket(ages: Tensor, rows: int) -> Tensor:
    """Return floor(sqrt(age in minutes)), 0..rows-1, exactly: the float root is off by one at most, and is corrected.

    A float formula, sqrt(seconds/60) truncated, falls on either side of a bucket's edge depending on the backend.
    """
    minutes = torch.div(ages.clamp(min=0), SECONDS_PER_UNIT, rounding_mode="floor").clamp(max=(rows - 1) ** 2)
    root = minutes.to(torch.float32).sqrt().to(ages.dtype)
    root = torch.where(root * root > minutes, root - 1, root)
    root = torch.where((root + 1) * (root + 1) <= minutes, root + 1, root)
    return root.clamp(0, rows - 1)
