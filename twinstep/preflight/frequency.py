"""How often rows of a table are asked for: different rows of a batch on average, share of the hottest row. Pure.

Ids are drawn by a zipf law: the n-th most popular of V in proportion to n^-s (s = 0: all alike).
"""

from __future__ import annotations

import math
from functools import lru_cache

EXACT = 64  # ranks that are summed one by one; beyond, in bands
BAND = 1.25  # last rank of a band over its first


@lru_cache(maxsize=4096)
def different_rows(draws: int, rows: int, exponent: float) -> float:
    """Return how many different rows `draws` ids name, on average: Σ 1 − (1 − p)^draws over all rows."""
    if draws <= 0 or rows <= 0:
        return 0.0
    total = _weights(rows, exponent)
    found = 0.0
    for count, weight in _bands(rows, exponent):
        share = min(weight / total, 1.0)
        missed = math.exp(draws * math.log1p(-share)) if share < 1 else 0.0
        found += count * (1 - missed)
    return min(found, float(draws), float(rows))


def hottest_share(rows: int, exponent: float) -> float:
    """Return the share of all ids that name the most popular row."""
    return 1.0 / _weights(rows, exponent) if rows else 0.0


@lru_cache(maxsize=4096)
def _weights(rows: int, exponent: float) -> float:
    return sum(count * weight for count, weight in _bands(rows, exponent))


@lru_cache(maxsize=256)
def _bands(rows: int, exponent: float) -> tuple[tuple[int, float], ...]:
    """Return how many ranks a band has and the mean weight of one, bands in order."""
    found = [(1, rank**-exponent) for rank in range(1, min(rows, EXACT) + 1)]
    first = EXACT + 1
    while first <= rows:
        last = min(rows, max(first, int(first * BAND)))
        low, high = first - 0.5, last + 0.5  # the sum of a band is its integral, to a few parts in ten thousand
        if exponent == 1:
            whole = math.log(high / low)
        else:
            whole = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
        count = last - first + 1
        found.append((count, whole / count))
        first = last + 1
    return tuple(found)


STEEPEST = 4.0  # of an exponent: nearly all ids name the first few rows
_HALVINGS = 30


def fitted_exponent(draws: int, rows: int, different: int) -> float:
    """Return the exponent at which `draws` ids name `different` rows on average, between 0 and 4."""
    low, high = 0.0, STEEPEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if different_rows(draws, rows, middle) > different else (low, middle)
    return round((low + high) / 2, 4)
