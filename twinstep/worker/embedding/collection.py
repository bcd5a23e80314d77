"""A set of embedding tables, looked up by masked gather.

Models ask by table name; several features on one table are looked up in one call, so that one gradient is made per
table. Ids are trusted: `data/` checked their range on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinstep.spec.table_names import module_name, table_name


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows that one feature of a batch asks a table for."""

    table: str
    ids: Tensor
    """[samples] int64, or [samples, slots]: a bag, whose rows are summed."""
    valid: Tensor
    """As `ids`, bool: whether there is an id."""


class EmbeddingTable(nn.Module):
    """One table; `weight` is [rows, dim] float32."""

    def __init__(self, rows: int, dim: int, *, declared: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, device="meta" if declared else None))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, [..., dim]."""
        return F.embedding(ids, self.weight)


class EmbeddingCollection(nn.Module):
    """Tables by name; parameters are `embeddings.{table}.weight`, see `spec/table_names.py`."""

    def __init__(self, tables: Mapping[str, tuple[int, int]], *, declared: bool = False) -> None:
        """Make a table of (rows, dim) per name, uninitialised; on `meta` where they are to be declared."""
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {module_name(name): EmbeddingTable(rows, dim, declared=declared) for name, (rows, dim) in tables.items()}
        )

    def forward(self, table: str, ids: Tensor, valid: Tensor) -> Tensor:
        """Look `ids` up in `table`.

        Args:
            ids: [...] int64, in range wherever `valid`.
            valid: [...] bool.

        Returns:
            [..., dim]; zeros where not valid, so that such an id adds exactly zero to its row's gradient.
        """
        rows: Tensor = self.embeddings[module_name(table)](torch.where(valid, ids, 0))
        return torch.where(valid.unsqueeze(-1), rows, 0.0)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The tables by name, [rows, dim] each."""
        return {
            table_name(name): table.weight
            for name, table in self.embeddings.items()
            if isinstance(table, EmbeddingTable)
        }

    def bags(self, lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the sums of bags of one table, [samples, dim] each; all of them are one lookup."""
        rows_BSE = self(
            lookups[0].table,
            torch.cat([each.ids for each in lookups], dim=1),
            torch.cat([each.valid for each in lookups], dim=1),
        )
        return [part.sum(dim=1) for part in torch.split(rows_BSE, [each.ids.shape[1] for each in lookups], dim=1)]


def tables_of(model: nn.Module) -> EmbeddingCollection:
    """Return a model's tables."""
    return next(each for each in model.modules() if isinstance(each, EmbeddingCollection))


class GivenCollection(nn.Module):
    """Stands where a collection stood, for a step whose rows were looked up before it: holds no table, takes no id.

    Lookups are answered in the order in which the model asks, which is the order of its `lookups`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: list[Tensor] = []

    def give(self, activations: Sequence[Tensor]) -> None:
        """Set what the lookups of one step will be answered with, [samples, dim] each."""
        self._left = list(activations)

    def forward(self, table: str, ids: Tensor, valid: Tensor) -> Tensor:
        """Answer a lookup of single rows."""
        rows = self._left.pop(0)
        return rows.reshape(*ids.shape, rows.shape[1])

    def bags(self, lookups: Sequence[Lookup]) -> list[Tensor]:
        """Answer lookups of bags."""
        return [self._left.pop(0) for _ in lookups]


def without_tables(model: nn.Module) -> tuple[nn.Module, GivenCollection]:
    """Return a model over the same parameters but the tables', and the collection that answers for them.

    The live model keeps its tables. Modules above the collection are shallow copies; all others are the very ones.
    """
    given = GivenCollection()
    return in_place_of_tables(model, given), given


def in_place_of_tables(model: nn.Module, given: GivenCollection) -> nn.Module:
    """Return a model over the same modules, but with `given` where its collection stands."""

    def outer(module: nn.Module) -> nn.Module:
        if isinstance(module, EmbeddingCollection):
            return given
        children = {name: outer(child) for name, child in module.named_children()}
        if all(module._modules[name] is child for name, child in children.items()):
            return module
        view = copy.copy(module)
        view.__dict__["_modules"] = {**module._modules, **children}
        return view

    return outer(model)
