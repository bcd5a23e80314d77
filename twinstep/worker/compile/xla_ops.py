"""Run a captured ATen graph on JAX values: torchax's table of ops, and the few that it lacks or that want a device.

Used by `xla.py` only, under jit. An op with no lowering is an error that names it; nothing falls back to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torch import fx
from torchax.ops.mappings import t2j_dtype
from torchax.ops.ops_registry import all_aten_ops

from twinstep.spec.errors import CompileError

aten = torch.ops.aten

# Where a tensor lives is the program's business, not the op's: a graph says cpu because it was captured there.
_PLACEMENT = ("device", "pin_memory", "layout", "non_blocking", "memory_format")


def _to_copy(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return x if dtype is None else x.astype(_dtype(dtype))


def _dtype(dtype: torch.dtype) -> Any:
    """Return the JAX dtype; 64-bit integers are 32 bits wide there, which `xla.py` checks on the way in."""
    return jax.dtypes.canonicalize_dtype(t2j_dtype(dtype))


def _scalar_tensor(value: float, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.asarray(value, dtype=_dtype(dtype or torch.get_default_dtype()))


OWN_OPS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.alias.default: lambda x: x,
    aten.lift_fresh_copy.default: lambda x: x,
    aten.clone.default: lambda x: x,
    aten.scalar_tensor.default: _scalar_tensor,
}
"""Ops that torchax lacks, or that it only knows for tensors that move between devices."""


class JaxInterpreter(fx.Interpreter):
    """Interprets a graph on JAX arrays; random ops take their keys from torchax's environment.

    Raises:
        CompileError: the graph holds an op with no lowering.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node."""
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _PLACEMENT}
        if target in OWN_OPS:
            return OWN_OPS[target](*args, **kwargs)
        op = all_aten_ops.get(target) or all_aten_ops.get(target.overloadpacket)
        if op is None:
            raise CompileError(
                f"XLA has no lowering for {target}",
                remedy="set compile.backend: inductor, or write the step without it",
            )
        env = torchax.default_env()
        if op.needs_env:
            kwargs["env"] = env
        if op.is_jax_function:
            return op.func(*args, **kwargs)
        with env:  # written in terms of torch ops, which the environment turns into JAX's
            return env.t2j_iso(env.v2t_iso(op.func(*env.j2t_iso(args), **env.j2t_iso(kwargs))))
