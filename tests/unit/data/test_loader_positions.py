"""Where training stands, and whose part of a batch is whose: no sample lost, none twice, whatever changes between."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.batch import BATCH_DIMS, Batch, BatchStats
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.order import HostShare, Layout


def spec_with(**data: object) -> DataSpec:
    return DataSpec.model_validate(
        {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 6, "uih_len": 9, "num_candidates": 3} | data
    )


DATASET = load_dataset(spec_with())
SHAPES = {"batch_size": st.integers(1, 11), "uih_budget": st.sampled_from([None, 1, 4]), "hosts": st.integers(1, 6)}


def keys(batch: Batch) -> list[tuple[int, ...]]:
    """Each real row as its user, its time and its first item: no two samples share them."""
    columns = (batch.contextual_ids[:, 0], batch.query_times, batch.cand_ids[0, :, 0], batch.num_candidates)
    return [row for row in zip(*(column.tolist() for column in columns), strict=True) if row[-1]]


def dataset() -> Dataset:
    return DATASET


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_a_run_goes_on_at_the_exact_sample_whatever_the_batch_size_becomes(before: int, after: int, done: int) -> None:
    first = Loader(dataset(), spec_with(batch_size=before), seed=5)
    position = json.loads(json.dumps(first.position(done)))
    second = Loader(dataset(), spec_with(batch_size=after), seed=5)
    second.seek(position)
    seen = [key for step in range(done) for key in keys(first.train_batch(step)[0])]
    seen += [key for step in range(12) for key in keys(second.train_batch(step)[0])]
    one_by_one = Loader(dataset(), spec_with(batch_size=len(seen)), seed=5)
    assert seen == keys(one_by_one.train_batch(0)[0])
    assert second.position(12)["samples"] == len(seen)


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"seed": 6}, "seed 5 became 6"), ({"num_candidates": 2}, "digest"), ({"synthetic_events": 500}, "epoch_samples")],
)
def test_a_position_in_other_data_is_refused_and_nothing_moves(changed: dict[str, Any], says: str) -> None:
    position = Loader(dataset(), spec_with(), seed=5).position(3)
    seed = changed.pop("seed", 5)
    spec = spec_with(**changed)
    other = Loader(load_dataset(spec), spec, seed=seed)
    with pytest.raises(DataError, match=says) as error:
        other.seek(position)
    assert "train.seed" in error.value.remedy
    assert other.position(0)["samples"] == 0


@pytest.mark.parametrize("nonsense", [{}, {"samples": -1}, None, [], {"samples": "3"}, {"samples": True}])
def test_what_is_no_position_is_refused_by_name(nonsense: Any) -> None:
    loader = Loader(dataset(), spec_with(), seed=5)
    if nonsense and isinstance(nonsense, dict):
        nonsense = loader.position(0) | nonsense
    with pytest.raises(DataError, match="is no position"):
        loader.seek(nonsense)


def shares(step: int, *, layout: Layout, batch_size: int, uih_budget: int | None, hosts: int) -> list[tuple[Any, Any]]:
    spec = spec_with(batch_size=batch_size, uih_budget=uih_budget)
    return [
        Loader(dataset(), spec, seed=2, share=HostShare(host=host, hosts=hosts, layout=layout)).train_batch(step)
        for host in range(hosts)
    ]


def total(stats: list[BatchStats], name: str) -> int:
    return sum(getattr(each, name) for each in stats)


@given(st.integers(0, 40), *SHAPES.values())
def test_slices_of_all_hosts_laid_end_to_end_are_the_batch_of_one(
    step: int, batch_size: int, budget: int | None, hosts: int
) -> None:
    parts = shares(step, layout="slices", batch_size=batch_size, uih_budget=budget, hosts=hosts)
    one, alone = Loader(dataset(), spec_with(batch_size=batch_size, uih_budget=budget), seed=2).train_batch(step)
    rows = -(-batch_size // hosts) * hosts
    for name, dim in BATCH_DIMS.items():
        whole = torch.cat([getattr(batch, name) for batch, _ in parts], dim=dim)
        real = getattr(one, name)
        assert len({getattr(batch, name).shape for batch, _ in parts}) == 1
        head = whole.narrow(dim, 0, real.shape[dim])
        # What fills no slot is numbered by the batch's rows, and dummy rows may have been added to them.
        if name == "token_slot":
            head = torch.where(head == rows * 9, batch_size * 9, head)
        if name == "slot_token":
            head = torch.where(head == rows * (budget or 9), batch_size * (budget or 9), head)
        assert torch.equal(head, real), name
    assert {float(batch.n) for batch, _ in parts} == {float(one.n)}
    counted = [stats for _, stats in parts]
    for name in ("rows", "real_tokens", "events_cut", "examples"):
        assert total(counted, name) == getattr(alone, name), name
    assert total(counted, "dummy_tokens") == rows * (budget or 9) - alone.real_tokens


@given(st.integers(0, 40), *SHAPES.values())
def test_rows_of_all_hosts_are_the_rows_of_one_and_stand_on_their_own(
    step: int, batch_size: int, budget: int | None, hosts: int
) -> None:
    parts = shares(step, layout="rows", batch_size=batch_size, uih_budget=budget, hosts=hosts)
    one, _ = Loader(dataset(), spec_with(batch_size=batch_size, uih_budget=budget), seed=2).train_batch(step)
    assert [key for batch, _ in parts for key in keys(batch)] == keys(one)
    longest = max(int(batch.uih_lengths.max()) for batch, _ in parts)
    for batch, stats in parts:
        block = -(-batch_size // hosts)
        assert batch.slot_token.shape[0] == block
        assert len(batch.token_slot) == block * (budget or 9)
        filled = batch.slot_token < len(batch.token_slot)
        assert int(filled.sum()) == stats.real_tokens == int(batch.uih_lengths.sum())
        assert np.array_equal(
            batch.token_slot[batch.slot_token[filled]], torch.arange(filled.numel())[filled.reshape(-1)]
        )
        assert float(batch.n) == 2 + longest + int(one.num_candidates.max())


@given(st.integers(1, 7), st.sampled_from(["rows", "slices"]))
def test_every_held_out_event_is_scored_by_one_host(hosts: int, layout: Layout) -> None:
    seen = [
        key
        for host in range(hosts)
        for batch, _ in Loader(
            dataset(), spec_with(), seed=0, share=HostShare(host=host, hosts=hosts, layout=layout)
        ).eval_batches()
        for key in keys(batch)
    ]
    alone = [key for batch, _ in Loader(dataset(), spec_with(), seed=0).eval_batches() for key in keys(batch)]
    assert sorted(seen) == sorted(alone)
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(("host", "hosts"), [(-1, 2), (2, 2), (0, 0)])
def test_a_host_that_does_not_exist_is_refused(host: int, hosts: int) -> None:
    with pytest.raises(DataError, match="does not exist"):
        HostShare(host=host, hosts=hosts)
