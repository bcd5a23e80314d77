"""Seeded synthetic events: zipf-popular items, users and items with latent tastes, so that there is something to learn.

`datasets.py` calls `make_synthetic`. Pure: the same count gives the same events on any machine.
"""

from __future__ import annotations

import numpy as np

from twinstep.worker.data.events import DataSchema, Events, FeatureSchema, TableSchema, TaskSchema, make_events

SEED = 20_000
STARS = 5
TASTES = 4  # latent dimensions
SEGMENTS = 8
ZIPF_EXPONENT = 1.1
START = 1_000_000_000  # seconds; any epoch clock does
MEAN_GAP = 60  # seconds between neighbouring events of all users


def make_synthetic(num_events: int) -> tuple[Events, DataSchema]:
    """Return `num_events` events of about num_events/50 users on as many items, with ratings of 1 to 5."""
    rng = np.random.default_rng([SEED, num_events])
    num_users = max(8, num_events // 50)
    num_items = max(16, num_events // 50)
    segment = rng.integers(0, SEGMENTS, num_users)
    user_taste = rng.normal(size=(SEGMENTS, TASTES))[segment] + 0.7 * rng.normal(size=(num_users, TASTES))
    item_taste = rng.normal(size=(num_items, TASTES))
    item_quality = 0.7 * rng.normal(size=num_items)
    popularity = 1.0 / np.arange(1, num_items + 1) ** ZIPF_EXPONENT
    user = rng.integers(0, num_users, num_events)
    item = rng.choice(num_items, num_events, p=popularity / popularity.sum())
    score = (user_taste[user] * item_taste[item]).sum(1) / np.sqrt(TASTES) + item_quality[item]
    rating = np.clip(np.round(3.3 + score + 0.5 * rng.normal(size=num_events)), 1, STARS)
    time = START + np.cumsum(rng.integers(0, 2 * MEAN_GAP, num_events))
    events = make_events(
        user=user.astype(np.int64),
        item=item.astype(np.int64),
        rating=rating.astype(np.float32),
        time=time.astype(np.int64),
        user_features=np.stack([np.arange(num_users), segment], axis=1).astype(np.int64),
        item_features=np.arange(num_items, dtype=np.int64)[:, None],
        source="synthetic",
    )
    tables = {"user_id": num_users, "segment": SEGMENTS, "item_id": num_items}
    schema = DataSchema(
        tables=tuple(TableSchema(name=name, rows=rows) for name, rows in tables.items()),
        contextual=tuple(FeatureSchema(name=name, table=name) for name in ("user_id", "segment")),
        item_features=(FeatureSchema(name="item_id", table="item_id"),),
        tasks=(TaskSchema(name="liked"),),
        action_bits=STARS,
    )
    return events, schema
