"""Seeded synthetic events: zipf-popular items, users and items with latent tastes, so that there is something to learn.

`datasets.py` calls `make_synthetic`. Pure: the same arguments give the same events on any machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.synthetic import SEGMENTS, SyntheticSpec, items_of, users_of
from twinstep.worker.data.events import DataSchema, Events, FeatureSchema, Ints, TableSchema, TaskSchema, make_events

SEED = 20_000
STARS = 5
TASTES = 4  # latent dimensions
START = 1_000_000_000  # seconds; any epoch clock does
MEAN_GAP = 60  # seconds between neighbouring events of all users


def make_synthetic(num_events: int, asked: SyntheticSpec | None = None) -> tuple[Events, DataSchema]:
    """Return `num_events` events of about num_events/50 users on as many items, with ratings of 1 to 5.

    Args:
        asked: sizes, seed and distributions; None: the defaults.
    """
    asked = SyntheticSpec() if asked is None else asked
    rng = np.random.default_rng([SEED if asked.seed is None else asked.seed, num_events])
    num_users, num_items = users_of(asked, num_events), items_of(asked, num_events)
    segment = rng.integers(0, SEGMENTS, num_users)
    user_taste = rng.normal(size=(SEGMENTS, TASTES))[segment] + 0.7 * rng.normal(size=(num_users, TASTES))
    item_taste = rng.normal(size=(num_items, TASTES))
    item_quality = 0.7 * rng.normal(size=num_items)
    user = _users(rng, num_events, num_users, asked)
    item = rng.choice(num_items, num_events, p=popularity(num_items, asked.zipf))
    score = (user_taste[user] * item_taste[item]).sum(1) / np.sqrt(TASTES) + item_quality[item]
    rating = np.clip(np.round(3.3 + score + 0.5 * rng.normal(size=num_events)), 1, STARS)
    time = START + np.cumsum(rng.integers(0, 2 * MEAN_GAP, num_events))
    people = {"user_id": np.arange(num_users), "segment": segment}
    items = {"item_id": np.arange(num_items)}
    for features, count, more in ((people, num_users, asked.user_features), (items, num_items, asked.item_features)):
        for name, rows in more.items():
            features[name] = rng.choice(rows, count, p=popularity(rows, asked.zipf))
    tables = {"user_id": num_users, "segment": SEGMENTS, "item_id": num_items}
    tables |= asked.user_features | asked.item_features
    events = make_events(
        user=user.astype(np.int64),
        item=item.astype(np.int64),
        rating=rating.astype(np.float32),
        time=time.astype(np.int64),
        user_features=np.stack(list(people.values()), axis=1).astype(np.int64),
        item_features=np.stack(list(items.values()), axis=1).astype(np.int64),
        source="synthetic",
    )
    schema = DataSchema(
        tables=tuple(TableSchema(name=name, rows=rows) for name, rows in tables.items()),
        contextual=tuple(FeatureSchema(name=name, table=name) for name in people),
        item_features=tuple(FeatureSchema(name=name, table=name) for name in items),
        tasks=(TaskSchema(name="liked"),),
        action_bits=STARS,
    )
    return events, schema


def popularity(count: int, exponent: float) -> NDArray[np.float64]:
    """Return the chance of each of `count` ids, [count] float64: in proportion to 1 / (id + 1)^exponent."""
    weight = 1.0 / np.arange(1, count + 1) ** exponent
    return np.asarray(weight / weight.sum(), dtype=np.float64)


def _users(rng: np.random.Generator, num_events: int, num_users: int, asked: SyntheticSpec) -> Ints:
    """Return the user of each event, [num_events] int64."""
    if asked.history == "uniform":
        return rng.integers(0, num_users, num_events)
    if asked.history == "fixed":  # to within one event, where the users do not divide them
        return rng.permutation(np.arange(num_events) % num_users)
    if asked.history == "zipf":
        return rng.choice(num_users, num_events, p=popularity(num_users, asked.history_spread))
    weight = rng.lognormal(sigma=asked.history_spread, size=num_users)
    return rng.choice(num_users, num_events, p=weight / weight.sum())
