"""Rows of bfloat16 in words of 32 bits, so that a row can be copied alone: in a TPU's tiles two rows share words.

Word j of a row holds column j in its lower half and column W + j in its upper one; so nothing moves between lanes.

# Shapes: W words of a row, of 2·W columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

HALF = 16
UPPER = -(1 << HALF)  # the upper half's bits of an int32
QUIET = 1 << 22  # the bit of a NaN that rounding must not clear


def to_words(rows: jax.Array) -> jax.Array:
    """Return rows [..., 2·W] of float32 as [..., W] int32: the nearest bfloat16 of each number, ties to even."""
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    # By integers: a cast to bfloat16 and back is what XLA may leave out.
    rounded = bits + 0x7FFF + (lax.shift_right_logical(bits, HALF) & 1)
    bits = jnp.where(rows != rows, bits | QUIET, rounded)
    words = rows.shape[-1] // 2
    low, high = bits[..., :words], bits[..., words:]
    return lax.shift_right_logical(low, HALF) | (high & UPPER)


def from_words(words: jax.Array) -> jax.Array:
    """Return the rows [..., 2·W], float32, of words [..., W]."""
    halves = jnp.concatenate([lax.shift_left(words, HALF), words & UPPER], axis=-1)
    return lax.bitcast_convert_type(halves, jnp.float32)
