"""Live tables of a PyTorch model and what its optimizer keeps of their rows, by table and part: where a run's values
are read, saved and brought back, whatever engine trains them. No jax here.

Optimizers of `torch.optim` and ours of `sparsecore.optimizers` keep the same numbers under other names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinstep.spec.errors import SpecError
from twinstep.spec.optimizers import SparseOptimizerSpec
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.embedding.declared import declared
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


def own_part(rows: int, process: int, processes: int) -> tuple[int, int]:
    """Return the rows of a declared tensor that one of a run's processes saves: first, and the one after the last."""
    return rows * process // processes, rows * (process + 1) // processes


class LiveTables:
    """Tables and slots of a live model, read and written by logical rows."""

    def __init__(
        self,
        collection: EmbeddingCollection,
        optimizer: Optimizer,
        kind: str,
        *,
        share: tuple[int, int] = (0, 1),
        unread: Collection[str] = (),
    ) -> None:
        """Make it.

        Args:
            optimizer: of the tables; has its state already.
            kind: a key of SLOTS.
            share: which process this is, of how many.
            unread: tables that no feature asks for, and no device has.
        """
        self._parameters = collection.weights
        self._on_devices = [parameter for name, parameter in self._parameters.items() if name not in unread]
        self._optimizer, self._slots, self._share = optimizer, SLOTS[kind], share
        read = {(name, part) for name in self._parameters if name not in unread for part in (WEIGHT, *self._slots)}
        self._declared = {each: known for each in sorted(read) if (known := declared(self.held(*each))) is not None}
        self._unread = [
            known for name in unread for part in (WEIGHT, *self._slots) if (known := declared(self.held(name, part)))
        ]
        self.started = False
        """Whether steps have run, so that devices alone know rows of declared tables."""
        self._seen: list[tuple[Tensor, int]] = []

    def part(self, table: str, part: str) -> Tensor:
        """Return a table's weight or slot, [rows, dim] or [rows, 1], not copied."""
        return self.held(table, part).detach()

    def held(self, table: str, part: str) -> Tensor:
        """Return a table's weight or slot: the very tensor."""
        parameter = self._parameters[table]
        held: Tensor = parameter if part == WEIGHT else self._optimizer.state[parameter][self._slots[part]]
        return held

    def read(self, table: str, part: str, start: int, stop: int, step: int) -> Rows:
        """Return every step-th logical row, as it is before the next step."""
        tensor = self.held(table, part)
        known = declared(tensor)
        found = tensor.detach()[start:stop:step] if known is None else known.rows(start, stop, step)
        rows: Rows = found.numpy()
        return rows

    def devices_alone_know(self) -> None:
        """Forget where first rows of declared tensors came from: steps have run."""
        if not self.started:
            self.started = True
            for known in self._declared.values():
                known.source = None

    def fill(self) -> None:
        """Give declared tables all their rows, where no step has run, or will."""
        for known in (*self._declared.values(), *self._unread):
            known.fill()

    def own(self) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
        """Return by table and part, of those that are declared, who is to save which rows: first, last + 1, process."""
        _, count = self._share
        found = {}
        for each in self._declared:
            cuts = [(*own_part(len(self.held(*each)), process, count), process) for process in range(count)]
            found[each] = [cut for cut in cuts if cut[0] < cut[1]]
        return found

    def write(self, chunk: Chunk) -> None:
        """Write logical rows."""
        values = torch.from_numpy(chunk.values)
        if (known := self._declared.get((chunk.table, chunk.part))) is not None:
            known.is_whole()  # once all chunks are here
        with torch.no_grad():
            self.part(chunk.table, chunk.part)[chunk.start : chunk.start + len(values)] = values

    def write_own(self, chunk: Chunk) -> None:
        """Write those logical rows that this process is to save where it saves them from; others where `write` does."""
        known = self._declared.get((chunk.table, chunk.part))
        if known is None:
            self.write(chunk)
            return
        start, stop = own_part(len(self.held(chunk.table, chunk.part)), *self._share)
        first, last = max(start, chunk.start), min(stop, chunk.start + len(chunk.values))
        if first < last:
            mine = chunk.values[first - chunk.start : last - chunk.start]
            known.room(start, stop)[first - start : last - start] = torch.from_numpy(mine)

    def count(self, updates: int) -> None:
        """Say how many updates the slots hold, where the optimizer counts."""
        for parameter in self._parameters.values():
            counter = self._optimizer.state.get(parameter, {}).get("step")
            if counter is not None:
                counter.fill_(updates)

    def note(self) -> None:
        """Remember the live tensors that devices have too as they stand."""
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
        for parameter in self._on_devices:
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            found += [parameter, *(state[entry] for entry in self._slots.values() if entry in state)]
        return found
