"""A model whose divided tables are elsewhere: their lookups are answered with rows that came from there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from torch import Tensor, nn

from twinstep.spec.table_names import module_name, table_name
from twinstep.worker.embedding.collection import (
    EmbeddingCollection,
    GivenCollection,
    Lookup,
    in_place_of_tables,
    tables_of,
)


class PartlyGivenCollection(GivenCollection):
    """Has some tables itself, and answers lookups of all others with what it is given, in the model's order."""

    def __init__(self, kept: EmbeddingCollection) -> None:
        super().__init__()
        self.embeddings = kept.embeddings
        self._kept = [kept]  # in a list, so that it is no module of this one

    def forward(self, table: str, ids: Tensor, valid: Tensor) -> Tensor:
        """Answer a lookup of single rows."""
        if module_name(table) in self.embeddings:
            rows: Tensor = self._kept[0](table, ids, valid)
            return rows
        return super().forward(table, ids, valid)

    def bags(self, lookups: Sequence[Lookup]) -> list[Tensor]:
        """Answer lookups of bags of one table."""
        kept = module_name(lookups[0].table) in self.embeddings
        return self._kept[0].bags(lookups) if kept else super().bags(lookups)


def without(model: nn.Module, divided: Collection[str]) -> nn.Module:
    """Return a model over the same parameters but those of divided tables; the live model keeps them."""
    collection = tables_of(model)
    kept = EmbeddingCollection({})
    for name, table in collection.embeddings.items():
        if table_name(name) not in divided:
            kept.embeddings[name] = table
    return in_place_of_tables(model, PartlyGivenCollection(kept))


def lookups_of(model: nn.Module, batch: Any) -> list[Lookup]:
    """Return what a model asks of its tables for a batch, in the order in which it takes the rows."""
    found: list[Lookup] = cast(Any, model).lookups(batch)
    return found


def given_collection(model: nn.Module) -> GivenCollection:
    """Return what takes the rows of a model made by `without`."""
    return next(module for module in model.modules() if isinstance(module, GivenCollection))
