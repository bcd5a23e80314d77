"""Padded CSR buffers, read: one device's buffers of a stack become a list of entries, whatever their layout.

An entry says: sample `i` of SparseCore `s` wants local row `r` of shard `p`, times a gain. Slots between and behind
partitions are padding, whatever they hold: the row pointers alone say what is an entry.

Shapes: D devices, S SparseCores of a device, N = S·D shards, P = max(N, 8) row pointers of a SparseCore, E slots of a
device's buffer, B stacked samples of a SparseCore, R local rows of a shard, C capacity of an exchange, W width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from twinstep.worker.embedding.sparsecore.stacking import Stack

SEGMENT_ALIGN = 8  # slots: where a partition may start; jax-tpu-embedding
LEAST_POINTERS = 8  # row pointers of a SparseCore, however few shards there are


class Csr(NamedTuple):
    """A device's part of one stack's buffers; see docs/howto/use-sparsecores.md for the two layouts."""

    row_pointers: jax.Array
    """int32, [S·P], or [S·P·64] with mini-batches."""
    embedding_ids: jax.Array
    """[E] int32: local rows of a shard."""
    sample_ids: jax.Array
    """[E] int32: stacked samples of a SparseCore."""
    gains: jax.Array
    """[E] float32."""


class Entries(NamedTuple):
    """All [E]. Ordered by SparseCore, shard, row, sample; invalid ones stand anywhere."""

    core: jax.Array
    """s: SparseCore of this device whose sample asks."""
    shard: jax.Array
    """p: shard that has the row."""
    row: jax.Array
    """r: its local row."""
    sample: jax.Array
    """i: stacked sample of the SparseCore."""
    gain: jax.Array
    valid: jax.Array
    """bool: an entry at all, and in range."""
    out_of_range: jax.Array
    """0-d int32: entries whose row or sample does not exist; they are not valid."""


def pointers_of(stack: Stack) -> int:
    """Return the row pointers of one device in the plain layout: S·P."""
    return stack.cores.per_device * max(stack.cores.count, LEAST_POINTERS)


def read(csr: Csr, stack: Stack, minibatches: jax.Array | None = None) -> Entries:
    """Return the entries of one device's buffers.

    Args:
        csr: the buffers.
        stack: whose they are.
        minibatches: M, 0-d int32, where the buffers have the layout with mini-batches; the entries are then sorted,
            so that nothing computed from them depends on how the batch was split.
    """
    slots = csr.embedding_ids.shape[0]
    pointers = pointers_of(stack) // stack.cores.per_device
    core, shard, inside = (
        _plain(csr.row_pointers, slots, stack.cores.per_device, pointers)
        if minibatches is None
        else _split(csr.row_pointers, slots, pointers, stack.cores.per_device * minibatches, minibatches)
    )
    known = (
        (shard < stack.cores.count)
        & (csr.embedding_ids >= 0)
        & (csr.embedding_ids < stack.rows_per_shard)
        & (csr.sample_ids >= 0)
        & (csr.sample_ids < stack.samples_per_core)
    )
    found = Entries(
        core=core,
        shard=shard,
        row=csr.embedding_ids,
        sample=csr.sample_ids,
        gain=csr.gains,
        valid=inside & known,
        out_of_range=jnp.sum(inside & ~known, dtype=jnp.int32),
    )
    return found if minibatches is None else _sorted(found, stack)


def join(parts: list[Entries], stack: Stack) -> Entries:
    """Return the entries of several buffers of one device as one sorted list: the blocks of a split batch.

    The sum over a row's samples runs in the same order as in one buffer, so results are the same bits.
    """
    together = [jnp.concatenate(each) for each in zip(*(part[:-1] for part in parts), strict=True)]
    found = jnp.stack([part.out_of_range for part in parts])
    return _sorted(Entries._make((*together, jnp.sum(found, dtype=jnp.int32))), stack)


def _plain(row_pointers: jax.Array, slots: int, cores: int, pointers: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Segments [core][shard]; each SparseCore has its own part of the buffer, and pointers count from its start."""
    part = slots // cores
    base = jnp.repeat(jnp.arange(cores, dtype=jnp.int32) * part, pointers)
    ends = base + row_pointers
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), _aligned(row_pointers[:-1])])
    first = jnp.arange(cores * pointers) % pointers == 0
    starts = base + jnp.where(first, 0, before)
    at, inside = _segment_of(starts, ends, slots)
    return at // pointers, at % pointers, inside


def _split(
    row_pointers: jax.Array, slots: int, pointers: int, segments: jax.Array, minibatches: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Segments [core][minibatch][shard], packed one after another; pointers count from the buffer's start."""
    used = jnp.arange(row_pointers.shape[0]) < segments * pointers
    ends = jnp.where(used, row_pointers, slots)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), _aligned(ends[:-1])])
    at, inside = _segment_of(jnp.where(used, starts, slots), ends, slots)
    return at // (minibatches * pointers), at % pointers, inside


def _segment_of(starts: jax.Array, ends: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """Return for each slot the segment that it is in or before, and whether it is in it."""
    ended = jnp.zeros(slots + 1, jnp.int32).at[jnp.clip(ends, 0, slots)].add(1)
    at = jnp.cumsum(ended)[:slots]
    place = jnp.arange(slots, dtype=jnp.int32)
    within = jnp.minimum(at, starts.shape[0] - 1)
    return within, (at < starts.shape[0]) & (place >= starts[within]) & (place < ends[within])


def _aligned(value: jax.Array) -> jax.Array:
    return -(-value // SEGMENT_ALIGN) * SEGMENT_ALIGN


def _sorted(found: Entries, stack: Stack) -> Entries:
    """Order by SparseCore, shard, row, sample; what is not valid goes last."""
    last = jnp.where(found.valid, found.core, stack.cores.per_device)
    order = jnp.lexsort((found.sample, found.row, found.shard, last))
    return Entries._make((*(each[order] for each in found[:-1]), found.out_of_range))
