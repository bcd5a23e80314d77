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
from twinstep.worker.compile.lower import xla_attention, xla_bags, xla_gradients, xla_rows
from twinstep.worker.compile.lower.xla_loops import Loops
from twinstep.worker.compile.stages import place
from twinstep.worker.ops.barrier import BARRIER
from twinstep.worker.ops.hstu_attention import OPERATOR, OPERATOR_BACKWARD
from twinstep.worker.ops.rows import SUM_ROWS, UNIQUE_ROWS, WRITE_ROWS

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


def _barrier(values: list[jax.Array]) -> list[jax.Array]:
    return list(jax.lax.optimization_barrier(tuple(values)))  # type: ignore[no-untyped-call]


OWN_OPS: dict[Any, Callable[..., Any]] = {
    **xla_bags.OPS,
    **xla_gradients.OPS,
    aten._to_copy.default: _to_copy,
    aten.alias.default: lambda x: x,
    aten.lift_fresh_copy.default: lambda x: x,
    aten.clone.default: lambda x: x,
    aten.scalar_tensor.default: _scalar_tensor,
    OPERATOR: xla_attention.forward,
    OPERATOR_BACKWARD: xla_attention.backward,
    BARRIER: _barrier,
    aten.clamp_min.default: jnp.maximum,
    aten.clamp_max.default: jnp.minimum,
    UNIQUE_ROWS: xla_rows.unique_rows,
    SUM_ROWS: xla_rows.sum_rows,
    WRITE_ROWS: xla_rows.write_rows,
}
"""Ops that torchax lacks, or that it only knows for tensors that move between devices."""


WRONG_OPS: dict[Any, str] = {
    aten.put: "with accumulate it keeps one of several equal indices",
}
"""Ops of torchax that differ from eager in ways a user would not notice."""


class JaxInterpreter(fx.Interpreter):
    """Interprets a graph on JAX arrays; random ops take their keys from torchax's environment.

    Raises:
        CompileError: the graph holds an op with no lowering.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._node: fx.Node | None = None
        self._loops = Loops(lambda body, values: list(JaxInterpreter(body).run(*values)))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and give its result the dtype it has in torch: JAX lets a 0-d float32 widen a bfloat16."""
        if n.op == "call_module":
            args, _ = self.fetch_args_kwargs_from_env(n)
            return self._loops.run(self.fetch_attr(str(n.target)), args, read={user.args[1] for user in n.users})
        self._node = n
        try:
            result = super().run_node(n)
        except CompileError:
            raise
        except Exception as error:  # whatever an op's lowering raises
            line = (str(error).strip().splitlines() or [""])[0][:300]
            raise CompileError(
                f"XLA cannot lower {n.target}{place(n)}: {type(error).__name__}: {line}",
                remedy="set compile.backend: inductor, or write the step without it",
            ) from error
        want = n.meta.get("val")
        if n.op == "call_function" and isinstance(result, jax.Array) and isinstance(want, torch.Tensor):
            dtype = _dtype(want.dtype)
            return result if result.dtype == dtype else result.astype(dtype)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node."""
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _PLACEMENT}
        if target in OWN_OPS:
            return OWN_OPS[target](*args, **kwargs)
        if target.overloadpacket in WRONG_OPS:
            raise CompileError(
                f"XLA's lowering of {target} is known to give wrong numbers: {WRONG_OPS[target.overloadpacket]}"
                f"{place(self._node)}",
                remedy="set compile.backend: inductor, or write the step without it",
            )
        op = all_aten_ops.get(target) or all_aten_ops.get(target.overloadpacket)
        if op is None:
            raise CompileError(
                f"XLA has no lowering for {target}{place(self._node)}",
                remedy="set compile.backend: inductor, or write the step without it",
            )
        env = torchax.default_env()
        if op.needs_env:
            kwargs["env"] = env
        if op.is_jax_function:
            return op.func(*args, **kwargs)
        with env:  # written in terms of torch ops, which the environment turns into JAX's
            return env.t2j_iso(env.v2t_iso(op.func(*env.j2t_iso(args), **env.j2t_iso(kwargs))))
