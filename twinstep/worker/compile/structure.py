"""How a batch's tensors stand in it. A leaf that is None (a feature that is not there) is part of the structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree


@dataclass(frozen=True, slots=True)
class Structure:
    """Containers of a batch, and the places of its leaves that are None."""

    spec: pytree.TreeSpec
    absent: tuple[int, ...]
    """Positions among all leaves."""

    def __str__(self) -> str:
        return f"{self.spec}, None at {self.absent}" if self.absent else str(self.spec)

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """Return the batch that has these leaves beside None."""
        rest = iter(leaves)
        every = [None if place in self.absent else next(rest) for place in range(self.spec.num_leaves)]
        return pytree.tree_unflatten(every, self.spec)


def take_apart(batch: Any) -> tuple[list[Any], Structure]:
    """Return a batch's leaves, those that are None left out, and its structure."""
    leaves, spec = pytree.tree_flatten(batch)
    absent = tuple(place for place, leaf in enumerate(leaves) if leaf is None)
    return [leaf for leaf in leaves if leaf is not None], Structure(spec, absent)
