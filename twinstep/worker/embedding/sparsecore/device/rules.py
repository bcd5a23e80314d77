"""The optimizers' arithmetic on rows: one function a kind, for the portable update and for the SparseCore's own.

A rule is elementwise but for row-wise Adagrad, which takes a mean over a row. g, w and slots are [rows, W] float32 (or
[1, W], as the TPU compiler asks); numbers that depend on the step come in as 0-d (or [1, W]) arrays, all else is
constant in the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from twinstep.worker.embedding.sparsecore.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    LaProp,
    RowOptimizer,
    RowWiseAdagrad,
)

Slots = tuple[jax.Array, ...]
Rule = Callable[[Any, jax.Array, jax.Array, Slots, Slots], tuple[jax.Array, Slots]]


def step_numbers(optimizer: RowOptimizer, step: jax.Array) -> Slots:
    """Return what the rule takes of the step, 0-d float32 each.

    Args:
        optimizer: whose rule.
        step: 0-d int32, from 0.
    """
    rate = optimizer.schedule.at(step, jnp)
    t = jnp.asarray(step, jnp.float32)
    if isinstance(optimizer, Adam):
        correction = jnp.sqrt(_rest(optimizer.beta2, t + 1.0))
        return rate * correction / _rest(optimizer.beta1, t + 1.0), optimizer.eps * correction
    if isinstance(optimizer, LaProp):
        return rate, optimizer.beta2 * _rest(optimizer.beta2, t) / _rest(optimizer.beta2, t + 1.0)
    return (rate,)


def _rest(beta: float, t: jax.Array) -> jax.Array:
    """Return 1 - beta^t, precise where beta is near 1 and t small: there float32 would lose most of its digits."""
    return -jnp.expm1(t * math.log(beta)) if beta > 0 else jnp.where(t > 0, 1.0, 0.0)


def updated(
    optimizer: RowOptimizer, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots, width: Any = None
) -> tuple[jax.Array, Slots]:
    """Return new weights and slots of rows.

    Args:
        optimizer: kind and constants.
        g: gradients, summed over the batch.
        w: weights.
        slots: as `optimizer.slots` lists them; [rows, 1] where they are per row.
        numbers: of `step_numbers`.
        width: columns that are no padding, where a mean is taken over a row; None: all.
    """
    if optimizer.clip_value is not None:
        g = jnp.clip(g, -optimizer.clip_value, optimizer.clip_value)
    if optimizer.weight_decay:
        g = g + optimizer.weight_decay * w
    if isinstance(optimizer, RowWiseAdagrad):
        new, kept = _rowwise_adagrad(optimizer, g, w, slots, numbers, w.shape[-1] if width is None else width)
    else:
        new, kept = RULES[optimizer.kind](optimizer, g, w, slots, numbers)
    if optimizer.weight_min is not None:
        new = jnp.maximum(new, optimizer.weight_min)
    if optimizer.weight_max is not None:
        new = jnp.minimum(new, optimizer.weight_max)
    return new, kept


def _sgd(o: SGD, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots) -> tuple[jax.Array, Slots]:
    return w - numbers[0] * g, ()


def _adagrad(o: Adagrad, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots) -> tuple[jax.Array, Slots]:
    total = slots[0] + g * g
    root = jnp.sqrt(total)
    if o.eps:
        root = root + o.eps
    # A sum of 0 has only zeros behind it: no step, where 0/0 would be undefined.
    step = (
        numbers[0] * g / root if o.eps or o.initial_accumulator > 0 else jnp.where(root > 0, numbers[0] * g / root, 0)
    )
    return w - step, (total,)


def _rowwise_adagrad(
    o: RowWiseAdagrad, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots, width: Any
) -> tuple[jax.Array, Slots]:
    # Columns of padding have no gradient, and no weight to decay.
    total = slots[0] + jnp.sum(g * g, axis=-1, keepdims=True) / width
    return w - numbers[0] * g / (jnp.sqrt(total) + o.eps), (total,)


def _adagrad_momentum(
    o: AdagradMomentum, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots
) -> tuple[jax.Array, Slots]:
    square = g * g
    total = slots[0] + square if o.beta2 == 1.0 else o.beta2 * slots[0] + (1.0 - o.beta2) * square
    scaled = jnp.power(total + o.eps, -1.0 / o.exponent) * g
    momentum = o.momentum * slots[1] + scaled
    step = o.momentum * momentum + scaled if o.nesterov else momentum
    return w - numbers[0] * step, (total, momentum)


def _adam(o: Adam, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots) -> tuple[jax.Array, Slots]:
    rate, eps = numbers
    first = slots[0] + (1.0 - o.beta1) * (g - slots[0])
    second = slots[1] + (1.0 - o.beta2) * (g * g - slots[1])
    return w - rate * first / (jnp.sqrt(second) + eps), (first, second)


def _ftrl(o: FTRL, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots) -> tuple[jax.Array, Slots]:
    rate = numbers[0]
    total = slots[0] + g * g
    now, was = jnp.power(total, -o.power), jnp.power(slots[0], -o.power)
    if o.multiply_linear:
        linear = slots[1] + rate * g - (now - was) * w
        l1, below = rate * o.l1, now + 2.0 * (rate * o.l2) + o.beta
    else:
        linear = slots[1] + g - (now - was) / rate * w
        l1, below = jnp.full_like(rate, o.l1), (now + o.beta) / rate + 2.0 * o.l2
    above = jnp.minimum(jnp.maximum(linear, -l1), l1) - linear if o.l1 else -linear
    return above / below, (total, linear)


def _laprop(o: LaProp, g: jax.Array, w: jax.Array, slots: Slots, numbers: Slots) -> tuple[jax.Array, Slots]:
    rate, decay = numbers
    square = decay * slots[1] + (1.0 - decay) * (g * g + o.eps)
    momentum = o.beta1 * slots[0] + (1.0 - o.beta1**2) ** 0.5 * (g / jnp.sqrt(square))
    return w - rate * momentum, (momentum, square)


RULES: dict[str, Rule] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adagrad_momentum": _adagrad_momentum,
    "adam": _adam,
    "ftrl": _ftrl,
    "laprop": _laprop,
}
"""By kind; row-wise Adagrad, which is not elementwise, stands apart."""
