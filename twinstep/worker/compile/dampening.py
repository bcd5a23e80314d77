"""SGD with momentum m and dampening d: the buffer is g at a parameter's first step, later m·buffer + (1 − d)·g.

Eager knows the first step by a buffer that is not there. A captured step's buffers are always there, so one that has
taken no step yet is filled with −0.0: as a number it is the zero that momentum starts from, and it stays what it is in
state dicts and checkpoints. No step leaves a −0.0 behind.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NOT_STEPPED = -0.0
"""What a buffer is filled with that has taken no step."""


def is_dampened(group: Mapping[str, Any]) -> bool:
    """Say whether a parameter group's first step differs from all others."""
    return bool(group.get("momentum") and group.get("dampening"))


@contextlib.contextmanager
def first_steps_followed() -> Iterator[None]:
    """Let SGD find out in the graph, buffer by buffer, whether a step is the first, for the length of a block."""
    module: Any = importlib.import_module("torch.optim.sgd")
    plain = module._single_tensor_sgd

    def step(
        params: list[Tensor], grads: list[Tensor], buffers: Sequence[Tensor | None], *scaling: Any, **settings: Any
    ) -> None:
        if not is_dampened(settings):
            plain(params, grads, buffers, *scaling, **settings)
            return
        for parameter, gradient, buffer in zip(params, grads, buffers, strict=True):
            assert buffer is not None, "state is made before a step is captured"  # noqa: S101
            _step_buffer(buffer, _decayed(gradient, parameter, settings), settings)
        off = {"weight_decay": 0, "momentum": 0, "dampening": 0, "maximize": False}
        plain(params, list(buffers), [None] * len(params), *scaling, **{**settings, **off})

    module._single_tensor_sgd = step
    try:
        yield
    finally:
        module._single_tensor_sgd = plain


def _decayed(gradient: Tensor, parameter: Tensor, settings: Mapping[str, Any]) -> Tensor:
    gradient = -gradient if settings["maximize"] else gradient
    decay = settings["weight_decay"]
    return gradient.add(parameter, alpha=decay) if decay else gradient


def _step_buffer(buffer: Tensor, gradient: Tensor, settings: Mapping[str, Any]) -> None:
    first = ((buffer == 0) & torch.signbit(buffer)).all()
    later = buffer.mul(settings["momentum"]).add(gradient, alpha=1 - settings["dampening"])
    new = torch.where(first, gradient, later)
    buffer.copy_(torch.where(new == 0, torch.zeros_like(new), new))
