"""Embedding bags as plain lookups and sums, a decomposition: XLA has no op for them, and lookups are what passes know.

A bag is a run of ids that `offsets` cut out of one list; its result is the sum or the mean of its rows, those of
`padding_idx` left out (torch.nn.EmbeddingBag). Bags by maximum stay as they are (`xla_bags.py`), and so do gradients
scaled by frequency.
"""

# Shapes: n ids, B bags, D a row's width.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_SUM, _MEAN = 0, 1


def _bag_of_ids(ids: Tensor, offsets: Tensor, num_bags: int) -> Tensor:
    """Return [n]: the bag of each id. The last of equal offsets has the ids; the others' bags are empty."""
    starts = torch.zeros(ids.shape[0] + 1, dtype=torch.int64, device=ids.device)
    starts = starts.index_add(
        0, offsets[:num_bags].to(torch.int64), torch.ones_like(offsets[:num_bags], dtype=torch.int64)
    )
    return starts.cumsum(0)[: ids.shape[0]] - 1


def _counts(bags: Tensor, used: Tensor, num_bags: int) -> Tensor:
    """Return [B]: ids of each bag that are used, 1 at least."""
    return used.new_zeros(num_bags).index_add(0, bags, used).clamp(min=1)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Decompose `aten._embedding_bag`; of its four results the last three are only for its own backward."""
    if mode not in (_SUM, _MEAN) or scale_grad_by_freq:
        return NotImplemented
    num_bags = offsets.shape[0] - int(include_last_offset)
    bags = _bag_of_ids(indices, offsets, num_bags)
    used = (indices != padding_idx).to(weight.dtype)
    scale = used if per_sample_weights is None else used * per_sample_weights
    rows = aten.embedding(weight, indices) * scale.unsqueeze(-1)
    pooled = weight.new_zeros(num_bags, weight.shape[1]).index_add(0, bags, rows)
    counts = _counts(bags, used, num_bags)
    if mode == _MEAN:
        pooled = pooled / counts.unsqueeze(-1)
    return pooled, bags, counts.to(torch.int64), torch.zeros_like(counts, dtype=torch.int64)


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """Decompose `aten._embedding_bag_backward` into the backward of a lookup; what the forward kept is made anew."""
    if mode not in (_SUM, _MEAN) or scale_grad_by_freq:
        return NotImplemented
    bags = _bag_of_ids(indices, offsets, grad.shape[0])
    if mode == _MEAN:
        used = (indices != padding_idx).to(grad.dtype)
        grad = grad / _counts(bags, used, grad.shape[0]).unsqueeze(-1)
    rows = grad.index_select(0, bags)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, False)


BACKWARD: dict[Any, Callable[..., Any]] = {aten._embedding_bag_backward.default: embedding_bag_backward}
"""For a backend with a kernel of its own for the forward."""
BAGS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    **BACKWARD,
}
"""For a backend with none."""
