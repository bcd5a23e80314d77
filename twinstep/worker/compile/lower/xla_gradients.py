"""Ops, gradients mostly, that torchax lacks: written on JAX arrays, one table, each held to eager PyTorch by a test.

A gradient is JAX's own of the forward op written here, so the two cannot disagree. What a case is not written for
(pooling with ceil_mode, dropout inside attention) is a CompileError.

# Shapes: N samples, C channels, H × W pixels; B batch, H heads, L queries, S keys, E width in attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from twinstep.spec.errors import CompileError

aten = torch.ops.aten


def _unwritten(what: str) -> CompileError:
    return CompileError(
        f"XLA has no lowering for {what}", remedy="set compile.backend: inductor, or write the step without it"
    )


def _elu(x: jax.Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> jax.Array:
    return jnp.where(x > 0, x * scale, alpha * scale * jnp.expm1(jnp.minimum(x, 0) * input_scale))


def _softshrink_backward(grad: jax.Array, x: jax.Array, lambd: float) -> jax.Array:
    return jnp.where(jnp.abs(x) <= lambd, 0, grad)


def _logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    return jax.lax.cumlogsumexp(x, axis=dim % x.ndim)


def _searchsorted(
    edges: jax.Array,
    x: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    if edges.ndim != 1 or sorter is not None:
        raise _unwritten("searchsorted in several rows of edges, or with a sorter")
    return jnp.searchsorted(edges, x, side="right" if right or side == "right" else "left")


def _convolution_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
        if transposed:
            return _transposed_convolution(x, weight, stride, padding, dilation, output_padding, groups)
        return jax.lax.conv_general_dilated(
            x,
            weight,
            tuple(stride),
            [(each, each) for each in padding],
            rhs_dilation=tuple(dilation),
            feature_group_count=groups,
        )

    _, back = jax.vjp(forward, x, weight)
    of_x, of_weight = back(grad)
    of_bias = grad.sum((0, *range(2, grad.ndim)))
    return tuple(each if wanted else None for each, wanted in zip((of_x, of_weight, of_bias), output_mask, strict=True))


def _transposed_convolution(
    x: jax.Array,
    weight: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """A convolution whose input has zeros between its pixels (torch.nn.ConvTranspose2d); kernels are turned around.

    Args:
        x: [N, C_in, *pixels].
        weight: [C_in, C_out / groups, *kernel].
        stride: one number, or one for each dimension of the pixels; so are the next three.
    """
    count = x.ndim - 2
    step, edge, apart, more = (
        tuple(each) * (count // len(each)) for each in (stride, padding, dilation, output_padding)
    )
    kernel = weight.shape[2:]
    flipped = jnp.flip(weight, tuple(range(2, weight.ndim)))
    grouped = flipped.reshape(groups, weight.shape[0] // groups, *flipped.shape[1:]).swapaxes(1, 2)
    reach = [gap * (size - 1) - cut for gap, size, cut in zip(apart, kernel, edge, strict=True)]
    return jax.lax.conv_general_dilated(
        x,
        grouped.reshape(-1, *grouped.shape[2:]),
        (1,) * count,
        [(each, each + extra) for each, extra in zip(reach, more, strict=True)],
        lhs_dilation=step,
        rhs_dilation=apart,
        feature_group_count=groups,
    )


def _weight_norm_backward(
    grad: jax.Array, v: jax.Array, g: jax.Array, norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Return gradients of v and g in w = v · g / ‖v‖, norms over all dimensions but `dim` (arXiv:1602.07868)."""
    others = tuple(each for each in range(v.ndim) if each != dim % v.ndim)

    def forward(v: jax.Array, g: jax.Array) -> jax.Array:
        return v * (g / jnp.sqrt((v * v).sum(others, keepdims=True)))

    _, back = jax.vjp(forward, v, g)
    return back(grad)  # type: ignore[no-any-return]


