"""A set of embedding tables, looked up by masked gather.

Models ask by table name; several features on one table are looked up in one call, so that one gradient is made per
table. Ids are trusted: `data/` checked their range on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EmbeddingTable(nn.Module):
    """One table; `weight` is [rows, dim] float32."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, [..., dim]."""
        return F.embedding(ids, self.weight)


class EmbeddingCollection(nn.Module):
    """Tables by name; parameters are `embeddings.{table}.weight`."""

    def __init__(self, tables: Mapping[str, tuple[int, int]]) -> None:
        """Make a table of (rows, dim) per name, uninitialised."""
        super().__init__()
        self.embeddings = nn.ModuleDict({name: EmbeddingTable(rows, dim) for name, (rows, dim) in tables.items()})

    def forward(self, table: str, ids: Tensor, valid: Tensor) -> Tensor:
        """Look `ids` up in `table`.

        Args:
            ids: [...] int64, in range wherever `valid`.
            valid: [...] bool.

        Returns:
            [..., dim]; zeros where not valid, so that such an id adds exactly zero to its row's gradient.
        """
        rows: Tensor = self.embeddings[table](torch.where(valid, ids, 0))
        return torch.where(valid.unsqueeze(-1), rows, 0.0)
