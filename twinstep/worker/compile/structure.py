"""How a batch's tensors stand in it, and a step's results in theirs. A leaf that is None is part of the structure.

Apart from `capture.py`, which a program from disk has no need of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.inputs import check_leaf

TrainStep = Callable[..., Any]


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


def batch_leaves(batch: Any) -> tuple[list[Tensor], list[str], Structure]:
    """Return a batch's tensors, the path of each, and its structure; leaves that are None are part of that.

    Raises:
        CompileError: a leaf is not a tensor.
    """
    _, structure = take_apart(batch)
    with_paths, _ = pytree.tree_flatten_with_path(batch)
    leaves, paths = [], []
    for path, leaf in with_paths:
        if leaf is None:
            continue
        name = pytree.keystr(path).lstrip(".") or "batch"
        if not isinstance(leaf, Tensor):
            raise CompileError(
                f"batch leaf {name} is {type(leaf).__name__}, not a tensor",
                remedy="give tensors, or None: a Python value would be built into the program",
            )
        check_leaf(name, leaf)
        leaves.append(leaf.detach().contiguous())  # programs are made for one layout of memory
        paths.append(name)
    return leaves, paths, structure


@dataclass(frozen=True, slots=True)
class OutputTree:
    """How the step's result is rebuilt from the graph's flat outputs."""

    spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    """Leaves that are no tensors (None, a name), by position; the same at every step."""

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the user's structure with `tensors` in place of its tensor leaves."""
        constants = dict(self.constants)
        flowing = iter(tensors)
        count = len(tensors) + len(constants)
        leaves = [constants[index] if index in constants else next(flowing) for index in range(count)]
        return pytree.tree_unflatten(leaves, self.spec)
