"""Multitask heads: one logit per task and candidate from user ⊙ item, and the weighted loss of each task.

# Shapes: Q tasks, R = B*K candidate slots, D token width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinstep.worker.models.config import TaskConfig
from twinstep.worker.models.layers import Linear, SwishLayerNorm


class MultitaskModule(nn.Module):
    """Linear(D, hidden) → SwishLayerNorm → Linear(hidden, Q); binary tasks first, then regressions."""

    def __init__(self, tasks: Sequence[TaskConfig], *, dim: int, hidden_dim: int, loss_weight: float) -> None:
        super().__init__()
        kinds = [task.kind for task in tasks]
        assert kinds == sorted(kinds), "binary tasks stand before regressions"  # noqa: S101
        self._num_binary = sum(task.kind == "binary" for task in tasks)
        self._loss_weight = loss_weight
        self._prediction_module = nn.Sequential(
            Linear(dim, hidden_dim), SwishLayerNorm(hidden_dim), Linear(hidden_dim, len(tasks))
        )

    def forward(self, user_RD: Tensor, item_RD: Tensor) -> Tensor:
        """Return logits (binary) and predictions (regression), [Q, R]."""
        out: Tensor = self._prediction_module(user_RD * item_RD)
        return out.t()

    def losses(self, logits_QR: Tensor, labels_QR: Tensor, weights_QR: Tensor) -> Tensor:
        """Return loss_weight · Σ(loss ⊙ w) / max(Σ w, 1) per task, [Q]; a task without weight has loss 0."""
        binary = self._num_binary
        parts = []
        if binary:
            parts.append(F.binary_cross_entropy_with_logits(logits_QR[:binary], labels_QR[:binary], reduction="none"))
        if binary < logits_QR.shape[0]:
            parts.append((logits_QR[binary:] - labels_QR[binary:]).square())
        loss_QR = torch.cat(parts, dim=0)
        weighted = torch.where(weights_QR > 0, loss_QR * weights_QR, 0.0).sum(1)
        return weighted / weights_QR.sum(1).clamp(min=1.0) * self._loss_weight
