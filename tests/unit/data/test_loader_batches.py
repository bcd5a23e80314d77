"""Batches: what stands where, the same numbers every time, every held-out event once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from twinstep.spec.job import DataSpec
from twinstep.worker.data.baselines import baseline_aucs
from twinstep.worker.data.batch import Batch
from twinstep.worker.data.datasets import Dataset, load_dataset, make_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.synthetic import make_synthetic

BUDGETS = [None, 3, 1]  # null: own slots; gather with few cuts; most of the history cut


def spec_with(budget: int | None = None, **data: object) -> DataSpec:
    return DataSpec.model_validate(
        {"dataset": "synthetic", "synthetic_events": 600, "batch_size": 6, "uih_len": 9, "num_candidates": 3}
        | {"uih_budget": budget}
        | data
    )


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(spec_with())


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_batch_has_one_shape_and_its_tokens_stand_in_their_slots(dataset: Dataset, budget: int | None) -> None:
    spec = spec_with(budget)
    loader = Loader(dataset, spec, seed=1)
    shapes = {tuple(x.shape for x in loader.train_batch(s)[0]) for s in range(30)}
    assert len(shapes) == 1
    held_out = list(loader.eval_batches())
    assert len({tuple(x.shape for x in batch) for batch, _ in held_out}) == 1
    assert not any(stats.events_cut for _, stats in held_out), "held-out histories are whole"
    for batch, stats in [loader.train_batch(s) for s in range(30)] + held_out:
        B, U, T = spec.batch_size, spec.uih_len, len(batch.token_slot)
        filled = batch.slot_token.reshape(-1) < T
        assert int(filled.sum()) == stats.real_tokens == T - stats.dummy_tokens
        slots = torch.arange(B * U)[filled]
        assert torch.equal(batch.token_slot[batch.slot_token.reshape(-1)[filled]], slots)
        dummies = batch.token_slot == B * U
        assert int(dummies.sum()) == stats.dummy_tokens
        for column in (batch.uih_ids[0], batch.uih_times, batch.uih_actions):
            assert not column[dummies].any()
        expected = (torch.arange(U) < batch.uih_lengths[:, None]).reshape(-1)
        assert torch.equal(filled, expected)
        assert float(batch.n) == 2 + int(batch.uih_lengths.max()) + int(batch.num_candidates.max())
        assert float(batch.weights.sum()) == stats.examples
        times = torch.cat((batch.uih_times, torch.zeros(1, dtype=torch.int64)))[batch.slot_token]
        for b in range(stats.rows):
            own = times[b, : batch.uih_lengths[b]]
            cand = batch.cand_times[b, : batch.num_candidates[b]]
            assert (own.diff() >= 0).all()
            assert (own < cand[0]).all()
            assert int(batch.query_times[b]) == int(cand[0])


def test_a_row_over_budget_keeps_its_newest_events(dataset: Dataset) -> None:
    whole, tight = (Loader(dataset, spec_with(budget), seed=0).train_batch(9) for budget in (None, 3))
    assert 0 < tight[1].events_cut == whole[1].real_tokens - tight[1].real_tokens
    for b in range(6):
        full = whole[0].uih_ids[0][whole[0].slot_token[b, : whole[0].uih_lengths[b]]]
        kept = tight[0].uih_ids[0][tight[0].slot_token[b, : tight[0].uih_lengths[b]]]
        assert torch.equal(kept, full[len(full) - len(kept) :])


def test_batches_depend_on_seed_and_number_alone(dataset: Dataset) -> None:
    spec = spec_with()
    first, second, other = Loader(dataset, spec, seed=3), Loader(dataset, spec, seed=3), Loader(dataset, spec, seed=4)
    assert same(first.train_batch(200)[0], second.train_batch(200)[0])
    resumed = second.train_batches(start=7)
    for step in range(7, 90):
        assert same(first.train_batch(step)[0], next(resumed)[0])
    assert not same(first.train_batch(0)[0], other.train_batch(0)[0])


def test_each_epoch_shows_every_training_event_once_in_another_order(dataset: Dataset) -> None:
    loader = Loader(dataset, spec_with(batch_size=1), seed=0)
    count = len(dataset.train)
    epochs = [[loader.train_batch(s)[0] for s in range(e * count, (e + 1) * count)] for e in range(2)]
    keys = [[(int(b.contextual_ids[0, 0]), int(b.cand_times[0, 0])) for b in epoch] for epoch in epochs]
    assert sorted(keys[0]) == sorted(keys[1])
    assert keys[0] != keys[1]
    assert sum(int(b.num_candidates) for b in epochs[0]) == int((~dataset.held_out).sum())


def test_a_batch_larger_than_the_dataset_goes_round_it(dataset: Dataset) -> None:
    batch, stats = Loader(dataset, spec_with(batch_size=1000), seed=0).train_batch(0)
    assert stats.rows == 1000
    assert int((batch.num_candidates > 0).sum()) == 1000


def test_evaluation_covers_every_held_out_event_once_and_fills_up_with_dummy_rows(dataset: Dataset) -> None:
    loader = Loader(dataset, spec_with(), seed=0)
    batches = list(loader.eval_batches())
    assert len(batches) == loader.eval_size
    assert sum(stats.examples for _, stats in batches) == int(dataset.held_out.sum())
    last, stats = batches[-1]
    assert stats.rows < 6
    assert not last.weights[:, stats.rows :].any()
    assert not last.query_times[stats.rows :].any()
    positives = sum(float((b.labels * b.weights).sum()) for b, _ in batches)
    assert positives == float((dataset.events.rating[dataset.held_out] >= 4).sum())


@pytest.mark.parametrize("slots", [1, 2])
def test_fewer_candidates_at_a_time_are_scored_with_all_that_came_before_them(dataset: Dataset, slots: int) -> None:
    spec = spec_with(4, eval_candidates=slots)
    found = load_dataset(spec)
    loader, usual = Loader(found, spec, seed=1), Loader(dataset, spec_with(4), seed=1)
    for step in range(3):
        assert same(loader.train_batch(step)[0], usual.train_batch(step)[0]), "training does not change"
    events, samples = found.events, found.eval
    scored = np.concatenate([found.log.event[a:b] for a, b in zip(samples.cand_start, samples.cand_end, strict=True)])
    assert sorted(scored) == np.flatnonzero(found.held_out).tolist()
    seen = 0
    for batch, stats in loader.eval_batches():
        assert batch.cand_ids.shape[1:] == (spec.batch_size, slots)
        assert not stats.events_cut
        for row in range(stats.rows):
            sample, seen = seen, seen + 1
            first = int(batch.query_times[row])
            before = (events.user == samples.user[sample]) & (events.time < first)
            assert int(batch.uih_lengths[row]) == min(int(before.sum()), spec.uih_len)
            assert int(batch.cand_times[row, 0]) == first
    assert seen == len(samples)


def test_a_history_carries_its_ratings_as_action_bits(dataset: Dataset) -> None:
    batch, _ = Loader(dataset, spec_with(), seed=0).train_batch(5)
    real = batch.token_slot < 6 * 9
    assert set(batch.uih_actions[real].tolist()) <= {1, 2, 4, 8, 16}
    assert np.array_equal(np.log2(dataset.actions) + 1, dataset.events.rating)


def test_baselines_look_at_training_events_only(dataset: Dataset) -> None:
    before = baseline_aucs(dataset)
    assert before["item_mean"] is not None
    assert before["item_mean"] > 0.5
    dataset_changed = load_dataset(spec_with())
    dataset_changed.events.rating[dataset_changed.held_out] = 1
    assert baseline_aucs(dataset_changed) == before


def test_synthetic_events_are_the_same_every_time() -> None:
    first, second = load_dataset(spec_with()), load_dataset(spec_with())
    assert np.array_equal(first.events.item, second.events.item)
    assert np.array_equal(first.events.rating, second.events.rating)


def test_when_a_later_candidate_comes_shows_in_its_own_time_alone() -> None:
    spec = spec_with()
    events, schema = make_synthetic(spec.synthetic_events)
    later = events.time.copy()
    later[-1] += 3 * 86_400  # the last event of all is the last candidate of its sample
    both = [make_dataset(each, schema, spec) for each in (events, dataclasses.replace(events, time=later))]
    moved = []
    for (one, _), (two, _) in zip(*(Loader(each, spec, seed=0).eval_batches() for each in both), strict=True):
        moved += (one.cand_times != two.cand_times).nonzero().tolist()
        assert same(one._replace(cand_times=two.cand_times), two)
    assert len(moved) == 1
    assert moved[0][1] > 0, "it is nobody's later candidate"
