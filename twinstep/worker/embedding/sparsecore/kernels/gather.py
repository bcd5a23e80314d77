"""Ids of one source SparseCore → entries `payload << key bits | key`, in order of stacked samples.

The key is `target shard · R + local row`. The payload of an unweighted stack is the stacked sample; of a weighted one
it is the place of arrival, from which sample and gain are read. All numbers are below 2³¹, and are kept in 32 bits so
that the loops run in vector registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import carray, kernel, pointer
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    F_BASE,
    F_IDS,
    F_OFFSETS,
    F_ROTATION,
    F_ROW_OFFSET,
    F_ROWS,
    F_RUN,
    F_WEIGHTS,
    F_WIDE,
    F_WIDTH,
    MEAN,
    S_COMBINER,
    S_FIRST,
    S_KEY_BITS,
    S_LAST,
    S_SHARD_ROWS,
    S_WEIGHTED,
    SUM,
    T_CORE,
)

u32, u64, f32, f64 = np.uint32, np.uint64, np.float32, np.float64


@kernel
def put(ids: Any, low: int, high: int, payload: int, step: int, place: Any, out: Any, n: int) -> Any:
    """Write entries of ids [low, high) from out[n] on; return how many are out of range.

    Args:
        ids: int32 or int64.
        low, high: which of them.
        payload: of the first one.
        step: from one payload to the next: 0 within a sample, 1 where each sample has one id or arrivals are counted.
        place: (rows, shards, shift, rotation, R, row offset, key bits); shift is −1 where N is no power of two.
        out: uint64 entries.
        n: where to write.
    """
    rows, shards, shift, rotation, shard_rows, row_offset, bits = place
    outside = 0
    if shift >= 0:
        for i in range(high - low):
            number = ids[low + i]
            outside += u64(number) >= u64(rows)
            shard = u32((u32(number) + u32(rotation)) & u32(shards - 1))
            key = u64(shard) * u64(u32(shard_rows)) + u64(u32(u32(number) >> u32(shift))) + u64(row_offset)
            out[n + i] = u64(payload + step * i) << u64(bits) | key
        return outside
    for i in range(high - low):
        number = ids[low + i]
        outside += u64(number) >= u64(rows)
        quotient = u32(u32(number) // u32(shards))
        shard = u32(u32(number) - u32(quotient * u32(shards)) + u32(rotation))
        if shard >= u32(shards):
            shard = u32(shard - u32(shards))
        key = u64(shard) * u64(u32(shard_rows)) + u64(quotient) + u64(row_offset)
        out[n + i] = u64(payload + step * i) << u64(bits) | key
    return outside


@kernel
def weigh(weights: Any, low: int, high: int, combiner: int, gains: Any, n: int) -> None:
    """Write gains of one sample's weights [low, high) from gains[n] on, in float32 as jax-tpu-embedding adds them up.

    sum: w. mean: w / Σw. sqrtn: w / √Σw². A sample whose weights sum to 0 has a mean of 0, not of infinity.
    """
    divisor = f32(1.0)
    if combiner == MEAN:
        divisor = f32(0.0)
        for i in range(low, high):
            divisor = f32(divisor + weights[i])
    elif combiner != SUM:
        squares = f32(0.0)
        for i in range(low, high):
            squares = f32(f64(squares) + f64(weights[i]) * f64(weights[i]))
        divisor = f32(np.sqrt(squares))
    for i in range(low, high):
        gains[n + i - low] = f32(0.0) if divisor == f32(0.0) else f32(weights[i] / divisor)


@kernel
def even_gain(count: int, combiner: int) -> Any:
    """Return the gain of each id of an unweighted sample of `count` ids, float32."""
    if combiner == SUM or count == 0:
        return f32(1.0)
    return f32(f32(1.0) / (f32(count) if combiner == MEAN else f32(np.sqrt(f32(count)))))


@kernel
def gather_plain(ids: Any, core: int, row: Any, combiner: int, place: Any, out: Any, gains: Any, n: int) -> Any:
    """Gather one feature of an unweighted stack.

    Returns:
        Entries so far, and how many ids were out of range. `gains` is by stacked sample, and written unless it is a
        plain sum.
    """
    run, base, width = row[F_RUN], row[F_BASE], row[F_WIDTH]
    start, outside = core * run, 0
    ragged = row[F_OFFSETS] != 0
    if not ragged and width == 1:
        if combiner != SUM:
            gains[base : base + run] = f32(1.0)
        return n + run, put(ids, start, start + run, base, 1, place, out, n)
    offsets = carray(pointer(row[F_OFFSETS]), (start + run + 1,), np.int64)
    for sample in range(run):
        low, high = (start + sample) * width, (start + sample + 1) * width
        if ragged:
            low, high = offsets[start + sample], offsets[start + sample + 1]
        if combiner != SUM:
            gains[base + sample] = even_gain(high - low, combiner)
        outside += put(ids, low, high, base + sample, 0, place, out, n)
        n += high - low
    return n, outside


@kernel
def gather_weighted(
    ids: Any, core: int, row: Any, combiner: int, place: Any, out: Any, gains: Any, samples: Any, n: int
) -> Any:
    """Gather one feature of a weighted stack: gains and stacked samples are by place of arrival. Returns as above."""
    run, base, width = row[F_RUN], row[F_BASE], row[F_WIDTH]
    start, outside = core * run, 0
    ragged = row[F_OFFSETS] != 0
    offsets = carray(pointer(row[F_OFFSETS]), (start + run + 1,), np.int64)
    for sample in range(run):
        low, high = (start + sample) * width, (start + sample + 1) * width
        if ragged:
            low, high = offsets[start + sample], offsets[start + sample + 1]
        if row[F_WEIGHTS] != 0:
            weights = carray(pointer(row[F_WEIGHTS]), (high,), np.float32)
            weigh(weights, low, high, combiner, gains, n)
        else:
            gains[n : n + high - low] = even_gain(high - low, combiner)
        samples[n : n + high - low] = base + sample
        outside += put(ids, low, high, n, 1, place, out, n)
        n += high - low
    return n, outside


@kernel
def gather_feature(
    ids: Any, task: Any, stack: Any, row: Any, place: Any, out: Any, gains: Any, samples: Any, n: int
) -> Any:
    """Gather one feature whose ids are int32, or int64."""
    combiner = stack[S_COMBINER]
    if stack[S_WEIGHTED]:
        return gather_weighted(ids, task[T_CORE], row, combiner, place, out, gains, samples, n)
    return gather_plain(ids, task[T_CORE], row, combiner, place, out, gains, n)


@kernel
def gather(task: Any, stack: Any, features: Any, cores: Any, local: int, out: Any, gains: Any, samples: Any) -> Any:
    """Gather all features of a task's stack.

    Args:
        task, stack, features: rows of the tables of `columns`; a task's core is counted over all local devices.
        cores: (shards, shift).
        local: source SparseCores of this host.
        out, gains, samples: where to write.

    Returns:
        Entries, and how many ids were out of range.
    """
    n, outside = 0, 0
    for number in range(stack[S_FIRST], stack[S_LAST]):
        row = features[number]
        place = (
            row[F_ROWS],
            cores[0],
            cores[1],
            row[F_ROTATION],
            stack[S_SHARD_ROWS],
            row[F_ROW_OFFSET],
            stack[S_KEY_BITS],
        )
        count = local * row[F_RUN] * row[F_WIDTH]
        if row[F_WIDE]:
            wide = carray(pointer(row[F_IDS]), (count,), np.int64)
            n, bad = gather_feature(wide, task, stack, row, place, out, gains, samples, n)
        else:
            narrow = carray(pointer(row[F_IDS]), (count,), np.int32)
            n, bad = gather_feature(narrow, task, stack, row, place, out, gains, samples, n)
        outside += bad
    return n, outside
