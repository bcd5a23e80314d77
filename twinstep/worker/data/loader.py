"""Samples into batches: seeded epochs for training, time order for evaluation, token budget, host-side packing.

Takes a Dataset, gives (Batch, BatchStats); `prefetch.py` runs it ahead of the step. Batch number s of training is a
function of (seed, s) alone, so a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from twinstep.spec.job import DataSpec
from twinstep.worker.data.batch import BATCH_DIMS, Batch, BatchStats
from twinstep.worker.data.budget import fit_budget
from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.events import Ints
from twinstep.worker.data.multi_hot import AnyBatch, MultiHotDataset
from twinstep.worker.data.order import HostShare, SampleOrder
from twinstep.worker.data.samples import Samples

# Shapes: B rows, U history slots, K candidate slots, T packed tokens, F item features, Q tasks.


def train_order(dataset: Dataset | MultiHotDataset, *, seed: int) -> SampleOrder:
    """Return the order in which a dataset's training samples come; rows without histories come at random."""
    if isinstance(dataset, MultiHotDataset):
        return SampleOrder(dataset.train, np.zeros_like(dataset.train), seed=seed)
    samples = dataset.train
    return SampleOrder(samples, samples.history_end - dataset.log.start[samples.user], seed=seed)


class _Room(NamedTuple):
    """What a row has room for."""

    budget: int
    """UIH tokens, on average over the batch."""
    candidates: int


