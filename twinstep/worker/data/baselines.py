"""Held-out AUC of two scores without parameters: what a trained model must beat to have learnt anything.

Both look at training events only. `train/` reports them beside the model's score.
"""

from __future__ import annotations

import numpy as np

from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.metrics import score
from twinstep.worker.data.multi_hot import MultiHotDataset

SMOOTHING = 5.0  # ratings of the global mean each item starts with, so that one lucky rating ranks no item first


def baseline_aucs(dataset: Dataset | MultiHotDataset) -> dict[str, float | None]:
    """Return the held-out AUC of `item_mean` and `popularity` for the first task; None where undefined.

    item_mean: mean training rating of the item, smoothed with the global mean. popularity: its training events.
    Rows of dense and multi-hot features name no item, and have none of the two.
    """
    if isinstance(dataset, MultiHotDataset):
        return {}
    events, held = dataset.events, dataset.held_out
    num_items = len(events.item_features)
    count = np.bincount(events.item[~held], minlength=num_items).astype(np.float64)
    total = np.bincount(events.item[~held], weights=events.rating[~held], minlength=num_items)
    prior = float(events.rating[~held].mean())
    mean = (total + SMOOTHING * prior) / (count + SMOOTHING)
    item = events.item[held]
    label = dataset.labels[0, held].astype(np.float64)
    weight = np.ones(len(item))
    return {
        name: score(values[item], label, weight).auc for name, values in (("item_mean", mean), ("popularity", count))
    }
