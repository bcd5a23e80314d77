"""Embedding bags by maximum on JAX arrays (torch.nn.EmbeddingBag, mode "max"): torchax has them only for fixed shapes.

Bags by sum and by mean are lookups and sums, which passes know (`bags.py`). A maximum's gradient goes to one row for
each column, the first of the greatest.
"""

# Shapes: n ids, B bags, D a row's width, V rows.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from twinstep.spec.errors import CompileError

aten = torch.ops.aten
_MAX = 2


def _written(mode: int, scale_grad_by_freq: bool) -> None:
    if mode != _MAX or scale_grad_by_freq:
        raise CompileError(
            "XLA has no lowering for embedding bags whose gradients are scaled by frequency",
            remedy="set compile.backend: inductor, or scale_grad_by_freq=False",
        )


def _bag_of_ids(n: int, offsets: jax.Array, num_bags: int) -> jax.Array:
    """Return [n]: the bag of each id. The last of equal offsets has the ids; the others' bags are empty."""
    return jnp.searchsorted(offsets[:num_bags], jnp.arange(n), side="right") - 1


def _embedding_bag(
    weight_VD: jax.Array,
    indices_n: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, ...]:
    """Return maxima [B, D], then what the backward wants: the last is the row each came from, −1 in an empty bag."""
    _written(mode, scale_grad_by_freq)
    n, num_bags = indices_n.shape[0], offsets.shape[0] - int(include_last_offset)
    bags_n = _bag_of_ids(n, offsets, num_bags)
    used_n = indices_n != padding_idx
    rows_nD = jnp.where(used_n[:, None], weight_VD[indices_n], -jnp.inf)
    greatest_BD = jax.ops.segment_max(rows_nD, bags_n, num_bags)
    counts_B = jax.ops.segment_sum(used_n.astype(jnp.int32), bags_n, num_bags)
    places_nD = jnp.where((rows_nD == greatest_BD[bags_n]) & used_n[:, None], jnp.arange(n)[:, None], n)
    first_BD = jax.ops.segment_min(places_nD, bags_n, num_bags)
    empty_B1 = (counts_B == 0)[:, None]
    from_BD = jnp.where(empty_B1, -1, indices_n[jnp.minimum(first_BD, n - 1)])
    return jnp.where(empty_B1, 0.0, greatest_BD), bags_n, counts_B, from_BD


def _embedding_bag_backward(
    grad_BD: jax.Array,
    indices_n: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    from_BD: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    """Return the table's gradient, [V, D]."""
    _written(mode, scale_grad_by_freq)
    columns_D = jnp.arange(grad_BD.shape[1])
    taken_BD = jnp.where(from_BD >= 0, grad_BD, 0.0)
    return (
        jnp.zeros((num_weights, grad_BD.shape[1]), grad_BD.dtype).at[jnp.maximum(from_BD, 0), columns_D].add(taken_BD)
    )


OPS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
}
"""Ops by overload."""
