"""The token budget: the closed form against the loop that words the rule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinstep.worker.data.budget import fit_budget


def naive(lengths: list[int], budget: int) -> list[int]:
    kept = list(lengths)
    while sum(kept) > budget:
        kept[kept.index(max(kept))] -= 1  # index finds the lowest row of equals
    return kept


def fit(lengths: list[int], budget: int) -> list[int]:
    return fit_budget(np.array(lengths, dtype=np.int64), budget).tolist()


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 300))
def test_the_closed_form_cuts_what_the_loop_cuts(lengths: list[int], budget: int) -> None:
    assert fit(lengths, budget) == naive(lengths, budget)


def test_one_history_longer_than_the_block_is_cut_to_it() -> None:
    assert fit([0, 900, 0], 64) == [0, 64, 0]


def test_equal_histories_lose_from_the_lowest_row_first() -> None:
    assert fit([5, 5, 5], 13) == [4, 4, 5]


def test_budget_zero_and_no_rows_are_legal() -> None:
    assert fit([3, 1], 0) == [0, 0]
    assert fit([], 7) == []


def test_a_budget_exactly_met_cuts_nothing_and_leaves_the_input_alone() -> None:
    lengths = np.array([2, 3], dtype=np.int64)
    kept = fit_budget(lengths, 5)
    kept[0] = 9
    assert lengths.tolist() == [2, 3]


def test_a_huge_batch_is_cut_without_a_loop_over_events() -> None:
    lengths = np.full(65_536, 8_192, dtype=np.int64)
    assert int(fit_budget(lengths, 65_536 * 100 + 7).sum()) == 65_536 * 100 + 7
