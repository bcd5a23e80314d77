"""Ids of any size into table rows, by one 64-bit mix that never changes: a trained table stays readable. Pure.

The mix is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014;
constants of Stafford's variant 13), over id + seed * golden ratio, modulo the number of rows. Each table has its own
seed, from its name, so that ids that meet in one table are apart in another.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from twinstep.worker.data.events import Ints

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
KEY_BYTES = 8


def table_seed(table: str) -> int:
    """Return the seed of a table: the first 8 bytes of BLAKE2b of its name in UTF-8, little-endian."""
    return int.from_bytes(hashlib.blake2b(table.encode(), digest_size=KEY_BYTES).digest(), "little")


def hash_ids(ids: Ints, rows: int, *, table: str) -> Ints:
    """Return the row of each id.

    Args:
        ids: [N] int64, any values.
        rows: at least 1.
        table: name of the table, which gives the seed.

    Returns:
        [N] int64 in 0..rows-1. Two ids share a row with probability 1/rows.
    """
    mixed = np.ascontiguousarray(ids).view(np.uint64) + np.uint64(table_seed(table) * GOLDEN % 2**64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(rows)).view(np.int64)


def text_keys(values: pa.Array) -> Ints:
    """Return a 64-bit key of each text, [N] int64: 8 bytes of BLAKE2b of its UTF-8; each distinct text is hashed once.

    Of a billion distinct texts two share a key with a probability of 3 %, of a hundred million with 0.03 %.
    """
    encoded = values.dictionary_encode()
    digests = b"".join(
        hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest() for text in encoded.dictionary.to_pylist()
    )
    keys = np.frombuffer(digests, dtype="<i8").astype(np.int64)
    return keys[encoded.indices.to_numpy(zero_copy_only=False)] if len(keys) else np.zeros(len(values), np.int64)
