"""Tables divided over the processes of a run by TorchRec: lookups, updates, and whole tables in and out.

A step's lookups go three ways: ids to the process that has their rows (`start`, which can run ahead of the step), rows
back (`look_up`), and the rows' gradients to where the rows are (`Rows.update`), where FBGEMM's kernel updates each row
as it sums its gradient. TorchRec divides gradients by the number of processes, so that what comes in as each process's
gradient of its own loss updates by that of the mean.

# Shapes: F features, n ids of a feature that are valid, N ids of it in all, B rows of a batch, E width of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from twinstep.spec.optimizers import SparseOptimizerSpec
from twinstep.worker.embedding.collection import Lookup
from twinstep.worker.embedding.hybrid.plan import TablePlan
from twinstep.worker.embedding.hybrid.sharded import (
    Sharded,
    divided_tensors,
    keyed,
    set_learning_rate,
    set_steps,
    shard,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableUse:
    """A divided table and who looks it up."""

    plan: TablePlan
    lookups: tuple[int, ...]
    """Which of the model's lookups ask for it, by their number among all."""


@dataclass(frozen=True, slots=True)
class Ids:
    """A batch's ids on the host, ready to be sent: made beside the step, by whoever reads ahead."""

    values: Tensor
    """Ids feature after feature, those alone that are valid, int64."""
    lengths: Tensor
    """[F] ids of each feature; or [F * B] ids of each bag, int64."""
    places: tuple[Tensor, ...]
    """Where each feature's ids stand among its N, [n] int64 each; none for bags."""
    shapes: tuple[torch.Size, ...]
    """Of each feature's ids in the batch."""


Back = Callable[[Sequence[Tensor]], list[Tensor]]
Whole = Mapping[str, Mapping[str, Tensor]]
"""Whole tables by name: `weight`, and what the optimizer keeps of it by the names of `torch.optim`."""


class Sent:
    """Ids on their way; each call takes them one exchange further, `arrived` to the end."""

    def __init__(self, splits: Any, context: Any, ids: Ids) -> None:
        self._splits, self._values, self._arrived = splits, None, None
        self.context, self.ids = context, ids

    def go_on(self) -> None:
        """Wait for how many ids come from where, and send the ids themselves without waiting for them."""
        if self._splits is not None:
            self._values, self._splits = self._splits.wait(), None

    def arrived(self) -> Any:
        """Wait for the ids that others ask this process for."""
        self.go_on()
        if self._arrived is None:
            assert self._values is not None  # noqa: S101
            self._arrived = self._values.wait()
        return self._arrived


