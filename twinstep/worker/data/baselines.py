"""Held-out AUC of simple scores: what a trained model must beat to have learnt anything.

All look at training events only. `train/` reports those without parameters beside the model's score; the benchmark of
quality adds logistic regression.
"""

from __future__ import annotations

import numpy as np

from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.events import Ints
from twinstep.worker.data.metrics import F64, score
from twinstep.worker.data.multi_hot import MultiHotDataset

SMOOTHING = 5.0  # ratings of the global mean each user and item starts with: one lucky rating ranks nobody first
REGULARISATION = 1.0  # C of scikit-learn, its default; on ml-100k less of it scores higher than more


def baseline_aucs(dataset: Dataset | MultiHotDataset) -> dict[str, float | None]:
    """Return the held-out AUC of scores without parameters for the first task; None where undefined.

    popularity: training events of the item. item_mean: mean training rating of the item, smoothed with the global mean.
    user_item_mean: that plus the user's mean, smoothed alike. Rows of dense and multi-hot features name no item, and
    have none of them.
    """
    if isinstance(dataset, MultiHotDataset):
        return {}
    events, held = dataset.events, dataset.held_out
    items = _smoothed_means(events.item, len(events.item_features), dataset)
    users = _smoothed_means(events.user, len(events.user_features), dataset)
    popularity = np.bincount(events.item[~held], minlength=len(events.item_features)).astype(np.float64)
    item, user = events.item[held], events.user[held]
    scores = {
        "item_mean": items[item],
        "popularity": popularity[item],
        "user_item_mean": items[item] + users[user],
    }
    return {name: _held_out_auc(dataset, values) for name, values in scores.items()}


def logistic_regression_auc(dataset: Dataset) -> float | None:
    """Return the held-out AUC of logistic regression on user and item ids; None where undefined."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    events, held = dataset.events, dataset.held_out
    label = dataset.labels[0]
    if label[~held].min() == label[~held].max():
        return None
    ids = np.stack((events.user, events.item), axis=1)
    model = make_pipeline(
        OneHotEncoder(handle_unknown="ignore"), LogisticRegression(C=REGULARISATION, max_iter=1000)
    ).fit(ids[~held], label[~held])
    return _held_out_auc(dataset, model.decision_function(ids[held]))


def _smoothed_means(ids: Ints, size: int, dataset: Dataset) -> F64:
    """Return the mean training rating by id, [size], pulled towards the mean of all."""
    rating, held = dataset.events.rating, dataset.held_out
    count = np.bincount(ids[~held], minlength=size)
    total = np.bincount(ids[~held], weights=rating[~held], minlength=size)
    means: F64 = (total + SMOOTHING * float(rating[~held].mean())) / (count + SMOOTHING)
    return means


def _held_out_auc(dataset: Dataset, values: F64) -> float | None:
    label = dataset.labels[0, dataset.held_out].astype(np.float64)
    return score(values, label, np.ones(len(label))).auc
