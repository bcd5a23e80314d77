"""How long a dataset's histories are, and which token budget suits them: numbers for `twinstep data`. Pure.

`lengths_page.py` draws what is found here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from twinstep.spec.job import DataSpec
from twinstep.worker.data.budget import BudgetUse, budget_use, recommend_budget
from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.events import Ints
from twinstep.worker.data.loader import train_order

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
BINS = 16  # bars of a histogram, at most
MOST_SAMPLES = 2_000_000  # as many are batched to see what a budget does; more would change the third digit


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStudy:
    """Lengths of the training samples' histories, and what budgets do to batches of them."""

    name: str
    """Of the dataset."""
    events: int
    users: int
    train_samples: int
    held_out_events: int
    positives: float
    """Share of the training candidates whose first label is 1."""
    batch_size: int
    uih_len: int
    mean: float
    """Events per history, at most `uih_len`."""
    quantiles: dict[str, int]
    """By share, as "0.5": events per history, at most `uih_len`."""
    empty: float
    """Share of the samples without any history."""
    whole: float
    """Share of the samples with `uih_len` events or more: older ones are not looked at."""
    histogram: tuple[tuple[int, int, int], ...]
    """(least length, most length, samples) of each bar."""
    padded_slots: float
    """Share of all slots that padding every history to `uih_len` wastes."""
    padded_candidates: float
    """Share of candidate slots without a candidate."""
    target_loss: float
    """Share of the events that may be lost."""
    recommended: BudgetUse
    current: BudgetUse
    """The budget that the spec has."""

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


def study_lengths(dataset: Dataset, spec: DataSpec, *, seed: int, target_loss: float) -> LengthStudy:
    """Look at the training samples' histories, dealt into batches as the loader deals them.

    Args:
        seed: of the order of the samples.
        target_loss: share of the events that the recommended budget may lose, from 0 to 1.
    """
    samples = dataset.train
    lengths = samples.history_end - samples.history_start
    batches = max(1, min(len(samples), MOST_SAMPLES) // spec.batch_size)
    order = train_order(dataset, seed=seed).at(0, batches * spec.batch_size)
    totals = lengths[order].reshape(batches, spec.batch_size).sum(axis=1)
    candidates = samples.cand_end - samples.cand_start
    trained = ~dataset.held_out
    found = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return LengthStudy(
        name=dataset.name,
        events=len(dataset.events),
        users=len(dataset.events.user_features),
        train_samples=len(samples),
        held_out_events=int(dataset.held_out.sum()),
        positives=float(dataset.labels[0, trained].mean()),
        batch_size=spec.batch_size,
        uih_len=spec.uih_len,
        mean=float(lengths.mean()),
        quantiles={f"{share:g}": int(value) for share, value in zip(QUANTILES, found, strict=True)},
        empty=float((lengths == 0).mean()),
        whole=float((lengths == spec.uih_len).mean()),
        histogram=_histogram(lengths, spec.uih_len),
        padded_slots=1 - float(lengths.sum()) / (len(samples) * spec.uih_len),
        padded_candidates=1 - float(candidates.sum()) / (len(samples) * spec.num_candidates),
        target_loss=target_loss,
        recommended=recommend_budget(totals, batch_size=spec.batch_size, most=spec.uih_len, target_loss=target_loss),
        current=budget_use(totals, batch_size=spec.batch_size, budget=spec.uih_budget or spec.uih_len),
    )


def _histogram(lengths: Ints, most: int) -> tuple[tuple[int, int, int], ...]:
    """Return bars of equal width over 0..most, the last one ending there."""
    width = -(-(most + 1) // BINS)
    counts = np.bincount(lengths // width)
    bars = -(-(most + 1) // width)
    counts = np.concatenate((counts, np.zeros(bars - len(counts), dtype=np.int64)))
    return tuple((i * width, min((i + 1) * width - 1, most), int(n)) for i, n in enumerate(counts))
