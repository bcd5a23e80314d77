"""Live tables of a PyTorch model and what its optimizer keeps of their rows, by table and part: where a run's values
are read, saved and brought back, whatever engine trains them. No jax here.

Optimizers of `torch.optim` and ours of `sparsecore.optimizers` keep the same numbers under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinstep.spec.errors import SpecError
from twinstep.spec.optimizers import SparseOptimizerSpec
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.embedding.sparsecore.logical import WEIGHT, Chunk, Rows
from twinstep.worker.embedding.sparsecore.optimizers import (
    SGD,
    Adagrad,
    Adam,
    RowOptimizer,
    RowWiseAdagrad,
    Schedule,
)

SLOTS: dict[str, dict[str, str]] = {
    "sgd": {},
    "adagrad": {"accumulator": "sum"},
    "rowwise_adagrad": {"accumulator": "sum"},
    "adam": {"momentum": "exp_avg", "velocity": "exp_avg_sq"},
}
"""By kind: slots, and the entry of `torch.optim` that holds the same."""


def row_optimizer(spec: SparseOptimizerSpec, *, steps: int, final: float) -> RowOptimizer:
    """Return the optimizer of rows that a spec's sparse optimizer is; only rows that a batch names are touched.

    Args:
        spec: kind and constants.
        steps: of the run, over which the rate falls along half a cosine.
        final: to this share of itself.

    Raises:
        SpecError: no rule computes it.
    """
    decay: dict[str, Any] = {} if final == 1 else {"decay": "cosine", "decay_steps": steps, "final": final}
    common: dict[str, Any] = {"learning_rate": Schedule(rate=spec.lr, **decay), "weight_decay": spec.weight_decay}
    match spec.kind:
        case "sgd" if not spec.momentum:
            return SGD(**common)
        case "adagrad":
            return Adagrad(**common, initial_accumulator=0.0, eps=spec.eps)
        case "rowwise_adagrad":
            return RowWiseAdagrad(**common, eps=spec.eps)
        case "adam":
            return Adam(**common, beta1=spec.betas[0], beta2=spec.betas[1], eps=spec.eps)
    raise SpecError(
        f"optimizers.sparse is {spec.kind} with momentum {spec.momentum:g}, which no SparseCore computes",
        remedy=f"optimizers.sparse.kind: {', '.join(SLOTS)}, without momentum",
    )


class LiveTables:
    """Tables and slots of a live model, read and written by logical rows."""

    def __init__(self, collection: EmbeddingCollection, optimizer: Optimizer, kind: str) -> None:
        """`optimizer` has its state already; `kind` is a key of SLOTS."""
        self._parameters = collection.weights
        self._optimizer, self._slots = optimizer, SLOTS[kind]
        self._seen: list[tuple[Tensor, int]] = []

    def part(self, table: str, part: str) -> Tensor:
        """Return a table's weight or slot, [rows, dim] or [rows, 1], not copied."""
        parameter = self._parameters[table]
        if part == WEIGHT:
            return parameter.detach()
        held: Tensor = self._optimizer.state[parameter][self._slots[part]]
        return held.detach()

    def read(self, table: str, part: str, start: int, stop: int) -> Rows:
        """Return logical rows."""
        rows: Rows = self.part(table, part)[start:stop].numpy()
        return rows

    def write(self, chunk: Chunk) -> None:
        """Write logical rows."""
        values = torch.from_numpy(chunk.values)
        with torch.no_grad():
            self.part(chunk.table, chunk.part)[chunk.start : chunk.start + len(values)] = values

    def count(self, updates: int) -> None:
        """Say how many updates the slots hold, where the optimizer counts."""
        for parameter in self._parameters.values():
            counter = self._optimizer.state.get(parameter, {}).get("step")
            if counter is not None:
                counter.fill_(updates)

    def note(self) -> None:
        """Remember the live tensors as they stand."""
        self._seen = [(each, each._version) for each in self._all()]

    def written(self) -> bool:
        """Say whether someone wrote to one, or put another in its place, since `note`."""
        now = self._all()
        return len(now) != len(self._seen) or any(
            tensor is not seen or tensor._version != version
            for tensor, (seen, version) in zip(now, self._seen, strict=True)
        )

    def _all(self) -> list[Tensor]:
        found: list[Tensor] = []
        for parameter in self._parameters.values():
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            found += [parameter, *(state[entry] for entry in self._slots.values() if entry in state)]
        return found
