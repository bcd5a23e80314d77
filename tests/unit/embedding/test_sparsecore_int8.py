"""Tables as int8: errors within half a step, and what they cost a recommender on real ratings."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.decomposition import TruncatedSVD
from sklearn.metrics import roc_auc_score

from twinstep.spec.errors import DataError
from twinstep.worker.embedding.sparsecore.int8 import dequantize, quantize_table, range_of
from twinstep.worker.embedding.sparsecore.logical import Chunk

VALUES = arrays.arrays(np.float32, (7, 3), elements=st.floats(-1e3, 1e3, width=32))


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_errors_are_at_most_half_a_step(values: np.ndarray) -> None:
    found, codes = quantize_table([Chunk("t", "weight", 0, values[:4]), Chunk("t", "weight", 4, values[4:])])
    parts = list(codes)
    assert [each.start for each in parts] == [0, 4]
    back = np.concatenate([dequantize(each.codes, found.low, found.high) for each in parts])
    error = np.abs(back.astype(np.float64) - values)
    slack = 1e-6 * max(abs(found.low), abs(found.high), 1e-30)
    assert error.max() <= found.step / 2 + slack
    assert found.max_error == pytest.approx(error.max())
    assert found.rms_error == pytest.approx(float(np.sqrt((error**2).mean())))
    assert found.clipped == 0


def test_a_range_that_leaves_outliers_out_clips_them() -> None:
    values = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)
    values[7, 2] = 1000.0
    whole, _ = quantize_table([Chunk("t", "weight", 0, values)])
    tight, _ = quantize_table([Chunk("t", "weight", 0, values)], keep=0.999)
    assert tight.step < whole.step / 50
    assert 0 < tight.clipped < 60
    low, high = range_of([Chunk("t", "weight", 0, np.zeros((2, 2), np.float32))])
    assert low == high == 0.0


def test_what_cannot_be_served_is_refused() -> None:
    bad = np.array([[1.0, np.nan]], np.float32)
    for chunks in ([Chunk("t", "weight", 0, bad)], [], [Chunk("t", "accumulator", 0, np.ones((1, 2), np.float32))]):
        with pytest.raises(DataError):
            quantize_table(chunks)


def test_ranking_real_ratings_loses_next_to_nothing() -> None:
    """Factors of MovieLens-100K by scikit-learn, held-out ratings ranked with float32 and with int8 tables."""
    try:
        files = importlib.metadata.files("recbole") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("recbole, whose distribution has the ratings, is not installed")
    file = next(each for each in files if each.name == "ml-100k.inter")
    users, items, ratings = np.loadtxt(str(file.locate()), skiprows=1, usecols=(0, 1, 2)).T
    users, items = users.astype(int), items.astype(int)
    held = np.random.default_rng(0).random(len(ratings)) < 0.2
    seen = np.zeros((users.max() + 1, items.max() + 1), np.float32)
    seen[users[~held], items[~held]] = ratings[~held] - ratings[~held].mean()
    model = TruncatedSVD(16, random_state=0)
    user_factors, item_factors = model.fit_transform(seen).astype(np.float32), model.components_.T.astype(np.float32)

    def auc(user: np.ndarray, item: np.ndarray) -> float:
        return float(roc_auc_score(ratings[held] >= 4, (user[users[held]] * item[items[held]]).sum(1)))

    served = []
    for name, factors in (("user", user_factors), ("item", item_factors)):
        found, codes = quantize_table([Chunk(name, "weight", 0, factors)])
        served.append(np.concatenate([dequantize(each.codes, found.low, found.high) for each in codes]))
    exact, rounded = auc(user_factors, item_factors), auc(*served)
    assert exact > 0.68
    assert abs(exact - rounded) < 2e-3
