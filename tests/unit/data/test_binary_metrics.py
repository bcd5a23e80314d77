"""AUC, normalised entropy and calibration against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.worker.data.metrics import BinaryMetrics

examples = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda x: x / 2), st.integers(0, 1), st.sampled_from([0.0, 1.0, 2.5])), max_size=40
)


def brute_auc(rows: list[tuple[float, int, float]]) -> float | None:
    won = total = 0.0
    for score, label, weight in rows:
        for other, negative, other_weight in rows:
            if label == 1 and negative == 0:
                total += weight * other_weight
                won += weight * other_weight * (1.0 if score > other else 0.5 if score == other else 0.0)
    return won / total if total else None


@given(examples, st.integers(0, 40))
def test_scores_are_their_definitions_however_the_examples_are_divided(
    rows: list[tuple[float, int, float]], cut: int
) -> None:
    metrics = BinaryMetrics()
    for part in (rows[:cut], rows[cut:]):
        columns = np.array(part, dtype=float).reshape(-1, 3)
        metrics.update(columns[:, 0], columns[:, 1], columns[:, 2])
    scores = metrics.compute()
    rows = [row for row in rows if row[2] > 0]
    assert scores.examples == len(rows)
    expected = brute_auc(rows)
    assert scores.auc == (None if expected is None else pytest.approx(expected, abs=1e-9))
    if not rows:
        assert scores.log_loss is None
        return
    total = sum(w for _, _, w in rows)
    rate = sum(y * w for _, y, w in rows) / total
    p = [1 / (1 + math.exp(-x)) for x, _, _ in rows]
    loss = -sum(w * math.log(q if y else 1 - q) for q, (_, y, w) in zip(p, rows, strict=True)) / total
    assert scores.log_loss == pytest.approx(loss, rel=1e-6)
    if 0 < rate < 1:
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        assert scores.ne == pytest.approx(loss / entropy, rel=1e-6)
        expected_calibration = sum(q * w for q, (_, _, w) in zip(p, rows, strict=True)) / (rate * total)
        assert scores.calibration == pytest.approx(expected_calibration, rel=1e-6)
    else:
        assert scores.ne is None
        assert (scores.calibration is None) == (rate == 0)


def test_one_class_has_no_auc_and_nothing_seen_has_no_score() -> None:
    metrics = BinaryMetrics()
    assert metrics.compute().auc is None
    metrics.update([0.3, -1.0], [1, 1], [1, 1])
    scores = metrics.compute()
    assert scores.auc is None
    assert scores.ne is None
    assert scores.base_rate == 1


def test_a_nan_prediction_gives_no_score_rather_than_a_traceback() -> None:
    metrics = BinaryMetrics()
    metrics.update([math.nan, 1.0], [0, 1], [1, 1])
    assert metrics.compute().auc is None
    assert metrics.compute().examples == 2


def test_a_prediction_sure_of_the_wrong_class_keeps_the_loss_finite() -> None:
    metrics = BinaryMetrics()
    metrics.update([1e9, -1e9], [0, 1], [1, 1])
    assert metrics.compute().log_loss == pytest.approx(-math.log(1e-7), rel=1e-3)
