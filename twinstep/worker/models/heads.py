"""What a model returns, the weighted loss of each task, and DLRMv3's heads: one logit per task from user ⊙ item.

# Shapes: Q tasks, R = B*K candidate slots, D token width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinstep.worker.models.config import TaskConfig
from twinstep.worker.models.layers import Linear, SwishLayerNorm


class ModelOutput(NamedTuple):
    """What a model returns for a batch."""

    loss: Tensor
    """[] float32: sum of the task losses."""
    task_losses: Tensor
    """[Q] float32."""
    logits: Tensor
    """[Q, B, K] float32: logits of binary tasks, predictions of regressions; of no meaning in empty slots. DLRM's K is
    1."""


class MultitaskModule(nn.Module):
    """Linear(D, hidden) → SwishLayerNorm → Linear(hidden, Q); binary tasks first, then regressions."""

    def __init__(self, tasks: Sequence[TaskConfig], *, dim: int, hidden_dim: int, loss_weight: float) -> None:
        super().__init__()
        self._num_binary = count_binary(tasks)
        self._loss_weight = loss_weight
        self._prediction_module = nn.Sequential(
            Linear(dim, hidden_dim), SwishLayerNorm(hidden_dim), Linear(hidden_dim, len(tasks))
        )

    def forward(self, user_RD: Tensor, item_RD: Tensor) -> Tensor:
        """Return logits (binary) and predictions (regression), [Q, R]."""
        out: Tensor = self._prediction_module(user_RD * item_RD)
        return out.t()

    def losses(self, logits_QR: Tensor, labels_QR: Tensor, weights_QR: Tensor) -> Tensor:
        """Return each task's loss, [Q], times `loss_weight`; see `task_losses`."""
        return task_losses(logits_QR, labels_QR, weights_QR, num_binary=self._num_binary) * self._loss_weight


def task_losses(logits_QR: Tensor, labels_QR: Tensor, weights_QR: Tensor, *, num_binary: int) -> Tensor:
    """Return Σ(loss ⊙ w) / max(Σ w, 1) per task, [Q]; a task without weight has loss 0.

    The first `num_binary` tasks have the binary cross-entropy of a logit, the others the squared error. A label
    of weight 0 may be NaN, which is how data says that there is none: it reaches neither the loss nor a gradient.
    """
    counts_QR = weights_QR > 0
    # Hidden before the loss, not after it alone: a gradient of 0 · NaN would be NaN.
    labels_QR = torch.where(counts_QR, labels_QR, 0.0)
    parts = []
    if num_binary:
        parts.append(
            F.binary_cross_entropy_with_logits(logits_QR[:num_binary], labels_QR[:num_binary], reduction="none")
        )
    if num_binary < logits_QR.shape[0]:
        parts.append((logits_QR[num_binary:] - labels_QR[num_binary:]).square())
    loss_QR = torch.cat(parts, dim=0)
    weighted = torch.where(counts_QR, loss_QR * weights_QR, 0.0).sum(1)
    return weighted / weights_QR.sum(1).clamp(min=1.0)


def count_binary(tasks: Sequence[TaskConfig]) -> int:
    """Return the number of binary tasks, which stand before the regressions."""
    kinds = [task.kind for task in tasks]
    assert kinds == sorted(kinds), "binary tasks stand before regressions"  # noqa: S101
    return kinds.count("binary")
