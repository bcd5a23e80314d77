"""Lookup and update of one stack on a TPU's SparseCores, through jax-tpu-embedding's primitives, inside `shard_map`.

The optimizer that SparseCores run is traced from `rules`, the same function that the portable update runs. It has to be
elementwise: the TPU compiler does not take a sum over a row there. What the SparseCore's update cannot do
(`why_not` lists it) is done by the portable update, which XLA compiles for the TensorCore.

Packed stacks: entry (local row r, sample i) becomes (stored row r // pack, sample i · pack + r % pack), and an
activation is put together out of the columns of its `pack` samples.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from twinstep.spec.errors import UnavailableError
from twinstep.worker.embedding.sparsecore.device import entries as reader
from twinstep.worker.embedding.sparsecore.device import lines, rules, stored
from twinstep.worker.embedding.sparsecore.device import update as portable
from twinstep.worker.embedding.sparsecore.device.entries import Csr
from twinstep.worker.embedding.sparsecore.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    LaProp,
    RowOptimizer,
)
from twinstep.worker.embedding.sparsecore.stacking import Stack

PRIMITIVES = "jax_tpu_embedding.sparsecore.lib.core.primitives"
STILL_WITHOUT_GRADIENT = (SGD, Adagrad)
"""Optimizers under which a value without a gradient keeps its bits: they may run over a whole packed row."""


def primitive(module: str) -> Any:
    """Return a primitive of jax-tpu-embedding.

    Raises:
        UnavailableError: it is not installed.
    """
    import importlib

    try:
        return getattr(importlib.import_module(f"{PRIMITIVES}.{module}"), f"tpu_{module}_primitive")
    except ImportError as error:
        raise UnavailableError(
            "jax-tpu-embedding, which lowers lookups to SparseCores, is not installed",
            remedy="pip install 'twinstep[worker,sparsecore]', or use the portable backend",
        ) from error


def look_up(table: jax.Array, buffers: tuple[Csr, ...], stack: Stack, minibatches: jax.Array | None) -> jax.Array:
    """Return one device's activations, [S·B, W]: `lookup.look_up` on SparseCores. Ids are trusted."""
    assert stack.limits is not None, "the engine checked it"  # noqa: S101
    quantization = stack.quantization
    total = None
    for csr in buffers:
        found = primitive("sparse_dense_matmul_csr").bind(
            *_stored_ids(csr, stack),
            jnp.int32(1) if minibatches is None else minibatches,
            table,
            device_batch_size=_samples(stack) * stack.pack,
            max_ids_per_partition=stack.limits.max_ids,
            max_unique_ids_per_partition=stack.limits.max_unique,
            sharding_strategy=1,
            quantization_config=quantization and (quantization.low, quantization.high, quantization.num_buckets),
            enable_minibatching=minibatches is not None,
        )
        total = found if total is None else total + found
    assert total is not None, "a stack has at least one buffer"  # noqa: S101
    if stack.pack == 1:
        return total
    width = stored.width_of(stack)
    apart = total.reshape(_samples(stack), stack.pack, -1)
    return sum(apart[:, each, each * width : (each + 1) * width] for each in range(stack.pack))


