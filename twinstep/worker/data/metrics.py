"""Held-out scores of one binary task, accumulated over batches and processes: AUC, normalised entropy, calibration.

What is undefined is None, never a number that looks like a score: AUC of one class is not 0.5.

All scores are functions of how much weight positives and negatives have at each logit. That histogram, sorted, is what
is kept and what processes exchange: exact, however the examples were divided, and small where logits repeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

EDGE = 1e-7  # predictions are kept this far from 0 and 1; float32 logits of real models stay inside
COMPACT_AT = 1_000_000  # examples that are collected before they are sorted into the histogram

F64 = NDArray[np.float64]


class Histogram(NamedTuple):
    """Weight of positives and negatives by logit; NaN is a logit too."""

    logits: F64
    """[M], ascending, each once."""
    positives: F64
    """[M]: weight of the examples with label 1."""
    negatives: F64
    """[M]: weight of the examples with label 0."""
    examples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BinaryScores:
    """Scores over all examples with weight > 0."""

    auc: float | None
    """Area under the ROC curve; None unless both classes were seen."""
    ne: float | None
    """Normalised entropy: log loss / entropy of the examples' own base rate; None unless both classes were seen."""
    calibration: float | None
    """Sum of predictions / sum of labels; None without a positive."""
    log_loss: float | None
    """Mean negative log likelihood in nats; None without examples."""
    examples: int
    base_rate: float | None
    """Weighted share of positives; None without examples."""
    finite: bool = True
    """Whether no logit was NaN."""

    @property
    def undefined(self) -> str | None:
        """Say why there is no AUC, or None where there is one."""
        if self.auc is not None:
            return None
        if not self.examples:
            return "no examples"
        if not self.finite:
            return "a logit is NaN"
        return f"all labels are {round(self.base_rate or 0)}"


class BinaryMetrics:
    """Collects (logit, label, weight), here and in other processes, and scores them together."""

    def __init__(self) -> None:
        self._parts: list[tuple[F64, F64, F64]] = []
        self._collected = 0
        self._kept = _histogram(np.zeros(0), np.zeros(0), np.zeros(0), 0)

    def update(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> None:
        """Add examples: three arrays of one shape; labels 0 or 1; those of weight 0 are left out."""
        logit, label, weight = (np.asarray(part, dtype=np.float64).reshape(-1) for part in (logits, labels, weights))
        keep = weight > 0
        self._parts.append((logit[keep], (label * weight)[keep], ((1 - label) * weight)[keep]))
        self._collected += int(keep.sum())
        if self._collected >= COMPACT_AT:
            self.collected()

    def collected(self) -> Histogram:
        """Return what was collected, for another process to merge."""
        if self._parts:
            kept = self._kept
            columns = zip((kept.logits, kept.positives, kept.negatives), *self._parts, strict=True)
            logit, positive, negative = (np.concatenate(column) for column in columns)
            self._kept = _histogram(logit, positive, negative, kept.examples + self._collected)
            self._parts, self._collected = [], 0
        return self._kept

    def merge(self, others: Iterable[Histogram]) -> None:
        """Add what other processes collected."""
        for other in others:
            self._parts.append((other.logits, other.positives, other.negatives))
            self._collected += other.examples
        self.collected()

    def compute(self) -> BinaryScores:
        """Score what was collected. A logit that is NaN makes every score None but the counts."""
        return score_histogram(self.collected())


def _histogram(logit: F64, positive: F64, negative: F64, examples: int) -> Histogram:
    logits, place = np.unique(logit, return_inverse=True)
    up, down = (
        np.bincount(place, weights=each, minlength=len(logits)).astype(np.float64) for each in (positive, negative)
    )
    return Histogram(logits, up, down, examples)


def score(logit: F64, label: F64, weight: F64) -> BinaryScores:
    """Score examples: three [N] float64 arrays, weights above 0."""
    metrics = BinaryMetrics()
    metrics.update(logit, label, weight)
    return metrics.compute()


def score_histogram(found: Histogram) -> BinaryScores:
    """Score the examples of a histogram."""
    if not found.examples:
        return BinaryScores(auc=None, ne=None, calibration=None, log_loss=None, examples=0, base_rate=None)
    positive, total = float(found.positives.sum()), float((found.positives + found.negatives).sum())
    rate = positive / total
    if np.isnan(found.logits).any():
        return BinaryScores(
            auc=None, ne=None, calibration=None, log_loss=None, examples=found.examples, base_rate=rate, finite=False
        )
    logits = np.nan_to_num(found.logits)  # an infinite one stays the first or the last
    prediction = np.clip(0.5 * (1 + np.tanh(0.5 * logits)), EDGE, 1 - EDGE)
    from sklearn.metrics import log_loss, roc_auc_score  # over a second, which no run's first step has to wait for

    label = np.repeat((1, 0), len(found.logits))
    weight = np.concatenate((found.positives, found.negatives))
    loss = float(log_loss(label, np.tile(prediction, 2), sample_weight=weight, labels=[0, 1]))
    both = 0 < rate < 1
    return BinaryScores(
        auc=float(roc_auc_score(label, np.tile(logits, 2), sample_weight=weight)) if both else None,
        ne=loss / float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))) if both else None,
        calibration=float((prediction * (found.positives + found.negatives)).sum() / positive) if rate > 0 else None,
        log_loss=loss,
        examples=found.examples,
        base_rate=rate,
    )
