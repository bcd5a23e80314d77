"""HSTU attention on a TPU: Pallas kernels, forward and backward, that keep the scores in VMEM.

`xla_attention.py` has them in its table for the platform tpu. Both walk blocks of queries and keys, leave out those in
which nobody sees anybody (after the diagonal, beyond a row's lengths, out of the window), and make the mask of a block
from the row's two lengths. Sums are float32 whatever the inputs are. The backward kernel computes the scores again and
gives all three gradients in one walk: those of keys and values are summed by block, those of queries by row.

Within `over(mesh, …)` each device runs the kernel on its own rows (and heads): GSPMD sees a custom call that it cannot
cut, and would gather its arguments.

# Shapes: B rows, S slots per row, H heads, A query/key width, V value width, I and J slots of a block of queries, keys.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from twinstep.worker.ops.hstu_attention import AttentionRule

LANES = 128  # floats of a vector register's row; a block's last dimension is a multiple, or the array's own
LARGEST_BLOCK = 512  # slots; a block of scores is then 1 MiB, and few are needed
VMEM_LIMIT = 64 << 20  # bytes the backward kernel may use; a row of 8,192 slots needs about half


@dataclass(frozen=True, slots=True)
class Walk:
    """One call's static facts."""

    num_slots: int
    """S."""
    block: int
    """Slots per block, of queries as of keys; a multiple of LANES, or S itself."""
    rule: AttentionRule
    alpha: float

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return pl.cdiv(self.num_slots, self.block)

    @property
    def first_target(self) -> int:
        """P: slot of the first target."""
        return self.num_slots - self.rule.num_targets

    def tokens_in(self, block: Any, prefix: Any, targets: Any) -> Any:
        """Say whether a block holds a token."""
        start, end = block * self.block, (block + 1) * self.block
        in_targets = (end > self.first_target) & (start < self.first_target + targets) & (targets > 0)
        return (start < prefix) | in_targets

    def seen(self, i: Any, j: Any, prefix: Any, targets: Any) -> Any:
        """Say whether any query of block i may see any key of block j; it errs towards yes."""
        rule = self.rule
        query_start, query_end = i * self.block, (i + 1) * self.block
        key_start, key_end = j * self.block, (j + 1) * self.block
        near = key_start < query_end
        if rule.window > 0:
            shift = rule.contextual_len - 1 if rule.contextual_len > 0 else 0
            lowest_query = jnp.maximum(jnp.minimum(query_start, prefix) - shift, 0)
            highest_key = jnp.maximum(key_end - 1 - shift, 0)
            close = (lowest_query - highest_key <= rule.window) | (key_end > self.first_target)
            if rule.full_len > 0:
                close |= (query_end > prefix - rule.full_len) | (query_end > self.first_target)
            near &= close
        if rule.contextual_len > 0:
            near |= query_start < rule.contextual_len
        return near & self.tokens_in(i, prefix, targets) & self.tokens_in(j, prefix, targets)

    def columns(self, slots: jax.Array, prefix: jax.Array) -> jax.Array:
        """Return each slot's place among its row's tokens."""
        return jnp.where(slots < self.first_target, slots, slots - self.first_target + prefix)

    def valid(self, slots: jax.Array, prefix: jax.Array, targets: jax.Array) -> jax.Array:
        """Return whether each slot holds a token."""
        target = slots - self.first_target
        return (slots < prefix) | ((target >= 0) & (target < targets) & (slots < self.num_slots))

    def ranks(self, columns: jax.Array, prefix: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the rank of each column, and that of targets."""
        contextual = self.rule.contextual_len
        last = prefix
        if contextual > 0:
            columns, last = jnp.maximum(columns - contextual + 1, 0), last - contextual + 1
        return (jnp.minimum(columns, last) if self.rule.target_aware else columns), last

    def mask(self, i: jax.Array, j: jax.Array, prefix: jax.Array, targets: jax.Array) -> jax.Array:
        """Return which query of block i sees which key of block j, [I, J] bool."""
        return self.sees(self.slots(i, 0), self.slots(j, 1), prefix, targets)

    def sees(self, query_slots: jax.Array, key_slots: jax.Array, prefix: jax.Array, targets: jax.Array) -> jax.Array:
        """Return which of these queries, [I, 1], sees which of these keys, [1, J], as [I, J] bool."""
        query, last = self.ranks(self.columns(query_slots, prefix), prefix)
        key, _ = self.ranks(self.columns(key_slots, prefix), prefix)
        seen = query > key
        if self.rule.window > 0:
            close = query - key <= self.rule.window
            if self.rule.full_len > 0:
                end = last if self.rule.target_aware else last + targets
                close |= query >= end - self.rule.full_len
            seen &= close
        seen |= query_slots == key_slots
        if self.rule.contextual_len > 0:
            seen |= (query == 0) & (key < last if self.rule.target_aware else key >= 0)
        return seen & self.valid(query_slots, prefix, targets) & self.valid(key_slots, prefix, targets)

    def slots(self, block: jax.Array, dimension: int) -> jax.Array:
        """Return the slots of a block, down the rows ([I, 1]) or along the columns ([1, J])."""
        shape = (self.block, 1) if dimension == 0 else (1, self.block)
        return block * self.block + jax.lax.broadcasted_iota(jnp.int32, shape, dimension)

    def tokens(self, values: jax.Array, block: jax.Array, prefix: jax.Array, targets: jax.Array) -> jax.Array:
        """Return a block's values with zeros where no token stands: what is there may be NaN, or beyond the array."""
        return jnp.where(self.valid(self.slots(block, 0), prefix, targets), values, jnp.zeros_like(values))


def block_size(num_slots: int) -> int:
    """Return the slots of a block: as few blocks as LARGEST_BLOCK allows, with little left over in the last."""
    if num_slots <= LARGEST_BLOCK // 2:
        return num_slots
    blocks = pl.cdiv(num_slots, LARGEST_BLOCK)
    return int(pl.cdiv(pl.cdiv(num_slots, blocks), LANES) * LANES)


def dot(x: jax.Array, y: jax.Array, *, over: tuple[int, int]) -> jax.Array:
    return jax.lax.dot_general(x, y, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def _forward_kernel(
    prefix_ref: Any, targets_ref: Any, n_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, sum_ref: Any,
    *, walk: Walk,
) -> None:  # fmt: skip
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    prefix, targets = prefix_ref[b], targets_ref[b]

    @pl.when(j == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(walk.seen(i, j, prefix, targets))
    def _() -> None:
        scores_IJ = dot(q_ref[...], k_ref[...], over=(1, 1)) * walk.alpha
        weights_IJ = jnp.where(walk.mask(i, j, prefix, targets), scores_IJ * jax.nn.sigmoid(scores_IJ), 0.0)
        v_JV = walk.tokens(v_ref[...], j, prefix, targets)
        sum_ref[...] += dot(weights_IJ.astype(v_JV.dtype), v_JV, over=(1, 0))

    @pl.when(j == walk.num_blocks - 1)
    def _() -> None:
        out_ref[...] = (sum_ref[...] / n_ref[0]).astype(out_ref.dtype)


def _backward_kernel(
    prefix_ref: Any, targets_ref: Any, n_ref: Any, grad_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any,
    dq_ref: Any, dk_ref: Any, dv_ref: Any, *rest: Any, walk: Walk,
) -> None:  # fmt: skip
    *totals, dq_sum, dk_sum, dv_sum = rest
    b, j, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    prefix, targets = prefix_ref[b], targets_ref[b]

    @pl.when((i == 0) & (j == 0))
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(i == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(walk.seen(i, j, prefix, targets))
    def _() -> None:
        q_IA, grad_IV = (walk.tokens(ref[...], i, prefix, targets) for ref in (q_ref, grad_ref))
        k_JA, v_JV = (walk.tokens(ref[...], j, prefix, targets) for ref in (k_ref, v_ref))
        mask_IJ = walk.mask(i, j, prefix, targets)
        scores_IJ = dot(q_IA, k_JA, over=(1, 1)) * walk.alpha
        gate_IJ = jax.nn.sigmoid(scores_IJ)
        weights_IJ = jnp.where(mask_IJ, scores_IJ * gate_IJ, 0.0)
        dv_sum[...] += dot(weights_IJ.astype(grad_IV.dtype), grad_IV, over=(0, 0))
        slope_IJ = gate_IJ * (1.0 + scores_IJ * (1.0 - gate_IJ))
        dscores_IJ = jnp.where(mask_IJ, dot(grad_IV, v_JV, over=(1, 1)) * slope_IJ, 0.0).astype(q_IA.dtype)
        dk_sum[...] += dot(dscores_IJ, q_IA, over=(0, 0))
        rows = pl.ds(i * walk.block, walk.block)
        dq_sum[rows, :] = dq_sum[rows, :] + dot(dscores_IJ, k_JA, over=(1, 0))

    @pl.when(i == walk.num_blocks - 1)
    def _() -> None:
        dk_ref[...] = (dk_sum[...] * (walk.alpha / n_ref[0])).astype(dk_ref.dtype)
        dv_ref[...] = (dv_sum[...] / n_ref[0]).astype(dv_ref.dtype)
        if totals:
            _, dk_total, dv_total = totals

            @pl.when(j == 0)
            def _() -> None:
                dk_total[...] = jnp.zeros_like(dk_total)
                dv_total[...] = jnp.zeros_like(dv_total)

            dk_total[...] += jnp.sum(dk_sum[...], axis=0, keepdims=True) * (walk.alpha / n_ref[0])
            dv_total[...] += jnp.sum(dv_sum[...], axis=0, keepdims=True) / n_ref[0]

    @pl.when((i == walk.num_blocks - 1) & (j == walk.num_blocks - 1))
    def _() -> None:
        dq_ref[...] = (dq_sum[: walk.num_slots, :] * (walk.alpha / n_ref[0])).astype(dq_ref.dtype)
        if totals:
            totals[0][...] = jnp.sum(dq_sum[...], axis=0, keepdims=True) * (walk.alpha / n_ref[0])


@dataclass(frozen=True, slots=True)
class _Heads:
    """How one head's [slots, width] is cut out of [B, S, H, width]: no copy where widths fill whole registers."""

    packed: bool

    @staticmethod
    def of(*widths: int) -> _Heads:
        return _Heads(all(width % LANES == 0 for width in widths))

    def bring(self, x_BSHE: jax.Array) -> jax.Array:
        B, S, H, E = x_BSHE.shape
        return x_BSHE.reshape(B, S, H * E) if self.packed else jnp.transpose(x_BSHE, (0, 2, 1, 3))

    def back(self, x: jax.Array, num_heads: int) -> jax.Array:
        if self.packed:
            return x.reshape(*x.shape[:2], num_heads, -1)
        return jnp.transpose(x, (0, 2, 1, 3))

    def spec(self, slots: int, width: int, block: Callable[..., Any]) -> pl.BlockSpec:
        """Return the spec of one head's block; `block` says which, from the grid's place and the prefetched lengths."""
        if self.packed:
            return pl.BlockSpec((None, slots, width), lambda b, h, *rest: (b, block(b, *rest), h))
        return pl.BlockSpec((None, None, slots, width), lambda b, h, *rest: (b, h, block(b, *rest), 0))

    def shape(self, B: int, S: int, H: int, E: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B, S, H * E) if self.packed else (B, H, S, E), dtype)  # type: ignore[no-untyped-call]


def _blocks_seen(walk: Walk) -> int:
    """Return the pairs of blocks that a full row computes."""
    pairs = range(walk.num_blocks)
    prefix, targets = walk.first_target, walk.rule.num_targets
    with jax.ensure_compile_time_eval():
        return sum(bool(walk.seen(i, j, prefix, targets)) for i in pairs for j in pairs)


def _parameters(walk: Walk) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    )


def scalars(prefix_B: jax.Array, targets_B: jax.Array, n: jax.Array, walk: Walk) -> tuple[jax.Array, ...]:
    """Return what a kernel reads of each row, and n, as it wants them."""
    prefix = jnp.clip(prefix_B.astype(jnp.int32), 0, walk.first_target)
    return prefix, targets_B.astype(jnp.int32), n.astype(jnp.float32).reshape(1)


def forward(
    q_BSHA: jax.Array, k_BSHA: jax.Array, v_BSHV: jax.Array, prefix_B: jax.Array, targets_B: jax.Array,
    n: jax.Array, rule: AttentionRule, alpha: float, *, interpret: Any = False,
) -> jax.Array:  # fmt: skip
    """Return silu(alpha · q·kᵀ)/n, masked by `rule`, times v: [B, S, H, V], zeros in slots without a token."""
    B, S, H, A = q_BSHA.shape
    V = v_BSHV.shape[3]
    walk, heads = Walk(S, block_size(S), rule, alpha), _Heads.of(A, V)
    blocks, pairs, item = walk.num_blocks, _blocks_seen(walk), q_BSHA.dtype.itemsize

    def of_queries(b: Any, i: Any, j: Any, *_: Any) -> Any:
        return i

    def of_keys(b: Any, i: Any, j: Any, prefix_ref: Any, targets_ref: Any, _: Any) -> Any:
        return jnp.where(walk.seen(i, j, prefix_ref[b], targets_ref[b]), j, 0)  # what is left out is not fetched

    call = pl.pallas_call(
        functools.partial(_forward_kernel, walk=walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, H, blocks, blocks),
            in_specs=[
                heads.spec(walk.block, A, of_queries),
                heads.spec(walk.block, A, of_keys),
                heads.spec(walk.block, V, of_keys),
            ],
            out_specs=heads.spec(walk.block, V, of_queries),
            scratch_shapes=[pltpu.VMEM((walk.block, V), jnp.float32)],
        ),
        out_shape=heads.shape(B, S, H, V, v_BSHV.dtype),
        compiler_params=_parameters(walk),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * H * pairs * walk.block**2 * (A + V),
            transcendentals=B * H * pairs * walk.block**2,
            bytes_accessed=B * H * item * (S * (A + V) + min(pairs * walk.block, blocks * S) * (A + V)),
        ),
        interpret=interpret,
        name="hstu_attention",
    )
    out = call(*scalars(prefix_B, targets_B, n, walk), *map(heads.bring, (q_BSHA, k_BSHA, v_BSHV)))
    return heads.back(out, H)


