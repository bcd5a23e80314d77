"""Even batches and the budget recommended for them: what is promised of them holds for any histories."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.budget import budget_use, fit_budget, recommend_budget
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.lengths import LengthStudy, study_lengths
from twinstep.worker.data.lengths_page import picture, render
from twinstep.worker.data.loader import Loader, train_order
from twinstep.worker.data.order import STRATA, even_permutation

lengths_of = st.lists(st.integers(0, 90), min_size=1, max_size=200).map(lambda x: np.array(x, dtype=np.int64))


@given(lengths_of, st.integers(0, 9))
def test_an_even_order_has_every_sample_once_and_any_stretch_has_all_strata(lengths: np.ndarray, seed: int) -> None:
    order = even_permutation(lengths, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(lengths)))
    # A stratum's samples lie between those of its neighbours in length, and each stretch takes one of each.
    places = [lengths[order[first::STRATA]] for first in range(min(STRATA, len(lengths)))]
    places.sort(key=lambda values: (values.min(), values.max()))
    for shorter, longer in itertools.pairwise(places):
        assert shorter.max() <= longer.min()


@given(lengths_of, st.integers(1, 8), st.floats(0, 0.5))
def test_the_recommended_budget_is_the_least_that_loses_no_more_than_the_target(
    lengths: np.ndarray, batch_size: int, target: float
) -> None:
    lengths = np.resize(lengths, -(-len(lengths) // batch_size) * batch_size).reshape(-1, batch_size)
    totals, most = lengths.sum(axis=1), max(1, int(lengths.max()))
    found = recommend_budget(totals, batch_size=batch_size, most=most, target_loss=target)
    asked = int(totals.sum())

    def lost(budget: int) -> int:
        return asked - sum(int(fit_budget(row, batch_size * budget).sum()) for row in lengths)

    assert found.lost == pytest.approx(lost(found.budget) / asked if asked else 0.0)
    assert lost(found.budget) <= target * asked + 1e-9
    assert found.budget == 1 or lost(found.budget - 1) > target * asked - 1e-9
    room = totals.size * batch_size * found.budget
    assert found.padded == pytest.approx((room - asked + lost(found.budget)) / room)


def test_what_a_study_says_of_a_budget_is_what_batches_then_hold() -> None:
    spec = DataSpec.model_validate({"dataset": "synthetic", "synthetic_events": 3000, "batch_size": 16, "uih_len": 30})
    dataset = load_dataset(spec)
    study = study_lengths(dataset, spec, seed=3, target_loss=0.01)
    chosen = spec.model_copy(update={"uih_budget": study.recommended.budget})
    loader = Loader(dataset, chosen, seed=3)
    stats = [loader.train_batch(step)[1] for step in range(len(dataset.train) // 16)]
    asked = sum(each.real_tokens + each.events_cut for each in stats)
    tokens = sum(each.real_tokens + each.dummy_tokens for each in stats)
    assert sum(each.events_cut for each in stats) / asked == pytest.approx(study.recommended.lost)
    assert sum(each.dummy_tokens for each in stats) / tokens == pytest.approx(study.recommended.padded)
    assert study.recommended.lost <= 0.01
    assert study_lengths(dataset, chosen, seed=3, target_loss=0.01).current == study.recommended


@pytest.fixture(scope="module", params=["time", "user"])
def ratings(request: pytest.FixtureRequest) -> tuple[Dataset, DataSpec]:
    spec = DataSpec.model_validate({"dataset": "ml-100k", "uih_len": 64, "split": {"by": request.param}})
    try:
        return load_dataset(spec), spec
    except DataError:
        pytest.skip("the recbole distribution, which carries ml-100k, is not installed")


@pytest.mark.parametrize("batch_size", [32, 128])
def test_on_ml_100k_the_recommended_budget_pads_under_five_percent_and_loses_one(
    ratings: tuple[Dataset, DataSpec], batch_size: int
) -> None:
    dataset, spec = ratings
    study = study_lengths(dataset, spec.model_copy(update={"batch_size": batch_size}), seed=0, target_loss=0.01)
    assert study.recommended.lost <= 0.01
    assert study.recommended.padded <= 0.05
    assert study.padded_slots > 0.25  # what padding to uih_len wastes


def test_dealing_evenly_is_what_makes_so_small_a_budget_do(ratings: tuple[Dataset, DataSpec]) -> None:
    dataset, spec = ratings
    lengths = dataset.train.history_end - dataset.train.history_start
    batches = len(lengths) // 32
    even = lengths[train_order(dataset, seed=0).at(0, batches * 32)].reshape(batches, 32).sum(1)
    dealt = lengths[np.random.default_rng(0).permutation(len(lengths))[: batches * 32]].reshape(batches, 32).sum(1)
    assert even.std() < dealt.std() / 4
    budget = study_lengths(dataset, spec, seed=0, target_loss=0.01).recommended.budget
    assert budget_use(dealt, batch_size=32, budget=budget).lost > 0.02


def a_study(**data: object) -> LengthStudy:
    spec = DataSpec.model_validate({"dataset": "synthetic", "synthetic_events": 500, "uih_len": 20} | data)
    return study_lengths(load_dataset(spec), spec, seed=0, target_loss=0.05)


@pytest.mark.parametrize("uih_len", [1, 2, 20, 900])
def test_a_page_is_drawn_whatever_the_longest_history_is(uih_len: int) -> None:
    study = a_study(uih_len=uih_len)
    svg = ElementTree.fromstring(picture(study))  # noqa: S314  our own text
    assert len(svg.findall(".//rect")) == len(study.histogram)
    assert sum(count for _, _, count in study.histogram) == study.train_samples
    assert study.histogram[-1][1] == uih_len
    page = render(study)
    assert f"<td>{study.recommended.budget}</td>" in page
    assert "http" not in page


def test_a_dataset_smaller_than_a_batch_is_looked_at_too() -> None:
    study = a_study(batch_size=5000)
    assert study.recommended.lost <= 0.05
