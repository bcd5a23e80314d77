"""Token budget: how many events each history keeps when a batch has room for `budget` of them. Pure.

`loader.py` asks; the rule and its edges are tested against the loop that the rule is worded as.
"""

from __future__ import annotations

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
