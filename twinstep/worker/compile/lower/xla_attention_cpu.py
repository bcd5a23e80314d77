"""HSTU attention on XLA's CPU: a custom call of the same C++ kernel that PyTorch's programs run.

The call is one program point per (row, head) pair for the partitioner: rows and heads may be spread over devices, slots
and widths may not. Where no kernel can be had (no compiler, a dtype it does not take), the reference runs instead.

# Shapes: B rows, S slots per row, H heads, A query/key width, V value width.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from twinstep.worker.ops import hstu_kernel, native
from twinstep.worker.ops.hstu_attention import AttentionRule

LOG = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("hstu_ffi.cpp")
FORWARD, BACKWARD = "twinstep_hstu_attention", "twinstep_hstu_attention_backward"
DTYPES = (jnp.float32, jnp.bfloat16)
_LENGTHS = ("b", "b", "")
_QKV = ("b s h a", "b s h a", "b s h v")


def has_kernel(q: jax.Array, v: jax.Array) -> bool:
    """Say whether the kernel takes these arrays, and register it with XLA if so."""
    return q.dtype in DTYPES and q.dtype == v.dtype and register(q.shape[3], v.shape[3])


def register(width_qk: int, width_v: int) -> bool:
    """Make the kernel for these head widths known to XLA; say whether there is one.

    A program that was compiled in another process needs this before it runs, if it was not traced in this one.
    """
    kernel, door = hstu_kernel.kernel(width_qk, width_v), _door()
    if kernel is None or door is None:
        return False
    forward, backward = kernel.library.hstu_forward_pair, kernel.library.hstu_backward_pair
    door.hstu_register(
        ctypes.c_int64(width_qk),
        ctypes.c_int64(width_v),
        ctypes.cast(forward, ctypes.c_void_p),
        ctypes.cast(backward, ctypes.c_void_p),
    )
    return True


@functools.cache
def _door() -> ctypes.CDLL | None:
    """Build and load XLA's handlers, and give them their names; None where they cannot be built."""
    flags = (f"-I{hstu_kernel.HEADER.parent}", f"-I{jax.ffi.include_dir()}")
    try:
        # The headers of XLA's FFI keep its version, which is the library's as well.
        library = native.load(
            native.build(SOURCE, flags=(*flags, f"-DJAX={jax.__version__}"), reads=(hstu_kernel.HEADER,))
        )
    except native.BuildError as error:
        LOG.warning("XLA on the CPU runs HSTU attention without its kernel, which is slower: %s", error)
        return None
    for name, handler in ((FORWARD, library.hstu_ffi_forward), (BACKWARD, library.hstu_ffi_backward)):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")  # type: ignore[no-untyped-call]
    return library


def forward(*args: Any) -> jax.Array:
    """Lower the operator; arguments as `xla_attention.Lowering` has them."""
    *arrays, rule, alpha = args
    out: jax.Array = _partitioned(FORWARD, rule, float(alpha))(*_as_taken(*arrays))
    return out


def backward(*args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lower the operator's gradients; arguments as `xla_attention.Lowering` has them."""
    grad, *arrays, rule, alpha = args
    q, *rest = _as_taken(*arrays)
    dq, dk, dv = _partitioned(BACKWARD, rule, float(alpha))(grad.astype(q.dtype), q, *rest)
    return dq, dk, dv


def _as_taken(
    q: jax.Array, k: jax.Array, v: jax.Array, prefix: jax.Array, targets: jax.Array, n: jax.Array
) -> tuple[jax.Array, ...]:
    return q, k, v, prefix.astype(jnp.int32), targets.astype(jnp.int32), n.astype(jnp.float32)


@functools.cache
def _partitioned(name: str, rule: AttentionRule, alpha: float) -> Callable[..., Any]:
    """Return the custom call as a function that the partitioner may split by rows and heads."""

    def call(*arrays: jax.Array) -> Any:
        # Forward: like v. Backward: like q, k and v, which follow the gradient of the output.
        like = arrays[2:3] if name == FORWARD else arrays[1:4]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]  # type: ignore[no-untyped-call]
        return jax.ffi.ffi_call(name, shapes[0] if name == FORWARD else shapes)(
            *arrays,
            num_targets=np.int64(rule.num_targets),
            contextual_len=np.int64(rule.contextual_len),
            window=np.int64(rule.window),
            target_aware=np.bool_(rule.target_aware),
            full_len=np.int64(rule.full_len),
            alpha=np.float32(alpha),
        )

    def partition(mesh: Mesh, arguments: Any, result: Any) -> Any:
        spec = (*arguments[0].sharding.spec, None, None, None, None)[:4]
        b, h = spec[0], spec[2]
        wide, row, none = (NamedSharding(mesh, PartitionSpec(*each)) for each in ((b, None, h, None), (b,), ()))  # type: ignore[no-untyped-call]
        given = (*(wide,) * (len(arguments) - 3), row, row, none)
        return mesh, call, jax.tree.map(lambda _: wide, result), given

    grad, results = ((), ("b s h v",)) if name == FORWARD else (("b s h v",), _QKV)
    split = custom_partitioning(call)  # type: ignore[no-untyped-call]
    split.def_partition(  # type: ignore[no-untyped-call]
        partition=partition,
        sharding_rule=f"{', '.join((*grad, *_QKV, *_LENGTHS))} -> {', '.join(results)}",
        # In the order in which they first stand in the rule, or the verifier refuses it.
        need_replication_factors=("s", "a", "v") if name == FORWARD else ("s", "v", "a"),
    )
    return split
