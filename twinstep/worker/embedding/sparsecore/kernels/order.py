"""Entries sorted by key, stably: least significant digit first."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import kernel

MAX_DIGIT = 11  # bits; histograms of 2048 counts stay in the first cache
MIN_DIGIT = 5
MAX_PASSES = 8

u64 = np.uint64


@kernel
def passes_of(n: int, bits: int) -> int:
    """Return how many passes a sort of n keys takes: digits of about log2(n) bits cost the least."""
    widest = MIN_DIGIT
    while widest < MAX_DIGIT and (1 << widest) < n:
        widest += 1
    return (bits + widest - 1) // widest


@kernel
def move(source: Any, target: Any, n: int, shift: Any, mask: Any, places: Any) -> None:
    """Move n entries to the places of their digit, in order; `places` is where each digit's next one goes."""
    for i in range(n):
        entry = source[i]
        digit = (entry >> shift) & mask
        target[places[digit]] = entry
        places[digit] += 1


@kernel
def order(first: Any, second: Any, n: int, bits: int, passes: int, counts: Any) -> None:
    """Sort n entries by their lowest `bits` bits.

    Args:
        first, second: entries lie in `first` if `passes` is even, else in `second`; they are sorted into `first`.
        n, bits: how many, and by how many bits.
        passes: of `passes_of`.
        counts: int32 scratch, [MAX_PASSES, 2 ** MAX_DIGIT].
    """
    if passes == 0:
        return
    width = (bits + passes - 1) // passes
    mask, keys = u64((1 << width) - 1), u64((1 << bits) - 1)
    counts[:passes, : 1 << width] = 0
    source = first if passes % 2 == 0 else second
    for i in range(n):
        key = source[i] & keys
        for digit in range(passes):
            counts[digit, key & mask] += 1
            key >>= u64(width)
    for digit in range(passes):
        row = counts[digit]
        start = 0
        for each in range(1 << width):
            count = row[each]
            row[each] = start
            start += count
        mask = u64((1 << min(width, bits - digit * width)) - 1)  # the last digit ends where payloads begin
        if (passes - digit) % 2 == 0:
            move(first, second, n, u64(digit * width), mask, row)
        else:
            move(second, first, n, u64(digit * width), mask, row)
