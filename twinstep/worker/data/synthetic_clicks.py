"""Seeded synthetic clicks in the form of the Criteo data: dense counts, bags of zipf ids, a label they both explain.

`datasets.py` calls `make_clicks`. Pure: the same arguments give the same rows on any machine.
"""

from __future__ import annotations

import numpy as np

from twinstep.spec.synthetic import MAX_IDS, TABLE_ROWS, SyntheticSpec
from twinstep.worker.data.events import TableSchema, TaskSchema
from twinstep.worker.data.multi_hot import MultiHotFeature, MultiHotSchema, Rows
from twinstep.worker.data.synthetic import popularity

SEED = 20_001
NUM_DENSE = 13  # as the Criteo data has
ZIPF_EXPONENT = 1.1
TASTE = 0.5  # standard deviation of what an id adds to the score


def make_clicks(
    num_rows: int,
    *,
    table_rows: tuple[int, ...] = TABLE_ROWS,
    max_ids: tuple[int, ...] = MAX_IDS,
    num_dense: int = NUM_DENSE,
    zipf: float = ZIPF_EXPONENT,
    seed: int = SEED,
) -> tuple[Rows, MultiHotSchema]:
    """Return `num_rows` rows of `num_dense` dense features and one bag of 0 to `max_ids` ids per table."""
    rng = np.random.default_rng([seed, num_rows, num_dense, *table_rows])
    counts = rng.lognormal(mean=1.0, sigma=1.0, size=(num_rows, num_dense))
    dense = np.log1p(np.floor(counts))  # as Criteo's integers are read
    score = (dense - dense.mean(0)) @ rng.normal(size=num_dense) / np.sqrt(num_dense)
    values, offsets = [], []
    for rows, most in zip(table_rows, max_ids, strict=True):
        length = rng.integers(0, most + 1, size=num_rows)
        ids = rng.choice(rows, int(length.sum()), p=popularity(rows, zipf)).astype(np.int64)
        taste = rng.normal(scale=TASTE, size=rows)
        score += np.bincount(np.repeat(np.arange(num_rows), length), weights=taste[ids], minlength=num_rows) / (
            np.sqrt(len(table_rows) * most)
        )
        values.append(ids)
        offsets.append(np.concatenate(([0], np.cumsum(length))).astype(np.int64))
    clicked = rng.random(num_rows) < 1 / (1 + np.exp(1.0 - 2.0 * score))
    names = [f"cat_{index}" for index in range(len(table_rows))]
    schema = MultiHotSchema(
        tables=tuple(TableSchema(name=name, rows=rows) for name, rows in zip(names, table_rows, strict=True)),
        dense=tuple(f"int_{index}" for index in range(num_dense)),
        features=tuple(
            MultiHotFeature(name=name, table=name, max_ids=most) for name, most in zip(names, max_ids, strict=True)
        ),
        tasks=(TaskSchema(name="clicked"),),
    )
    rows_at_hand = Rows(
        dense=dense.astype(np.float32),
        values=tuple(values),
        offsets=tuple(offsets),
        labels=clicked.astype(np.float32)[None],
    )
    return rows_at_hand, schema


def make_clicks_asked(num_rows: int, asked: SyntheticSpec) -> tuple[Rows, MultiHotSchema]:
    """Return the rows that a spec asks for."""
    tables = asked.table_rows or TABLE_ROWS
    usual = MAX_IDS if asked.table_rows is None else (1,) * len(tables)
    return make_clicks(
        num_rows,
        table_rows=tables,
        max_ids=usual if asked.max_ids is None else (asked.max_ids,) * len(tables),
        num_dense=asked.dense,
        zipf=asked.zipf,
        seed=SEED if asked.seed is None else asked.seed,
    )
