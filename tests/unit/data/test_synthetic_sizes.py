"""Synthetic data: the same for the same spec, of the sizes and distributions asked for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from twinstep.spec.errors import SpecError
from twinstep.spec.job import DataSpec
from twinstep.spec.parse import validate_spec
from twinstep.spec.synthetic import SyntheticSpec
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MultiHotDataset
from twinstep.worker.data.synthetic import make_synthetic


def lengths(history: str, spread: float = 1.0) -> np.ndarray:
    asked = SyntheticSpec(history=history, history_spread=spread, users=200)  # type: ignore[arg-type]
    events, _ = make_synthetic(20_000, asked)
    return np.bincount(events.user, minlength=200)


def test_histories_have_the_distribution_asked_for() -> None:
    assert set(lengths("fixed").tolist()) == {100}
    assert lengths("uniform").std() < 15
    zipf = lengths("zipf")
    harmonic = (1 / np.arange(1, 201)).sum()
    assert abs(zipf[0] - 20_000 / harmonic) < 5 * np.sqrt(20_000 / harmonic)
    assert zipf[:10].sum() > 3 * zipf[100:].sum()
    spread = np.log(np.maximum(lengths("lognormal"), 1)).std()
    assert 0.8 < spread < 1.2
    assert lengths("lognormal", 0.0).std() < 15


def test_items_are_zipf_with_the_exponent_asked_for() -> None:
    flat, _ = make_synthetic(20_000, SyntheticSpec(zipf=0, items=100))
    assert np.bincount(flat.item).max() < 300
    steep, _ = make_synthetic(20_000, SyntheticSpec(zipf=2, items=100))
    share = np.sort(np.bincount(steep.item, minlength=100))[::-1] / 20_000
    expected = 1 / np.arange(1, 101) ** 2.0
    np.testing.assert_allclose(share[:5], (expected / expected.sum())[:5], rtol=0.15)


def test_any_number_of_features_reaches_the_batches() -> None:
    more = {f"u{n}": 3 + n for n in range(5)}, {f"i{n}": 2 + n for n in range(20)}
    spec = DataSpec.model_validate(
        {"dataset": "synthetic", "synthetic_events": 500, "batch_size": 4, "uih_len": 6,
         "synthetic": {"user_features": more[0], "item_features": more[1], "users": 9, "items": 30}}
    )  # fmt: skip
    data = load_dataset(spec)
    assert isinstance(data, Dataset)
    assert {table.name: table.rows for table in data.schema.tables} == {
        "user_id": 9, "segment": 8, "item_id": 30, **more[0], **more[1]
    }  # fmt: skip
    batch, _ = Loader(data, spec, seed=0).train_batch(0)
    assert batch.contextual_ids.shape == (4, 7)
    assert batch.cand_ids.shape == (21, 4, 8)


def test_clicks_have_the_tables_asked_for() -> None:
    spec = DataSpec.model_validate(
        {"dataset": "synthetic-clicks", "synthetic_events": 300, "batch_size": 4,
         "synthetic": {"dense": 3, "table_rows": [5, 7, 11], "max_ids": 4}}
    )  # fmt: skip
    data = load_dataset(spec)
    assert isinstance(data, MultiHotDataset)
    assert [table.rows for table in data.schema.tables] == [5, 7, 11]
    assert [feature.max_ids for feature in data.schema.features] == [4, 4, 4]
    assert data.rows.dense.shape == (300, 3)


def test_the_default_data_never_changes_and_a_seed_changes_it() -> None:
    def digest(seed: int | None) -> str:
        events, _ = make_synthetic(300, SyntheticSpec(seed=seed))
        return hashlib.sha256(events.user.tobytes() + events.item.tobytes() + events.time.tobytes()).hexdigest()[:16]

    assert digest(None) == digest(None) == "8a795d5fd3e03ce1"
    assert len({digest(None), digest(1), digest(2)}) == 3


@pytest.mark.parametrize("name", ["user_id", "segment", "item_id", "mine"])
def test_a_name_that_is_taken_is_refused_by_field(name: str) -> None:
    with pytest.raises(SpecError) as error:
        validate_spec({"name": "a", "data": {"dataset": "synthetic", "synthetic": {
            "user_features": {"mine": 3}, "item_features": {name: 3}}}})  # fmt: skip
    assert error.value.faults[0].field == "data.synthetic.item_features"
    assert name in error.value.faults[0].problem