def _backward_cost(walk: Walk, rows: int, A: int, V: int, item: int) -> pl.CostEstimate:
    """Return what the backward kernel costs for this many rows of one head."""
    pairs, S = _blocks_seen(walk), walk.num_slots
    return pl.CostEstimate(
        flops=2 * rows * pairs * walk.block**2 * (3 * A + 2 * V),
        transcendentals=rows * pairs * walk.block**2,
        bytes_accessed=rows * item * (S * (3 * A + 2 * V) + min(pairs * walk.block, walk.num_blocks * S) * (A + V)),
    )


def backward(
    grad_BSHV: jax.Array, q_BSHA: jax.Array, k_BSHA: jax.Array, v_BSHV: jax.Array, prefix_B: jax.Array,
    targets_B: jax.Array, n: jax.Array, rule: AttentionRule, alpha: float, *, totals: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return the gradients of q, k and v, zeros in slots without a token.

    With `totals` each one's sum over a row's slots too, [B, H, 1, A or V] float32: the kernel has them at hand, and
    whoever adds the gradients up would read them again.
    """
    B, S, H, A = q_BSHA.shape
    V = v_BSHV.shape[3]
    walk, heads = Walk(S, block_size(S), rule, alpha), _Heads.of(A, V)
    blocks = walk.num_blocks
    total_widths = (A, A, V) if totals else ()

    def of_queries(b: Any, j: Any, i: Any, prefix_ref: Any, targets_ref: Any, _: Any) -> Any:
        return jnp.where(walk.seen(i, j, prefix_ref[b], targets_ref[b]), i, blocks - 1)

    def of_keys(b: Any, j: Any, *_: Any) -> Any:
        return j

    def whole(*_: Any) -> Any:
        return 0

    call = pl.pallas_call(
        functools.partial(_backward_kernel, walk=walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, H, blocks, blocks),
            in_specs=[
                heads.spec(walk.block, V, of_queries),
                heads.spec(walk.block, A, of_queries),
                heads.spec(walk.block, A, of_keys),
                heads.spec(walk.block, V, of_keys),
            ],
            out_specs=[
                heads.spec(S, A, whole),
                heads.spec(walk.block, A, of_keys),
                heads.spec(walk.block, V, of_keys),
                *(pl.BlockSpec((None, None, 1, width), lambda b, h, *_: (b, h, 0, 0)) for width in total_widths),
            ],
            scratch_shapes=[
                pltpu.VMEM((blocks * walk.block, A), jnp.float32),
                pltpu.VMEM((walk.block, A), jnp.float32),
                pltpu.VMEM((walk.block, V), jnp.float32),
            ],
        ),
        out_shape=[
            heads.shape(B, S, H, A, q_BSHA.dtype),
            heads.shape(B, S, H, A, k_BSHA.dtype),
            heads.shape(B, S, H, V, v_BSHV.dtype),
            *(jax.ShapeDtypeStruct((B, H, 1, width), jnp.float32) for width in total_widths),  # type: ignore[no-untyped-call]
        ],
        compiler_params=_parameters(walk),
        cost_estimate=_backward_cost(walk, B * H, A, V, q_BSHA.dtype.itemsize),
        interpret=interpret,
        name="hstu_attention_backward",
    )
    brought = map(heads.bring, (grad_BSHV, q_BSHA, k_BSHA, v_BSHV))
    dq, dk, dv, *sums = call(*scalars(prefix_B, targets_B, n, walk), *brought)
    return heads.back(dq, H), heads.back(dk, H), heads.back(dv, H), *sums


@dataclass(frozen=True, slots=True)
class Spread:
    """Over which axes of a mesh rows and heads are cut."""

    mesh: Mesh
    rows: str | tuple[str, ...] | None
    heads: str | None

    @property
    def cores(self) -> int:
        """Cores of one device: those of a v4 or v5p work on one program."""
        return int(getattr(self.mesh.devices.flat[0], "num_cores", 1) or 1)

    @property
    def devices(self) -> int:
        """Devices that rows are cut over."""
        names = (self.rows,) if isinstance(self.rows, str) else self.rows or ()
        return math.prod(self.mesh.shape[each] for each in names)


class _Current:
    spread: Spread | None = None


def current() -> Spread | None:
    """Return over what is traced within `over`."""
    return _Current.spread


@contextlib.contextmanager
def over(mesh: Mesh, *, rows: str | tuple[str, ...] | None, heads: str | None = None) -> Iterator[None]:
    """Trace within the block for rows, and heads, cut over axes of a mesh: each device attends on its own."""
    before, _Current.spread = _Current.spread, Spread(mesh, rows, heads)
    try:
        yield
    finally:
        _Current.spread = before


def _cut(spread: Spread, B: int, H: int) -> tuple[PartitionSpec, PartitionSpec]:
    """Return the specs of [B, S, H, …] and of [B]; what does not divide is whole on each device."""

    def axis(name: str | tuple[str, ...] | None, size: int) -> Any:
        names = (name,) if isinstance(name, str) else name or ()
        return name if names and size % math.prod(spread.mesh.shape[each] for each in names) == 0 else None

    rows = axis(spread.rows, B)
    return (
        PartitionSpec(rows, None, axis(spread.heads, H), None),  # type: ignore[no-untyped-call]
        PartitionSpec(rows),  # type: ignore[no-untyped-call]
    )


def spread_forward(*arguments: Any) -> jax.Array:
    """`forward`, on each device's own rows within `over`."""
    *arrays, rule, alpha = arguments
    run = functools.partial(forward, rule=rule, alpha=alpha)
    out: jax.Array = _on_each_device(run, arrays, num_wide=3, num_out=None)
    return out


def spread_backward(*arguments: Any, totals: bool = False) -> tuple[jax.Array, ...]:
    """`backward`, on each device's own rows within `over`."""
    *arrays, rule, alpha = arguments
    run = functools.partial(backward, rule=rule, alpha=alpha, totals=totals)
    found: tuple[jax.Array, ...] = _on_each_device(run, arrays, num_wide=4, num_out=3, totals=totals)
    return found


def _on_each_device(
    run: Callable[..., Any], arrays: list[jax.Array], *, num_wide: int, num_out: int | None, totals: bool = False
) -> Any:
    spread = _Current.spread
    if spread is None:
        return run(*arrays)
    wide, lengths = _cut(spread, arrays[0].shape[0], arrays[0].shape[2])
    whole = PartitionSpec()  # type: ignore[no-untyped-call]
    by_head = PartitionSpec(wide[0], wide[2])  # type: ignore[no-untyped-call]
    return jax.shard_map(
        run,
        mesh=spread.mesh,
        in_specs=(*[wide] * num_wide, lengths, lengths, whole),
        out_specs=wide if num_out is None else (wide,) * num_out + (by_head,) * (num_out if totals else 0),
        check_vma=False,
    )(*arrays)
