"""Token budget: how many events each history keeps when a batch has room for `budget` of them, and which budget fits.

`loader.py` asks for the first, `lengths.py` for the second. Pure; the rule and its edges are tested against the loop
that the rule is worded as.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def fit_budget(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return the length each history keeps so that together they hold at most `budget` events.

    The rule: while over budget, drop the oldest event of the longest history, of equals the one with the lowest row
    index. Closed form, O(n log n): that loop lowers a ceiling over all histories, so every kept length is
    min(length, level) or one more, and rows of the highest index keep the one more.

    Args:
        lengths: [B] int64, each at least 0.
        budget: events, at least 0.

    Returns:
        [B] int64, each at most its length; they sum to min(budget, sum of lengths).
    """
    if int(lengths.sum()) <= budget:
        return lengths.copy()
    ascending = np.sort(lengths)
    count = len(ascending)
    # room[i]: what the histories hold if those from rank i on are cut to the length of rank i.
    room = np.concatenate(([0], np.cumsum(ascending)[:-1])) + ascending * np.arange(count, 0, -1)
    rank = int(np.searchsorted(room, budget, side="right"))  # histories below this rank stay whole
    cut = count - rank
    level, spare = divmod(budget - int(ascending[:rank].sum()), cut)
    kept = np.minimum(lengths, level)
    over = np.flatnonzero(lengths > level)
    kept[over[len(over) - spare :]] += 1
    return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUse:
    """What a token budget does to batches of given histories."""

    budget: int
    """Tokens per sample on average, as `data.uih_budget`."""
    padded: float
    """Share of a block's tokens that are dummies."""
    lost: float
    """Share of the events that batches ask for and do not hold."""
    batches_cut: float
    """Share of the batches that lose any."""


def budget_use(totals: NDArray[np.int64], *, batch_size: int, budget: int) -> BudgetUse:
    """Return what a budget does to batches that ask for `totals` events each, [N] int64."""
    over = totals - batch_size * budget
    asked, cut = int(totals.sum()), int(np.maximum(over, 0).sum())
    room = len(totals) * batch_size * budget
    return BudgetUse(
        budget=budget,
        padded=(room - asked + cut) / room if room else 0.0,
        lost=cut / asked if asked else 0.0,
        batches_cut=float((over > 0).mean()) if len(totals) else 0.0,
    )


def recommend_budget(totals: NDArray[np.int64], *, batch_size: int, most: int, target_loss: float) -> BudgetUse:
    """Return the least budget, from 1 to `most`, that loses at most a share `target_loss` of the events.

    Args:
        totals: [N] int64: events that each of N batches asks for.
        most: `uih_len`, with which nothing is lost.
    """
    low, high = 1, most
    while low < high:  # what is lost falls as the budget grows
        middle = (low + high) // 2
        if budget_use(totals, batch_size=batch_size, budget=middle).lost <= target_loss:
            high = middle
        else:
            low = middle + 1
    return budget_use(totals, batch_size=batch_size, budget=low)