def update(
    state: tuple[jax.Array, ...],
    buffers: tuple[Csr, ...],
    gradients: jax.Array,
    stack: Stack,
    step: jax.Array,
    minibatches: jax.Array | None,
    *,
    axis: str,
    capacity: int,
) -> tuple[jax.Array, ...]:
    """Return (table, *slots) after one step, on SparseCores where they can: `update.apply`. Ids are trusted."""
    optimizer = stack.optimizer
    assert isinstance(optimizer, RowOptimizer), "the engine checked it"  # noqa: S101
    if why_not(stack, len(buffers), minibatches is not None) is not None:
        parts = [reader.read(each, stack, minibatches) for each in buffers]
        entries = parts[0] if len(parts) == 1 else reader.join(parts, stack)
        found, _ = portable.row_gradients(gradients, entries, stack, axis=axis, capacity=capacity)
        return portable.apply(state, found, stack, step=step, axis=axis, access=lines)
    operands = _stored_ids(buffers[0], stack)
    gradients = _spread(gradients, stack)
    if minibatches is not None:
        return _with_minibatches(state, operands, minibatches, gradients, stack, optimizer, step)
    numbers = rules.step_numbers(optimizer, step)
    row = jax.ShapeDtypeStruct((1, stack.stored_dim), jnp.float32)

    def rule(g: jax.Array, w: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        slots, rest = others[: len(state) - 1], others[len(state) - 1 :]
        new, kept = rules.updated(optimizer, g, w, slots, rest)
        return (new, *kept)

    jaxpr = jax.make_jaxpr(rule)(*[row] * (1 + len(state) + len(numbers)))
    found = primitive("sparse_dense_matmul_optimizer_grad").bind(
        *operands,
        jnp.int32(1),
        gradients,
        *numbers,
        *state,
        num_hyperparameters=len(numbers),
        jaxpr=jaxpr,
        computation_name=f"{optimizer.kind}-{stack.name}",
        **_limits(stack),
    )
    return tuple(found)


def why_not(stack: Stack, blocks: int, minibatches: bool) -> str | None:
    """Return why the SparseCore's own update cannot make a stack's step, or None."""
    optimizer = stack.optimizer
    assert isinstance(optimizer, RowOptimizer), "the engine checked it"  # noqa: S101
    if optimizer.kind not in rules.RULES:
        return f"{optimizer.kind} takes a mean over a row, and its update is elementwise"
    if optimizer.clip_norm is not None:
        return "clip_norm needs the gradient of the whole table before the first row is updated"
    if blocks > 1:
        return "a row may be named by several blocks of samples, and is to be updated once"
    if stack.pack > 1 and not isinstance(optimizer, STILL_WITHOUT_GRADIENT):
        return f"{optimizer.kind} would move rows without a gradient that are packed beside one with"
    if stack.pack > 1 and optimizer.weight_decay:
        return "weight decay would move rows without a gradient that are packed beside one with"
    if minibatches and (optimizer.weight_decay or optimizer.clip_value is not None):
        return "with mini-batches it knows no weight decay and no clipping"
    if minibatches and isinstance(optimizer, Adagrad) and optimizer.eps:
        return "with mini-batches its Adagrad has no eps"
    return None


def _limits(stack: Stack) -> dict[str, int]:
    assert stack.limits is not None, "the engine checked it"  # noqa: S101
    return {
        "max_ids_per_partition": stack.limits.max_ids,
        "max_unique_ids_per_partition": stack.limits.max_unique,
        "sharding_strategy": 1,
    }


def _samples(stack: Stack) -> int:
    return stack.cores.per_device * stack.samples_per_core


def _stored_ids(csr: Csr, stack: Stack) -> Csr:
    """Return buffers that speak of stored rows; what is padding stays so, for the row pointers are the same."""
    if stack.pack == 1:
        return csr
    rows = csr.embedding_ids
    real = rows < stack.rows_per_shard
    return csr._replace(
        embedding_ids=jnp.where(real, rows // stack.pack, rows),
        sample_ids=jnp.where(real, csr.sample_ids * stack.pack + rows % stack.pack, csr.sample_ids),
    )


def _spread(gradients: jax.Array, stack: Stack) -> jax.Array:
    """Return gradients of the `pack` samples that stand for each, each in its own columns."""
    if stack.pack == 1:
        return gradients
    width = stored.width_of(stack)
    own = [
        jnp.pad(gradients, ((0, 0), (each * width, stack.stored_dim - (each + 1) * width)))
        for each in range(stack.pack)
    ]
    return jnp.stack(own, axis=1).reshape(-1, stack.stored_dim)


def _with_minibatches(
    state: tuple[jax.Array, ...],
    operands: Csr,
    minibatches: jax.Array,
    gradients: jax.Array,
    stack: Stack,
    optimizer: RowOptimizer,
    step: jax.Array,
) -> tuple[jax.Array, ...]:
    """Run jax-tpu-embedding's own optimizers: only they take mini-batches."""
    numbers, more = _their_numbers(optimizer, step)
    found = primitive(f"sparse_dense_matmul_grad_with_{optimizer.kind}").bind(
        *operands,
        minibatches,
        *state,
        gradients,
        *numbers,
        enable_minibatching=True,
        computation_name=f"{optimizer.kind}-{stack.name}",
        min_value=optimizer.weight_min,
        max_value=optimizer.weight_max,
        **_limits(stack),
        **more,
    )
    return tuple(jax.tree.leaves(found))


def _their_numbers(optimizer: RowOptimizer, step: jax.Array) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Return the operands after the gradient, in the order of each primitive, and its own parameters."""
    rate, *rest = rules.step_numbers(optimizer, step)

    def numbers(*values: float) -> tuple[jax.Array, ...]:
        return tuple(jnp.float32(value) for value in values)

    match optimizer:
        case AdagradMomentum():
            constants = numbers(optimizer.momentum, optimizer.beta2, optimizer.eps, optimizer.exponent)
            return (rate, *constants, jnp.asarray(optimizer.nesterov)), {}
        case Adam():
            return (rate, *numbers(optimizer.beta1, optimizer.beta2), rest[0]), {}
        case FTRL():
            constants = numbers(optimizer.power, optimizer.l1, optimizer.l2, optimizer.beta)
            return (rate, *constants), {"multiply_linear_by_learning_rate": optimizer.multiply_linear}
        case LaProp():
            return (rate, *numbers(optimizer.beta1), rest[0], *numbers(optimizer.eps)), {}
    return (rate,), {}
