"""How long to wait before what failed is tried again: longer after each failure, up to a bound, and never at the same
moment as others who failed at the same time."""

from __future__ import annotations

import random


def backoff(
    failures: int, *, first: float, longest: float, spread: tuple[float, float] = (0.5, 1.0), share: float | None = None
) -> float:
    """Return the seconds to wait after so many failures in a row, 1 or more.

    Args:
        first: the wait after the first failure; each further one doubles it, up to `longest`.
        spread: of that, the least and the most that is waited; chance decides between the two.
        share: chance's part, from 0 to 1; None: it is drawn.
    """
    least, most = spread
    bound = min(longest, first * 2.0 ** min(max(failures, 1) - 1, 60))
    return bound * (least + (most - least) * (random.random() if share is None else share))