def _avg_pool2d_backward(
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> jax.Array:
    kernel = tuple(kernel_size) * (2 // len(kernel_size))
    step = (tuple(stride) or kernel) * (2 // len(tuple(stride) or kernel))
    edge = tuple(padding) * (2 // len(padding))
    if ceil_mode:
        raise _unwritten("the gradient of avg_pool2d with ceil_mode")
    window, strides = (1,) * (x.ndim - 2) + kernel, (1,) * (x.ndim - 2) + step
    edges = [(0, 0)] * (x.ndim - 2) + [(each, each) for each in edge]

    def sums(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, strides, edges)  # type: ignore[no-any-return]

    counts: Any = divisor_override or math.prod(kernel)
    if divisor_override is None and not count_include_pad:
        counts = sums(jnp.ones_like(x))
    _, back = jax.vjp(lambda x: sums(x) / counts, x)
    return back(grad)[0]  # type: ignore[no-any-return]


def _max_pool2d_backward(
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    """Of equal numbers in a window the first takes the gradient, as `indices` say too."""
    if ceil_mode or any(each != 1 for each in dilation):
        raise _unwritten("the gradient of max_pool2d with ceil_mode or dilation")
    kernel, step, edge = (tuple(each) * (2 // len(each)) for each in (kernel_size, stride or kernel_size, padding))
    ones = (1,) * (x.ndim - 2)
    edges = [(0, 0)] * (x.ndim - 2) + [(each, each) for each in edge]
    _, back = jax.vjp(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, ones + kernel, ones + step, edges), x)
    return back(grad)[0]  # type: ignore[no-any-return]


def _along_pixels(grad: jax.Array, rows_OH: np.ndarray, columns_OW: np.ndarray) -> jax.Array:
    """Return the gradient of `rows_OH @ x @ columns_OWᵀ`, which each of the resizing ops is."""
    return jnp.einsum("oh,...op,pw->...hw", jnp.asarray(rows_OH), grad, jnp.asarray(columns_OW))


def _adaptive_avg_pool2d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _along_pixels(grad, *map(_bins, grad.shape[-2:], x.shape[-2:]))


def _bins(out: int, size: int) -> np.ndarray:
    """Return the averages that adaptive pooling takes, [out, size]: bin o is from ⌊o·size/out⌋ to ⌈(o+1)·size/out⌉."""
    found = np.zeros((out, size), np.float32)
    for each in range(out):
        start, end = each * size // out, -(-(each + 1) * size // out)
        found[each, start:end] = 1 / (end - start)
    return found


def _nearest_backward(
    grad: jax.Array, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> jax.Array:
    factors = (*scales, None, None)[:2]
    return _along_pixels(grad, *map(_nearest, output_size, input_size[-2:], factors))


def _nearest(out: int, size: int, factor: float | None) -> np.ndarray:
    step = np.float32(1 / factor) if factor else np.float32(size / out)
    found = np.zeros((out, size), np.float32)
    found[np.arange(out), np.minimum(np.floor(np.arange(out, dtype=np.float32) * step).astype(int), size - 1)] = 1
    return found


def _bilinear(x: jax.Array, output_size: Sequence[int], align_corners: bool, *scales: float | None) -> jax.Array:
    factors = (*scales, None, None)[:2]
    rows, columns = (
        _linear(out, size, align_corners, factor)
        for out, size, factor in zip(output_size, x.shape[-2:], factors, strict=True)
    )
    return jnp.einsum("oh,...hw,pw->...op", jnp.asarray(rows), x, jnp.asarray(columns))


def _bilinear_backward(
    grad: jax.Array, output_size: Sequence[int], input_size: Sequence[int], align_corners: bool, *scales: float | None
) -> jax.Array:
    _, back = jax.vjp(
        lambda x: _bilinear(x, output_size, align_corners, *scales), jnp.zeros(tuple(input_size), grad.dtype)
    )
    return back(grad)[0]  # type: ignore[no-any-return]


def _linear(out: int, size: int, align_corners: bool, factor: float | None) -> np.ndarray:
    """Return the weights of linear interpolation, [out, size]."""
    if align_corners:
        places = np.arange(out) * ((size - 1) / (out - 1) if out > 1 else 0.0)
    else:
        places = np.maximum((np.arange(out) + 0.5) * (1 / factor if factor else size / out) - 0.5, 0)
    low = np.minimum(places.astype(int), size - 1)
    high = np.minimum(low + 1, size - 1)
    found = np.zeros((out, size), np.float32)
    np.add.at(found, (np.arange(out), low), 1 - (places - low))
    np.add.at(found, (np.arange(out), high), places - low)
    return found


def _attention_backward(
    grad_BHLE: jax.Array,
    q_BHLE: jax.Array,
    k_BHSE: jax.Array,
    v_BHSE: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if dropout_p:
        raise _unwritten("the gradient of attention with dropout inside")

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhle,bhse->bhls", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        if attn_mask is not None:
            is_bool = attn_mask.dtype == jnp.bool_
            scores = jnp.where(attn_mask, scores, -jnp.inf) if is_bool else scores + attn_mask
        seen = (scores > -jnp.inf).any(axis=-1, keepdims=True)  # a query that sees no key gives 0, and takes nothing
        weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, 0.0), axis=-1), 0.0)
        return jnp.einsum("bhls,bhse->bhle", weights, v)

    _, back = jax.vjp(forward, q_BHLE, k_BHSE, v_BHSE)
    return back(grad_BHLE)  # type: ignore[no-any-return]


OPS: dict[Any, Callable[..., Any]] = {
    aten.elu.default: _elu,
    aten.softshrink_backward.default: _softshrink_backward,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.searchsorted.Tensor: _searchsorted,
    aten.convolution_backward.default: _convolution_backward,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
    aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool2d_backward,
    aten.upsample_nearest2d_backward.default: _nearest_backward,
    aten.upsample_bilinear2d.default: _bilinear,
    aten.upsample_bilinear2d_backward.default: _bilinear_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
"""Ops by overload."""
