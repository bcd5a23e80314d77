"""How often rows of a table are asked for: different rows of a batch on average, share of the hottest row. Pure.

Ids are drawn by a zipf law: the n-th most popular of V in proportion to n^-s (s = 0: all alike).
"""

from __future__ import annotations

import math
from bisect import bisect_left
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


Band = tuple[int, float]
"""How many ranks a band has, and the mean weight of one."""


def _bands(rows: int, exponent: float) -> list[Band]:
    """Return the bands of ranks up to `rows`, in order: those of any number of rows, the last cut off."""
    at = bisect_left(LASTS, rows)
    first = LASTS[at - 1] + 1 if at else 1
    return [*_whole_bands(exponent)[:at], *([_band(first, rows, exponent)] if rows >= first else [])]


def _lasts() -> tuple[int, ...]:
    """Return the last rank of each band of very many rows."""
    found = list(range(1, EXACT + 1))
    while found[-1] < 1 << 48:
        found.append(max(found[-1] + 1, int((found[-1] + 1) * BAND)))
    return tuple(found)


LASTS = _lasts()


@lru_cache(maxsize=64)
def _whole_bands(exponent: float) -> tuple[Band, ...]:
    """Return all bands of an exponent. A job has one, whatever its tables: so few are kept."""
    firsts = (1, *(last + 1 for last in LASTS[:-1]))
    return tuple(_band(first, last, exponent) for first, last in zip(firsts, LASTS, strict=True))


def _band(first: int, last: int, exponent: float) -> Band:
    if last <= EXACT:
        return 1, last**-exponent
    low, high = first - 0.5, last + 0.5  # the sum of a band is its integral, to a few parts in ten thousand
    if exponent == 1:
        whole = math.log(high / low)
    else:
        whole = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    count = last - first + 1
    return count, whole / count


STEEPEST = 4.0  # of an exponent: nearly all ids name the first few rows
_HALVINGS = 30


def fitted_exponent(draws: int, rows: int, different: int) -> float:
    """Return the exponent at which `draws` ids name `different` rows on average, between 0 and 4."""
    low, high = 0.0, STEEPEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if different_rows(draws, rows, middle) > different else (low, middle)
    return round((low + high) / 2, 4)
