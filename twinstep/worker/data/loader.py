"""Samples into batches: seeded epochs for training, time order for evaluation, token budget, host-side packing.

Takes a Dataset, gives (Batch, BatchStats); `prefetch.py` runs it ahead of the step. Batch number s of training is a
function of (seed, s) alone, so a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from twinstep.spec.job import DataSpec
from twinstep.worker.data.batch import Batch, BatchStats
from twinstep.worker.data.budget import fit_budget
from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.events import Ints
from twinstep.worker.data.samples import Samples

# Shapes: B rows, U history slots, K candidate slots, T packed tokens, F item features, Q tasks.


class Loader:
    """Batches of one dataset, all of one shape."""

    def __init__(self, dataset: Dataset, spec: DataSpec, *, seed: int) -> None:
        self._dataset = dataset
        self._spec = spec
        self._seed = seed
        self._epochs: dict[int, Ints] = {}

    @property
    def eval_size(self) -> int:
        """Batches of one pass over the held-out samples."""
        return -(-len(self._dataset.eval) // self._spec.batch_size)

    def train_batch(self, step: int) -> tuple[Batch, BatchStats]:
        """Return training batch number `step`, counted from 0; always full, running on from epoch to epoch."""
        size, count = self._spec.batch_size, len(self._dataset.train)
        positions = np.arange(step * size, (step + 1) * size)
        rows = [
            self._order(int(epoch))[positions[positions // count == epoch] % count]
            for epoch in np.unique(positions // count)
        ]
        return self._pack(self._dataset.train, np.concatenate(rows))

    def train_batches(self, start: int = 0) -> Iterator[tuple[Batch, BatchStats]]:
        """Yield training batches from number `start` on, without end."""
        while True:
            yield self.train_batch(start)
            start += 1

    def eval_batches(self) -> Iterator[tuple[Batch, BatchStats]]:
        """Yield every held-out sample once, in order of time; the last batch is filled up with dummy rows."""
        size = self._spec.batch_size
        for first in range(0, len(self._dataset.eval), size):
            yield self._pack(self._dataset.eval, np.arange(first, min(first + size, len(self._dataset.eval))))

    def _order(self, epoch: int) -> Ints:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a batch may span two epochs, rarely more
                del self._epochs[min(self._epochs)]
            rng = np.random.default_rng([self._seed, epoch])
            self._epochs[epoch] = rng.permutation(len(self._dataset.train))
        return self._epochs[epoch]

    def _pack(self, samples: Samples, chosen: Ints) -> tuple[Batch, BatchStats]:
        """Build the batch of the samples `chosen` (at most B of them)."""
        data, spec = self._dataset, self._spec
        B, U, K, T = spec.batch_size, spec.uih_len, spec.num_candidates, spec.uih_tokens
        asked = samples.history_end[chosen] - samples.history_start[chosen]
        kept = fit_budget(asked, T)
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
        n = max(1, len(data.schema.contextual) + int(lengths.max()) + int(counts.max()))
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
            n=torch.tensor(float(n), dtype=torch.float32),
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