class Rows:
    """What a batch's lookups gave, and where their gradients go."""

    def __init__(self, given: Sequence[Tensor], found: Sequence[Tensor], back: Back) -> None:
        self.given = tuple(given)
        """As the model takes them, in the order of its lookups: no part of any graph."""
        self._found, self._back = found, back

    def update(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradient of each of `given` to the rows, and update them."""
        torch.autograd.backward(list(self._found), self._back(gradients))


class DividedTables:
    """The divided tables of one model.

    Args:
        uses: every divided table that is looked up.
        pooled: whether these are bags.
        optimizer: fused into the backward pass.
        group: the processes; its collectives start in one order on all of them, so no other thread may use it.
        on_host: how many of them share a host, and its GPUs; None: all.
    """

    def __init__(
        self,
        uses: Sequence[TableUse],
        *,
        pooled: bool,
        optimizer: SparseOptimizerSpec,
        device: torch.device,
        group: distributed.ProcessGroup,
        on_host: int | None = None,
    ) -> None:
        self.lookups = tuple(sorted(number for use in uses for number in use.lookups))
        """Numbers of the model's lookups that are answered here."""
        dims = {number: use.plan.table.dim for use in uses for number in use.lookups}
        self._dims = [dims[number] for number in self.lookups]
        self._names = [f"lookup{number}" for number in self.lookups]
        self._pooled, self._device, self._group = pooled, device, group
        self._kind = optimizer.kind
        names = {use.plan: [f"lookup{number}" for number in use.lookups] for use in uses}
        self._sharded: Sharded = shard(
            names, pooled=pooled, optimizer=optimizer, device=device, group=group, on_host=on_host or group.size()
        )

    def ids_of(self, lookups: Sequence[Lookup]) -> Ids:
        """Gather what is to be sent of all of a model's lookups; on the host, in any thread."""
        values, lengths, places, shapes = [], [], [], []
        for lookup in (lookups[number] for number in self.lookups):
            shapes.append(lookup.ids.shape)
            values.append(lookup.ids[lookup.valid])
            if self._pooled:
                lengths.append(lookup.valid.sum(1))
            else:
                places.append(lookup.valid.reshape(-1).nonzero().squeeze(1))
                lengths.append(torch.tensor([len(places[-1])]))
        return Ids(torch.cat(values), torch.cat(lengths), tuple(places), tuple(shapes))

    def nothing(self, ids: Ids) -> tuple[Tensor, ...]:
        """Return zeros of the shapes that a batch's rows have."""
        shapes = [shape[:1] if self._pooled else shape for shape in ids.shapes]
        return tuple(
            torch.zeros(*shape, dim, device=self._device) for shape, dim in zip(shapes, self._dims, strict=True)
        )

    def start(self, ids: Ids) -> Sent:
        """Begin to send ids to the processes that have their rows."""
        context = self._sharded.create_context()
        features = keyed(self._names, ids.values.to(self._device), ids.lengths.to(self._device))
        return Sent(self._sharded.input_dist(context, features), context, ids)

    def look_up(self, sent: Sent) -> LookingUp:
        """Look up what others ask for here, and begin to send it to them."""
        return LookingUp(self, self._sharded.compute_and_output_dist(sent.context, sent.arrived()), sent.ids)

    def bags(self, found: Any) -> Rows:
        """Return the bags of a batch, [B, E] each."""
        values, keys, widths = found.values(), list(found.keys()), found.length_per_key()
        parts = dict(zip(keys, values.detach().split(widths, dim=1), strict=True))
        order = [self._names.index(key) for key in keys]

        def back(gradients: Sequence[Tensor]) -> list[Tensor]:
            return [torch.cat([gradients[number] for number in order], dim=1)]

        return Rows([parts[name].contiguous() for name in self._names], [values], back)

    def rows(self, found: Any, ids: Ids) -> Rows:
        """Return the rows of a batch's ids, [..., E] each, zeros where not valid."""
        given, values, places = [], [], []
        for name, place, shape, dim in zip(self._names, ids.places, ids.shapes, self._dims, strict=True):
            values.append(found[name].values())
            places.append(place.to(self._device))
            whole = values[-1].new_zeros(shape.numel(), dim)
            given.append(whole.index_copy_(0, places[-1], values[-1].detach()).view(*shape, dim))

        def back(gradients: Sequence[Tensor]) -> list[Tensor]:
            flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
            return [each.index_select(0, place) for each, place in zip(flat, places, strict=True)]

        return Rows(given, values, back)

    def set_learning_rate(self, rate: float) -> None:
        """Update by this learning rate from now on."""
        set_learning_rate(self._sharded, rate)

    @torch.no_grad()
    def push(self, whole: Whole) -> None:
        """Take this process's part of whole tables, which are the same on all of them."""
        for divided in divided_tensors(self._sharded, self._kind):
            for piece in divided.pieces:
                if piece.here is not None:
                    piece.here.copy_(divided.window(whole[divided.table][divided.name], piece))
        if self._kind == "adam":
            set_steps(self._sharded, max(int(tensors["step"]) for tensors in whole.values()))

    @torch.no_grad()
    def pull(self, whole: Whole) -> None:
        """Fill whole tables on every process with what all have; a collective."""
        for divided in divided_tensors(self._sharded, self._kind):
            for piece in divided.pieces:
                divided.window(whole[divided.table][divided.name], piece).copy_(piece.everywhere(self._group))

    @torch.no_grad()
    def pull_own(self, whole: Whole) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
        """Fill this process's rows of whole tables, and all of what is divided by columns; a collective.

        Returns:
            By table and tensor, of those divided by rows: first row, the one after the last, and who has them.
        """
        held = {}
        for divided in divided_tensors(self._sharded, self._kind):
            tensor = whole[divided.table][divided.name]
            by_rows = all(len(each.sizes) == 1 or each.sizes[1] == tensor.shape[1] for each in divided.pieces)
            for piece in divided.pieces:
                if not by_rows:
                    divided.window(tensor, piece).copy_(piece.everywhere(self._group))
                elif piece.here is not None:
                    divided.window(tensor, piece).copy_(piece.here)
            if by_rows:
                rows = [(each.offsets[0], each.offsets[0] + each.sizes[0], each.owner) for each in divided.pieces]
                held[divided.table, divided.name] = sorted(rows)
        return held


class LookingUp:
    """Rows on their way back."""

    def __init__(self, tables: DividedTables, found: Any, ids: Ids) -> None:
        self._tables, self._found, self._ids = tables, found, ids

    def arrived(self) -> Rows:
        """Wait for them."""
        found = self._found.wait()
        return self._tables.bags(found) if self._tables._pooled else self._tables.rows(found, self._ids)