class Loader:
    """Batches of one dataset: all of training are of one shape, all of evaluation of another.

    Args:
        seed: of the order of training samples.
        share: which part of every batch is this host's.
    """

    def __init__(
        self, dataset: Dataset | MultiHotDataset, spec: DataSpec, *, seed: int, share: HostShare | None = None
    ) -> None:
        self._dataset = dataset
        self._spec = spec
        self._share = share or HostShare()
        self._order = train_order(dataset, seed=seed)
        self._origin = 0

    @property
    def eval_size(self) -> int:
        """Batches of one pass over the held-out samples."""
        return -(-len(self._dataset.eval) // self._spec.batch_size)

    def position(self, batches: int) -> dict[str, Any]:
        """Return where training stands after the first `batches` batches, as plain JSON of a few numbers.

        It counts samples, not batches, and is the same on every host: a run may go on from it with another batch size
        or another number of hosts, and misses no sample and sees none twice.
        """
        return self._order.position(self._origin + batches * self._spec.batch_size)

    def seek(self, position: dict[str, Any]) -> None:
        """Make batch number 0 the one that begins at a position.

        Raises:
            DataError: it is no position, or one in other training data; nothing has changed then.
        """
        self._origin = self._order.taken(position)

    def train_batch(self, step: int) -> tuple[AnyBatch, BatchStats]:
        """Return training batch number `step`, counted from 0; always full, running on from epoch to epoch."""
        size = self._spec.batch_size
        return self._pack(self._dataset.train, self._order.at(self._origin + step * size, size))

    def train_batches(self, start: int = 0) -> Iterator[tuple[AnyBatch, BatchStats]]:
        """Yield training batches from number `start` on, without end."""
        while True:
            yield self.train_batch(start)
            start += 1

    def eval_batches(self) -> Iterator[tuple[AnyBatch, BatchStats]]:
        """Yield every held-out sample once, in order of time; the last batch is filled up with dummy rows.

        Histories are whole: neighbours in time are often of one user, so a budget that is right for batches dealt
        evenly would cut many, and a score would depend on who else was asked for at the time.
        """
        size = self._spec.batch_size
        for first in range(0, len(self._dataset.eval), size):
            yield self._pack(
                self._dataset.eval, np.arange(first, min(first + size, len(self._dataset.eval))), whole=True
            )

    def _pack(self, samples: Samples | Ints, chosen: Ints, *, whole: bool = False) -> tuple[AnyBatch, BatchStats]:
        """Pack this host's share of the global batch of the samples `chosen` (at most B of them)."""
        begun = time.perf_counter()
        packed: tuple[AnyBatch, BatchStats]
        if isinstance(samples, Samples):
            spec = self._spec
            room = _Room(spec.uih_budget or spec.uih_len, spec.num_candidates)
            if whole:
                room = _Room(spec.uih_len, spec.eval_slots)
            pack = self._own_rows if self._share.layout == "rows" else self._slice
            packed = pack(samples, chosen, room)
        else:
            packed = self._own_bags(samples[chosen])
        batch, stats = packed
        return batch, dataclasses.replace(stats, pack_s=time.perf_counter() - begun)

    def _own_bags(self, rows: Ints) -> tuple[AnyBatch, BatchStats]:
        """Pack this host's part of rows of dense and multi-hot features; both layouts are the same for them."""
        assert isinstance(self._dataset, MultiHotDataset)  # noqa: S101
        block = self._share.block(self._spec.batch_size)
        first = self._share.host * block
        return self._dataset.pack(rows[first : first + block], block)

    def _slice(self, samples: Samples, chosen: Ints, room: _Room) -> tuple[Batch, BatchStats]:
        """Pack the global batch and take this host's slice of it."""
        share, block = self._share, self._share.block(self._spec.batch_size)
        asked = samples.history_end[chosen] - samples.history_start[chosen]
        kept = fit_budget(asked, self._spec.batch_size * room.budget)
        whole, stats = self._block(samples, chosen, asked, kept, rows=block * share.hosts, room=room)
        return (whole, stats) if share.hosts == 1 else slice_of(whole, asked=asked, kept=kept, share=share)

    def _own_rows(self, samples: Samples, chosen: Ints, room: _Room) -> tuple[Batch, BatchStats]:
        """Pack this host's rows as a batch of their own, with the N of all hosts' rows."""
        share, block = self._share, self._share.block(self._spec.batch_size)
        asked = samples.history_end[chosen] - samples.history_start[chosen]
        kept = [
            fit_budget(asked[first : first + block], block * room.budget)
            for first in range(0, block * share.hosts, block)
        ]
        own = slice(share.host * block, (share.host + 1) * block)
        batch, stats = self._block(samples, chosen[own], asked[own], kept[share.host], rows=block, room=room)
        counts = samples.cand_end[chosen] - samples.cand_start[chosen]
        return batch._replace(n=self._n(np.concatenate(kept), counts)), stats

    def _n(self, lengths: Ints, counts: Ints) -> torch.Tensor:
        """Return N of rows with these histories and candidates, [] float32; empty rows may be among them."""
        most = int(lengths.max(initial=0)) + int(counts.max(initial=0))
        return torch.tensor(float(max(1, len(self._events().schema.contextual) + most)), dtype=torch.float32)

    def _events(self) -> Dataset:
        assert isinstance(self._dataset, Dataset)  # noqa: S101
        return self._dataset

    def _block(
        self, samples: Samples, chosen: Ints, asked: Ints, kept: Ints, *, rows: int, room: _Room
    ) -> tuple[Batch, BatchStats]:
        """Build a batch of the samples `chosen`, which keep `kept` of their `asked` events, and of dummies."""
        data, spec = self._events(), self._spec
        B, U, K, T = rows, spec.uih_len, room.candidates, rows * room.budget
        lengths, counts = _fill(kept, B), _fill(samples.cand_end[chosen] - samples.cand_start[chosen], B)
        starts, first_cand = _fill(samples.history_end[chosen] - kept, B), _fill(samples.cand_start[chosen], B)

        row, place = _ragged(lengths)
        slot = row * U + place
        token = slot if T == B * U else np.arange(len(row))
        history = data.log.event[starts[row] + place]
        token_slot = np.full(T, B * U, dtype=np.int64)
        token_slot[token] = slot
        slot_token = np.full(B * U, T, dtype=np.int64)
        slot_token[slot] = token

        row_of_cand, place_of_cand = _ragged(counts)
        cand = data.log.event[first_cand[row_of_cand] + place_of_cand]
        cand_slot = row_of_cand * K + place_of_cand

        events = data.events
        item_BKF = _scatter(events.item_features[events.item[cand]], cand_slot, B * K)
        item_TF = _scatter(events.item_features[events.item[history]], token, T)
        cand_time = _scatter(events.time[cand], cand_slot, B * K)
        times = _scatter(events.time[history], token, T)
        newest = np.where(lengths > 0, np.append(times, 0)[slot_token.reshape(B, U)[np.arange(B), lengths - 1]], 0)
        asked_at = cand_time.reshape(B, K)[:, 0]  # the first: a later one's time is not known yet
        labels = _scatter(data.labels[:, cand].T, cand_slot, B * K).T
        weights = _scatter(np.ones(len(cand), dtype=np.float32), cand_slot, B * K)
        batch = Batch(
            uih_ids=_tensor(item_TF.T),
            uih_times=_tensor(times),
            uih_actions=_tensor(_scatter(data.actions[history], token, T)),
            token_slot=_tensor(token_slot),
            slot_token=_tensor(slot_token.reshape(B, U)),
            uih_lengths=_tensor(lengths),
            contextual_ids=_tensor(_scatter(events.user_features[samples.user[chosen]], np.arange(len(chosen)), B)),
            cand_ids=_tensor(item_BKF.T.reshape(-1, B, K)),
            cand_times=_tensor(cand_time.reshape(B, K)),
            num_candidates=_tensor(counts),
            query_times=_tensor(np.where(counts > 0, asked_at, newest)),
            labels=_tensor(labels.reshape(-1, B, K)),
            weights=_tensor(np.broadcast_to(weights.reshape(1, B, K), (len(labels), B, K))),
            n=self._n(lengths, counts),
        )
        stats = BatchStats(
            rows=len(chosen),
            real_tokens=len(row),
            dummy_tokens=T - len(row),
            events_cut=int((asked - kept).sum()),
            examples=len(cand),
            padded_candidates=B * K - len(cand),
        )
        return batch, stats


def slice_of(whole: Batch, *, asked: Ints, kept: Ints, share: HostShare) -> tuple[Batch, BatchStats]:
    """Return a host's slice of every field of a global batch that has a batch dimension, and what is in it.

    Args:
        asked: [R] int64: events that the batch's R real rows had before the budget cut them.
        kept: [R] int64: events that they have.
    """
    fields: dict[str, torch.Tensor] = {}
    for name, dim in BATCH_DIMS.items():
        value: torch.Tensor = getattr(whole, name)
        size = value.shape[dim] // share.hosts
        fields[name] = value.narrow(dim, share.host * size, size).contiguous()
    own = whole._replace(**fields)
    B, U = whole.slot_token.shape
    block = B // share.hosts
    rows = slice(share.host * block, (share.host + 1) * block)
    real_tokens, examples = int((own.token_slot < B * U).sum()), int(own.num_candidates.sum())
    stats = BatchStats(
        rows=len(kept[rows]),
        real_tokens=real_tokens,
        dummy_tokens=own.token_slot.numel() - real_tokens,
        events_cut=int((asked[rows] - kept[rows]).sum()),
        examples=examples,
        padded_candidates=own.cand_times.numel() - examples,
    )
    return own, stats


def _fill(values: Ints, size: int) -> Ints:
    """Return `values` followed by zeros up to `size`."""
    return np.concatenate((values, np.zeros(size - len(values), dtype=np.int64)))


def _ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Return, for rows of these lengths laid end to end, each entry's row and its place in the row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _scatter(values: np.ndarray, index: Ints, size: int) -> np.ndarray:
    """Return zeros of `size` rows with `values` at the rows `index`."""
    out = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
    out[index] = values
    return out


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, order="C"))  # a copy: views and broadcasts are not writable
