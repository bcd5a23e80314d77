"""Mean squared error of one regression task over batches and processes, exact: the order of examples does not show.

A sum of floats depends on its order, so the sum is kept as a whole number of 2**-SCALE: every float64 is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from twinstep.worker.data.metrics import F64

SCALE = 1100  # the smallest float64 above 0 is 2**-1074
_BITS = 53  # of a float64's fraction
_HALF = 26


class Sums(NamedTuple):
    """What was collected, for another process to merge."""

    errors: int
    """Sum of weight · error², in units of 2**-SCALE."""
    weights: int
    """Sum of weights, in the same units."""
    examples: int
    finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionScores:
    """Scores over all examples with weight > 0."""

    mse: float | None
    """Weighted mean of squared errors; None without examples, or where a prediction is no finite number."""
    examples: int
    finite: bool = True

    @property
    def undefined(self) -> str | None:
        """Say why there is no mean, or None where there is one."""
        if self.mse is not None:
            return None
        return "no examples" if not self.examples else "a prediction is no finite number"


class RegressionMetrics:
    """Collects (prediction, label, weight), here and in other processes, and scores them together."""

    def __init__(self) -> None:
        self._sums = Sums(0, 0, 0, finite=True)

    def update(self, predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> None:
        """Add examples: three arrays of one shape; those of weight 0 are left out."""
        given = (np.asarray(part, dtype=np.float64).reshape(-1) for part in (predictions, labels, weights))
        prediction, label, weight = given
        keep = weight > 0
        with np.errstate(over="ignore", invalid="ignore"):
            error = weight[keep] * (prediction[keep] - label[keep]) ** 2
        finite = bool(np.isfinite(error).all())
        found = _exact(error) if finite else 0
        self.merge([Sums(found, _exact(weight[keep]), int(keep.sum()), finite)])

    def collected(self) -> Sums:
        """Return what was collected, for another process to merge."""
        return self._sums

    def merge(self, others: Iterable[Sums]) -> None:
        """Add what other processes collected."""
        for other in others:
            own = self._sums
            self._sums = Sums(
                own.errors + other.errors,
                own.weights + other.weights,
                own.examples + other.examples,
                own.finite and other.finite,
            )

    def compute(self) -> RegressionScores:
        """Score what was collected."""
        sums = self._sums
        mse = float(Fraction(sums.errors, sums.weights)) if sums.weights and sums.finite else None
        return RegressionScores(mse=mse, examples=sums.examples, finite=sums.finite)


def _exact(values: F64) -> int:
    """Return the exact sum of finite floats in units of 2**-SCALE."""
    fraction, exponent = np.frexp(values)
    whole = np.ldexp(fraction, _BITS).astype(np.int64)
    total = 0
    for each in np.unique(exponent):
        own = whole[exponent == each]
        # In two halves: the sum of many fractions of 53 bits would not fit into 64.
        part = (int((own >> _HALF).sum()) << _HALF) + int((own & ((1 << _HALF) - 1)).sum())
        shift = int(each) - _BITS + SCALE
        total += part << shift if shift >= 0 else part >> -shift
    return total
