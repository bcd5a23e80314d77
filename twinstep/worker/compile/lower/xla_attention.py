"""HSTU attention on XLA: one table says what runs it on which platform.

`xla_ops.py` calls `forward` and `backward` for the nodes `twinstep::hstu_attention` and
`twinstep::hstu_attention_backward`, while the step is traced. A platform without a row runs the reference, written in
ATen, which torchax turns into JAX.

# Shapes: B rows, S slots per row, H heads, A query/key width, V value width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import torchax

from twinstep.worker.compile.lower import pallas_attention, xla_attention_cpu
from twinstep.worker.ops.hstu_attention import AttentionRule, reference, reference_backward


@dataclass(frozen=True, slots=True)
class Lowering:
    """How one platform runs the operator."""

    forward: Callable[..., jax.Array]
    """Called as `(q_BSHA, k_BSHA, v_BSHV, prefix_lengths_B, target_lengths_B, n, rule, alpha)`; gives [B, S, H, V]."""
    backward: Callable[..., tuple[jax.Array, ...]]
    """Called as `(grad_BSHV, q_BSHA, …)`, further as above; gives the gradients of q, k and v."""
    takes: Callable[[jax.Array, jax.Array], bool] = lambda q, v: True
    """Whether it can run on such a q and v; where not, the reference runs."""


def _in_aten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function on torch tensors as one on JAX arrays."""

    def on_jax(*args: Any) -> Any:
        env = torchax.default_env()
        with env:
            return env.t2j_iso(function(*env.j2t_iso(args)))

    return on_jax


REFERENCE = Lowering(_in_aten(reference), _in_aten(reference_backward))
LOWERINGS: dict[str, Lowering] = {
    "cpu": Lowering(xla_attention_cpu.forward, xla_attention_cpu.backward, xla_attention_cpu.has_kernel),
    "tpu": Lowering(pallas_attention.spread_forward, pallas_attention.spread_backward),
}
"""By platform."""


class _Target:
    platform: str | None = None


@contextlib.contextmanager
def platform(name: str | None) -> Iterator[None]:
    """Trace for this platform within the block; None: that of JAX's default device.

    Programs made ahead of time say theirs; a name without a row, such as "reference", traces the reference.
    """
    before, _Target.platform = _Target.platform, name
    try:
        yield
    finally:
        _Target.platform = before


def target_platform() -> str:
    """Return the platform that is traced for."""
    return _Target.platform or jax.default_backend()


def _lowering(q: jax.Array, v: jax.Array) -> Lowering:
    found = LOWERINGS.get(target_platform(), REFERENCE)
    return found if found.takes(q, v) else REFERENCE


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, prefix: jax.Array, targets: jax.Array, n: jax.Array, *options: Any
) -> jax.Array:
    """Lower `twinstep::hstu_attention`; `options` are its rule's fields and alpha."""
    *rule, alpha = options
    return _lowering(q, v).forward(q, k, v, prefix, targets, n, AttentionRule(*rule), alpha)


def backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: jax.Array,
    targets: jax.Array,
    n: jax.Array,
    *options: Any,
) -> tuple[jax.Array, ...]:
    """Lower `twinstep::hstu_attention_backward`."""
    *rule, alpha = options
    return _lowering(q, v).backward(grad, q, k, v, prefix, targets, n, AttentionRule(*rule), alpha)
