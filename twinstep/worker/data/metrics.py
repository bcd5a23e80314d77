"""Held-out scores of one binary task, accumulated over batches: AUC, normalised entropy, calibration.

What is undefined is None, never a number that looks like a score: AUC of one class is not 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import log_loss, roc_auc_score

EDGE = 1e-7  # predictions are kept this far from 0 and 1; float32 logits of real models stay inside


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


class BinaryMetrics:
    """Collects (logit, label, weight) and scores them together."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]] = []

    def update(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> None:
        """Add examples: three arrays of one shape; labels 0 or 1; those of weight 0 are left out."""
        logit, label, weight = (np.asarray(part, dtype=np.float64).reshape(-1) for part in (logits, labels, weights))
        keep = weight > 0
        self._parts.append((logit[keep], label[keep], weight[keep]))

    def compute(self) -> BinaryScores:
        """Score what was collected. A logit that is NaN makes every score None but the counts."""
        columns = zip(*self._parts, strict=True) if self._parts else ([], [], [])
        logit, label, weight = (np.concatenate([np.zeros(0), *part]) for part in columns)
        return score(logit, label, weight)


def score(logit: NDArray[np.float64], label: NDArray[np.float64], weight: NDArray[np.float64]) -> BinaryScores:
    """Score examples: three [N] float64 arrays, weights above 0."""
    count = len(logit)
    if not count:
        return BinaryScores(auc=None, ne=None, calibration=None, log_loss=None, examples=0, base_rate=None)
    rate = float(np.average(label, weights=weight))
    if np.isnan(logit).any():
        return BinaryScores(auc=None, ne=None, calibration=None, log_loss=None, examples=count, base_rate=rate)
    prediction = np.clip(0.5 * (1 + np.tanh(0.5 * logit)), EDGE, 1 - EDGE)
    loss = float(log_loss(label, prediction, sample_weight=weight, labels=[0, 1]))
    both = 0 < rate < 1
    return BinaryScores(
        auc=float(roc_auc_score(label, logit, sample_weight=weight)) if both else None,
        ne=loss / float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))) if both else None,
        calibration=float((prediction * weight).sum() / (label * weight).sum()) if rate > 0 else None,
        log_loss=loss,
        examples=count,
        base_rate=rate,
    )
