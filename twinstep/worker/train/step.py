"""The step as one plain PyTorch function: what the compiler captures, what eager runs. No backend is named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from twinstep.worker.embedding.collection import GivenCollection
from twinstep.worker.embedding.optim import split_parameters

Step = Callable[[nn.Module, Mapping[str, Optimizer], Any], Any]


def make_train_step(*, clip_norm: float | None) -> Step:
    """Return a train step that clips the global norm of dense gradients to `clip_norm`, where one is given.

    Tables are left out of the clipping: their gradients are mostly zero and their optimizers scale each row.
    """

    def train_step(model: nn.Module, optimizers: Mapping[str, Optimizer], batch: Any) -> Any:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        output = model(batch)
        output.loss.backward()
        if clip_norm is not None:
            dense = [parameter for _, parameter in split_parameters(model)[0]]
            torch.nn.utils.clip_grad_norm_(dense, clip_norm, foreach=False)
        for optimizer in optimizers.values():
            optimizer.step()
        return output

    return train_step


def make_given_step(given: GivenCollection, *, clip_norm: float | None) -> Step:
    """Return a train step on rows that were looked up before it, and are updated after it, by whoever calls it.

    Its batch is (batch, activations); it returns the outputs and the gradient of each activation. The model's
    collection is `given`; the only optimizer is that of the other parameters.
    """

    def train_step(model: nn.Module, optimizers: Mapping[str, Optimizer], given_batch: Any) -> Any:
        batch, activations = given_batch
        optimizers["dense"].zero_grad()
        leaves = [each.detach().requires_grad_() for each in activations]
        given.give(leaves)
        output = model(batch)
        output.loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm, foreach=False)
        optimizers["dense"].step()
        return output, [each.grad for each in leaves]

    return train_step
