"""First values of tables: each value depends on (seed, table name, row, column) and on nothing else.

So engine, stacking, sharding, the number of devices and processes and the order of initialisation change no bit, equal
tables do not start equal, and a process can make any rows without the others. The generator is Threefry-2x32 with 20
rounds (Salmon et al., SC 2011) over the counter (row, column pair); a value is one product of two float32 numbers, so
host and device give the same bits. No jax here: functions take `xp`, numpy or jax.numpy.
"""

from __future__ import annotations

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import SpecError

ROUNDS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
BLOCK = 1 << 15  # values made at a time on the host, whose steps then stay in a processor's cache
LEVELS = 1 << 16  # values of the standard normal that can occur, each as likely; the largest is 4.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Normal with mean 0: one of 65,536 equally likely quantiles, so none is further out than 4.3 std."""

    std: float

    def __post_init__(self) -> None:
        """Refuse a std that is no number from 0 up."""
        if not 0 <= self.std < float("inf"):
            raise SpecError(f"a standard deviation of {self.std}", remedy="give a number from 0 up")

    def values(self, bits: Any, xp: Any) -> Any:
        """Return float32 values for uint32 bits."""
        return xp.asarray(_quantiles())[bits >> np.uint32(16)] * xp.asarray(self.std, dtype=xp.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Uniform over the open interval from -bound to bound, in 2^24 steps."""

    bound: float

    def __post_init__(self) -> None:
        """Refuse a bound that is no number from 0 up."""
        if not 0 <= self.bound < float("inf"):
            raise SpecError(f"a bound of {self.bound}", remedy="give a number from 0 up")

    def values(self, bits: Any, xp: Any) -> Any:
        """Return float32 values for uint32 bits."""
        odd = (bits >> np.uint32(8)).astype(xp.int32) * 2 - (2**24 - 1)  # exact in float32
        return odd.astype(xp.float32) * xp.asarray(self.bound / 2**24, dtype=xp.float32)


Initial = Normal | Uniform


@functools.cache
def _quantiles() -> npt.NDArray[np.float32]:
    normal = NormalDist()
    upper = np.array([normal.inv_cdf((LEVELS // 2 + i + 0.5) / LEVELS) for i in range(LEVELS // 2)], np.float32)
    return np.concatenate([-upper[::-1], upper])


def table_key(seed: int, table: str) -> tuple[int, int]:
    """Return the two 32-bit words that a table's values are made with."""
    digest = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def first_rows(how: Initial, key: tuple[int, int], rows: Any, dim: int, xp: Any) -> Any:
    """Return the first values of rows.

    Args:
        how: their distribution.
        key: of `table_key`.
        rows: [n] integers from 0, below 2^31.
        dim: columns.
        xp: numpy or jax.numpy.

    Returns:
        [n, dim] float32.
    """
    pairs = -(-dim // 2)
    counter = xp.broadcast_to(rows.astype(xp.uint32)[:, None], (rows.shape[0], pairs))
    columns = xp.broadcast_to(xp.arange(pairs, dtype=xp.uint32)[None, :], counter.shape)
    words = threefry(key, counter, columns, xp)
    bits = xp.stack(words, axis=-1).reshape(rows.shape[0], 2 * pairs)[:, :dim]
    return how.values(bits, xp)


def fill_first_rows(
    out: npt.NDArray[np.float32], how: Initial, key: tuple[int, int], start: int, step: int = 1
) -> None:
    """Write the first values of rows start, start + step, … into [n, dim], on all processors and without a copy."""
    size = max(1, BLOCK // max(1, out.shape[1]))

    def fill(first: int) -> None:
        part = out[first : first + size]
        rows = start + step * np.arange(first, first + len(part))
        part[...] = first_rows(how, key, rows, out.shape[1], np)

    blocks = range(0, len(out), size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(fill, blocks):
            pass


def threefry(key: tuple[int, int], low: Any, high: Any, xp: Any) -> tuple[Any, Any]:
    """Return Threefry-2x32-20 of the counters (low, high), uint32 arrays of one shape."""
    schedule = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0] ^ key[1] ^ PARITY)]
    low, high = low + schedule[0], high + schedule[1]
    for turn in range(5):
        for distance in ROUNDS[turn % 2]:
            low = low + high
            high = (high << np.uint32(distance)) | (high >> np.uint32(32 - distance))
            high = high ^ low
        low = low + schedule[(turn + 1) % 3]
        high = high + schedule[(turn + 2) % 3] + np.uint32(turn + 1)
    return low, high
