"""Small layers the parts of DLRMv3 share: SwishLayerNorm, its MLP, dropout that is absent at p = 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """x · sigmoid(LayerNorm(x)), over the last dimension."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self._dim = dim
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return x * torch.sigmoid(F.layer_norm(x, (self._dim,), self.weight, self.bias, self._eps))


class Linear(nn.Module):
    """x @ weightᵀ + bias; unlike nn.Linear it may have no inputs at all, and is filled by its model, not by itself."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] → [..., out_dim]."""
        return F.linear(x, self.weight, self.bias)


def mlp(in_dim: int, hidden_dim: int, out_dim: int) -> nn.Sequential:
    """Return Linear → SwishLayerNorm → Linear → LayerNorm."""
    return nn.Sequential(
        Linear(in_dim, hidden_dim), SwishLayerNorm(hidden_dim), Linear(hidden_dim, out_dim), nn.LayerNorm(out_dim)
    )


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Return F.dropout, or `x` itself when there is nothing to drop: a captured graph then holds no random number."""
    return F.dropout(x, p, training=True) if training and p > 0 else x
