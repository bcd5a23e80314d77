"""Attention within one row of the batch that is in VMEM, for a kernel that does more: `pallas_layers.py`.

The formulas are those of `pallas_attention.py`; here queries are walked through in chunks, and all keys of a row are at
hand. Sums are float32 whatever the inputs are.

# Shapes: S slots per row, R slots of a chunk, A query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from twinstep.worker.compile.lower.pallas_attention import LANES, Walk

SUBLANES = 8  # rows of a tile of float32


def dot(x: jax.Array, y: jax.Array, *, over: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices over a dimension of each, in float32."""
    return jax.lax.dot_general(x, y, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """Attention within one row, whose slots are all in VMEM."""

    walk: Walk
    chunk: int
    prefix: Any
    targets: Any
    n: Any

    def _slots(self, start: Any, size: int, dimension: int) -> jax.Array:
        shape = (size, 1) if dimension == 0 else (1, size)
        slots: jax.Array = start + jax.lax.broadcasted_iota(jnp.int32, shape, dimension)
        return slots

    def _tokens(self, values: jax.Array, start: Any) -> jax.Array:
        valid = self.walk.valid(self._slots(start, values.shape[0], 0), self.prefix, self.targets)
        return jnp.where(valid, values, jnp.zeros_like(values))

    def _mask(self, start: Any) -> jax.Array:
        queries, keys = self._slots(start, self.chunk, 0), self._slots(0, self.walk.num_slots, 1)
        seen: jax.Array = self.walk.sees(queries, keys, self.prefix, self.targets)
        return seen

    def forward(self, q: Any, k: Any, v: Any, out: Any) -> None:
        """Attend with one head; each is a Head."""
        k_SA, v_SV = k.all(), self._tokens(v.all(), 0)

        def chunk(start: Any) -> None:
            scores_RS = dot(q.rows(start, self.chunk), k_SA, over=(1, 1)) * self.walk.alpha
            weights_RS = jnp.where(self._mask(start), scores_RS * jax.nn.sigmoid(scores_RS), 0.0)
            out.put(dot(weights_RS.astype(v_SV.dtype), v_SV, over=(1, 0)) / self.n, start)

        over_chunks(self.walk.num_slots, self.chunk, chunk)

    def backward(self, grad: Any, q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any) -> None:
        """Compute the gradients of one head; each is a Head."""
        k_SA, v_SV = self._tokens(k.all(), 0), self._tokens(v.all(), 0)
        scale = self.walk.alpha / self.n
        dk.put(jnp.zeros(k_SA.shape, jnp.float32), 0)
        dv.put(jnp.zeros(v_SV.shape, jnp.float32), 0)

        def chunk(start: Any) -> None:
            q_RA, grad_RV = (self._tokens(each.rows(start, self.chunk), start) for each in (q, grad))
            mask_RS = self._mask(start)
            scores_RS = dot(q_RA, k_SA, over=(1, 1)) * self.walk.alpha
            gate_RS = jax.nn.sigmoid(scores_RS)
            weights_RS = jnp.where(mask_RS, scores_RS * gate_RS, 0.0)
            dv.add(dot(weights_RS.astype(grad_RV.dtype), grad_RV, over=(0, 0)) / self.n)
            slope_RS = gate_RS * (1.0 + scores_RS * (1.0 - gate_RS))
            dscores_RS = jnp.where(mask_RS, dot(grad_RV, v_SV, over=(1, 1)) * slope_RS, 0.0).astype(q_RA.dtype)
            dk.add(dot(dscores_RS, q_RA, over=(0, 0)) * scale)
            dq.put(dot(dscores_RS, k_SA, over=(1, 0)) * scale, start)

        over_chunks(self.walk.num_slots, self.chunk, chunk)


@dataclass(frozen=True, slots=True)
class Head:
    """One head's columns of a row's [S, H · width] in VMEM."""

    ref: Any
    columns: Any
    dtype: Any

    def all(self) -> jax.Array:
        """Return all slots, [S, width]."""
        values: jax.Array = self.ref[:, self.columns].astype(self.dtype)
        return values

    def rows(self, start: Any, size: int) -> jax.Array:
        """Return a chunk's slots, [R, width]."""
        values: jax.Array = self.ref[pl.ds(start, size), self.columns].astype(self.dtype)
        return values

    def put(self, values: jax.Array, start: Any) -> None:
        """Write slots from `start` on."""
        self.ref[pl.ds(start, values.shape[0]), self.columns] = values.astype(self.dtype).astype(self.ref.dtype)

    def add(self, values: jax.Array) -> None:
        """Add to all slots."""
        self.ref[:, self.columns] += values.astype(self.ref.dtype)


def over_chunks(slots: int, chunk: int, run: Callable[[Any], None]) -> None:
    """Run for each chunk's first slot."""
    if slots == chunk:
        run(0)
        return

    def turn(index: Any, _: None) -> None:
        run(pl.multiple_of(index * chunk, SUBLANES))

    jax.lax.fori_loop(0, slots // chunk, turn, None)


def over_heads(heads: int, widths: Iterable[int], run: Callable[[Any], None]) -> None:
    """Run for each head: in a loop where heads fill whole registers, else one after the other."""
    if any(each % LANES for each in widths):
        for head in range(heads):
            run(head)
        return

    def turn(head: Any, _: None) -> None:
        run(head)

    jax.lax.fori_loop(0, heads, turn, None)


def columns_of(head: Any, size: int) -> Any:
    """Return the columns of a head, of `size` each."""
    start = head * size
    return pl.ds(start if isinstance(head, int) else pl.multiple_of(start, LANES), size)
