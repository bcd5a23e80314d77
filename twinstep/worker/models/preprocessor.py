"""From embeddings to the token sequence: contextual slots, history with its actions, candidates without theirs.

# Shapes: B rows, C contextual slots, E table width, D token width, T history tokens, J action bits, N = T + B*K
# history tokens and candidates together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from twinstep.worker.models.layers import mlp


class ActionEncoder(nn.Module):
    """Action words of history tokens, one embedding per bit; candidates share one learned vector instead."""

    _combined_action_weights: Tensor

    def __init__(self, masks: Sequence[int], dim: int) -> None:
        super().__init__()
        self._action_embedding_table = nn.Parameter(torch.empty(len(masks), dim))
        self._target_action_embedding_table = nn.Parameter(torch.empty(1, len(masks) * dim))
        self.register_buffer("_combined_action_weights", torch.tensor(list(masks), dtype=torch.int64))

    def forward(self, actions_T: Tensor, num_targets: int) -> tuple[Tensor, Tensor]:
        """Return [T, J · dim], zeros where a bit is not set, and [num_targets, J · dim]."""
        has_TJ = torch.bitwise_and(actions_T.unsqueeze(1), self._combined_action_weights) > 0
        history = torch.where(has_TJ.unsqueeze(2), self._action_embedding_table, 0.0).flatten(1)
        return history, self._target_action_embedding_table.expand(num_targets, -1)


class ContextualPreprocessor(nn.Module):
    """Content, additional and action MLPs, summed; and one affine map per contextual slot."""

    def __init__(
        self,
        *,
        embedding_dim: int,
        dim: int,
        hidden_dim: int,
        num_contextual: int,
        num_additional: int,
        action_masks: Sequence[int],
        action_dim: int,
    ) -> None:
        super().__init__()
        self._num_additional = num_additional
        if num_contextual:
            self._batched_contextual_linear_weights = nn.Parameter(torch.empty(num_contextual, embedding_dim, dim))
            self._batched_contextual_linear_bias = nn.Parameter(torch.zeros(num_contextual, dim))
        self._content_embedding_mlp = mlp(embedding_dim, hidden_dim, dim)
        # With no additional feature it has no inputs and is never called, but public checkpoints hold it.
        self._additional_embedding_mlp = mlp(embedding_dim * num_additional, hidden_dim, dim)
        self._action_encoder = ActionEncoder(action_masks, action_dim)
        self._action_embedding_mlp = mlp(action_dim * len(action_masks), hidden_dim, dim)

    def tokens(
        self, content_NE: Tensor, additional_NE: Tensor | None, actions_T: Tensor, join: Callable[..., Tensor]
    ) -> Tensor:
        """Return history tokens and candidates, [N, D]; `join` brings the two parts to the order of N."""
        x_ND: Tensor = self._content_embedding_mlp(content_NE)
        if additional_NE is not None:
            x_ND = x_ND + self._additional_embedding_mlp(additional_NE)
        encoded = self._action_encoder(actions_T, content_NE.shape[0] - actions_T.shape[0])
        out: Tensor = x_ND + self._action_embedding_mlp(join(*encoded))
        return out

    def contextual(self, embedded_BCE: Tensor) -> Tensor:
        """Return the contextual tokens, [B, C, D]."""
        mapped = torch.einsum("bce,ced->bcd", embedded_BCE, self._batched_contextual_linear_weights)
        return mapped + self._batched_contextual_linear_bias
