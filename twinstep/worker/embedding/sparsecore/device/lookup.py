"""Lookup of one stack on one device, in plain JAX: entries in, activations out. Runs inside `shard_map`.

Shapes as in `entries`: S, N, E, B, R, C, W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from twinstep.worker.embedding.sparsecore.device import exchange, stored
from twinstep.worker.embedding.sparsecore.device.entries import Entries
from twinstep.worker.embedding.sparsecore.spec import Quantization
from twinstep.worker.embedding.sparsecore.stacking import Stack


class Checks(NamedTuple):
    """What was found wrong on one device, 0-d int32 each; zeros are good."""

    out_of_range: jax.Array
    """Entries whose row or sample does not exist."""
    left_out: jax.Array
    """Rows for which an exchange had no slot: limits that the buffers do not keep to."""
    not_finite: jax.Array
    """Values looked up, or gradients of rows, that are no finite numbers."""

    def over(self, axis: str) -> Checks:
        """Return the sums over all devices."""
        return Checks(*(jax.lax.psum(each, axis) for each in self))


def look_up(
    table: jax.Array, entries: Entries, stack: Stack, *, axis: str, capacity: int, check_finite: bool = False
) -> tuple[jax.Array, Checks]:
    """Return one device's activations.

    Args:
        table: this device's part of the stored stack.
        entries: of this device's samples, in order.
        stack: whose they are.
        axis: the mesh axis that devices are along.
        capacity: C, slots of a window.
        check_finite: count values that are no finite numbers.

    Returns:
        [S·B, W] float32: for each sample the sum of gain · row over its entries, in the order of rows; zeros without
        entries. And what was found wrong.
    """
    windows = exchange.plan(entries, stack, capacity)
    asked = exchange.send(windows.rows, stack, axis)
    found = stored.take(table, exchange.device_rows(asked, stack), stack)
    if stack.quantization is not None:
        found = quantized(found, stack.quantization)
    rows = jnp.take(exchange.send_back(found, stack, axis), windows.slot, axis=0, mode="fill", fill_value=0)
    samples = stack.cores.per_device * stack.samples_per_core
    at = jnp.where(entries.valid, entries.core * stack.samples_per_core + entries.sample, samples)
    gained = jnp.where(entries.valid[:, None], entries.gain[:, None] * rows, 0.0)
    out = jnp.zeros((samples, rows.shape[1]), jnp.float32).at[at].add(gained, mode="drop")
    wrong = jnp.sum(~jnp.isfinite(out), dtype=jnp.int32) if check_finite else jnp.int32(0)
    return out, Checks(entries.out_of_range, windows.left_out, wrong)


def quantized(x: jax.Array, how: Quantization) -> jax.Array:
    """Round to the nearest of `num_buckets` values from `low` to `high`, as TensorFlow's QuantizationConfig says.

    Gradients of activations go to rows as if nothing had been rounded (straight-through).
    """
    step = (how.high - how.low) / (how.num_buckets - 1)
    held = jnp.clip(x, how.low, how.high)
    return jnp.floor((held - how.low) / step + 0.5) * step + how.low


def unstack(activations: jax.Array, stack: Stack) -> dict[str, jax.Array]:
    """Return each feature's activations of this device, [samples / D, dim], out of [S·B, W]."""
    cores, count = stack.cores.per_device, stack.cores.count
    by_core = activations.reshape(cores, stack.samples_per_core, -1)
    dims = {each.table.name: each.table.dim for each in stack.placements}
    return {
        place.feature.name: by_core[:, place.row_offset // count :, : dims[place.feature.table]][
            :, : place.feature.samples // count
        ].reshape(-1, dims[place.feature.table])
        for place in stack.features
    }


def restack(gradients: Mapping[str, jax.Array], stack: Stack) -> jax.Array:
    """Return [S·B, W] out of each feature's [samples / D, dim]: the inverse of `unstack`, padded with zeros."""
    cores, width = stack.cores.per_device, stored.width_of(stack)
    parts = []
    for place in stack.features:
        gradient = gradients[place.feature.name]
        padded = jnp.pad(gradient, ((0, 0), (0, width - gradient.shape[1])))
        parts.append(padded.reshape(cores, -1, width))
    return jnp.concatenate(parts, axis=1).reshape(-1, width)
