"""HSTU attention over packed tokens on a TPU: rows stand end to end, and segment ids tell them apart.

The kernels of `pallas_attention.py` take rows of S slots; these take M tokens as they are packed, of which a row has as
many as it has: no slot is computed, or kept in HBM, that holds no token. The scores stay in VMEM. A row's tokens stand
side by side, its prefix before its targets; who sees whom is `AttentionRule`'s, within a segment. A block of queries
walks over the blocks of keys that a row of the longest length can reach, and leaves out those of other segments.

The backward pass is two kernels, each of which computes the scores again: one sums over keys, one over queries. A row
may cross blocks at any place, so that neither sum has a place of its own in VMEM for the other's whole walk.

# Shapes: M packed tokens, B rows, H heads, A query/key width, V value width, I and J tokens of a block of queries or
# keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from twinstep.worker.compile.lower.pallas_attention import LANES, VMEM_LIMIT, block_size, dot
from twinstep.worker.ops.hstu_attention import AttentionRule

SEGMENT, RANK, FLAGS, PLACE = range(4)
FACTS = 8  # rows of a tile, of which four are used
FAR, HISTORY = 1, 2  # flags: sees beyond the window; stands before its row's targets
NOBODY, MOST = -1, (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Walk:
    """One call's static facts."""

    num_tokens: int
    """M."""
    longest: int
    """Most tokens of a row."""
    block: int
    rule: AttentionRule
    alpha: float

    @property
    def num_blocks(self) -> int:
        """Blocks of all tokens."""
        return pl.cdiv(self.num_tokens, self.block)

    @property
    def reach(self) -> int:
        """Blocks on one side of a token's own in which its row may stand."""
        return min(pl.cdiv(self.longest - 1, self.block), self.num_blocks - 1)

    @property
    def span(self) -> int:
        """Blocks that a block is held against: those before it, and after it where contextual tokens see all."""
        return self.reach * (2 if self.rule.contextual_len > 0 else 1) + 1

    def keys_of(self, i: Any, step: Any) -> Any:
        """Return the block of keys at a step of a query block's walk; it may be none."""
        return i - self.reach + step

    def queries_of(self, j: Any, step: Any) -> Any:
        """Return the block of queries at a step of a key block's walk; it may be none."""
        return j - (self.reach if self.rule.contextual_len > 0 else 0) + step

    def meets(self, i: Any, j: Any, low: Any, high: Any) -> Any:
        """Say whether a row has tokens in block i and in block j; `low` and `high` are the segments of each block."""
        at, to = (jnp.clip(each, 0, self.num_blocks - 1) for each in (i, j))
        inside = (i >= 0) & (j >= 0) & (i < self.num_blocks) & (j < self.num_blocks)
        return inside & (low[at] <= high[to]) & (low[to] <= high[at])


def facts_of(segments_M: jax.Array, prefix_B: jax.Array, targets_B: jax.Array, walk: Walk) -> tuple[jax.Array, ...]:
    """Return what kernels read of each token, [8, blocks · block] int32, and each block's least and largest segment.

    Args:
        segments_M: the row of each token, ascending; −1: a token of no row, wherever it stands.
        prefix_B: tokens of each row before its targets.
        targets_B: targets of each row.
        walk: the call.
    """
    rule, count = walk.rule, walk.num_blocks * walk.block
    segments = jnp.pad(segments_M.astype(jnp.int32), (0, count - walk.num_tokens), constant_values=NOBODY)
    places = jnp.arange(count, dtype=jnp.int32)
    row = jnp.clip(segments, 0, prefix_B.shape[0] - 1)
    starts = jnp.full(prefix_B.shape[0], count, jnp.int32).at[row].min(jnp.where(segments >= 0, places, count))
    columns, prefix, targets = (
        places - starts[row],
        prefix_B.astype(jnp.int32)[row],
        targets_B.astype(jnp.int32)[row],
    )
    last, rank = prefix, columns
    if rule.contextual_len > 0:
        rank, last = jnp.maximum(columns - rule.contextual_len + 1, 0), prefix - rule.contextual_len + 1
    if rule.target_aware:
        rank = jnp.minimum(rank, last)
    end = last if rule.target_aware else last + targets
    flags = jnp.where(rank >= end - rule.full_len, FAR, 0) if rule.full_len > 0 else jnp.zeros_like(rank)
    flags |= jnp.where((rank < last) | (not rule.target_aware), HISTORY, 0)
    facts = jnp.stack([segments, rank, flags, places])
    by_block = segments.reshape(walk.num_blocks, walk.block)
    low = jnp.min(jnp.where(by_block >= 0, by_block, MOST), axis=1)
    return jnp.pad(facts, ((0, FACTS - facts.shape[0]), (0, 0))), low, jnp.max(by_block, axis=1)


def sees(query: Any, key: Any, rule: AttentionRule) -> jax.Array:
    """Return which query sees which key, [I, J] bool, from their facts, [I, 1] and [1, J] each."""
    seen = query[RANK] > key[RANK]
    if rule.window > 0:
        close = query[RANK] - key[RANK] <= rule.window
        if rule.full_len > 0:
            close |= (query[FLAGS] & FAR) > 0
        seen &= close
    seen |= query[PLACE] == key[PLACE]
    if rule.contextual_len > 0:
        seen |= (query[RANK] == 0) & ((key[FLAGS] & HISTORY) > 0)
    found: jax.Array = seen & (query[SEGMENT] == key[SEGMENT]) & (query[SEGMENT] >= 0)
    return found


def _pair(query_ref: Any, key_ref: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the facts of a block of queries, [I, 1] each, and of a block of keys, [1, J] each."""
    queries = jnp.transpose(query_ref[...])
    return [queries[:, fact : fact + 1] for fact in range(4)], [key_ref[fact : fact + 1, :] for fact in range(4)]


def _real(values_ref: Any, facts_ref: Any) -> jax.Array:
    """Return a block's values, zeros where no token stands: what is there may be NaN, or beyond the array."""
    segments = jnp.transpose(facts_ref[...])[:, SEGMENT : SEGMENT + 1]
    values = values_ref[...]
    return jnp.where(segments >= 0, values, jnp.zeros_like(values))


def _forward_kernel(
    low: Any, high: Any, n_ref: Any, qf: Any, kf: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, sum_ref: Any,
    *, walk: Walk,
) -> None:  # fmt: skip
    i, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(walk.meets(i, walk.keys_of(i, step), low, high))
    def _() -> None:
        scores_IJ = dot(q_ref[...], k_ref[...], over=(1, 1)) * walk.alpha
        weights_IJ = jnp.where(sees(*_pair(qf, kf), walk.rule), scores_IJ * jax.nn.sigmoid(scores_IJ), 0.0)
        sum_ref[...] += dot(weights_IJ.astype(v_ref.dtype), _real(v_ref, kf), over=(1, 0))

    @pl.when(step == walk.span - 1)
    def _() -> None:
        out_ref[...] = (sum_ref[...] / n_ref[0]).astype(out_ref.dtype)


def _slopes(qf: Any, kf: Any, grad_IV: Any, q_IA: Any, k_JA: Any, v_JV: Any, walk: Walk) -> tuple[jax.Array, ...]:
    """Return the weights and the gradient of the scores of two blocks, [I, J] each, but for their common factors."""
    mask_IJ = sees(*_pair(qf, kf), walk.rule)
    scores_IJ = dot(q_IA, k_JA, over=(1, 1)) * walk.alpha
    gate_IJ = jax.nn.sigmoid(scores_IJ)
    slope_IJ = gate_IJ * (1.0 + scores_IJ * (1.0 - gate_IJ))
    weights_IJ = jnp.where(mask_IJ, scores_IJ * gate_IJ, 0.0)
    return weights_IJ, jnp.where(mask_IJ, dot(grad_IV, v_JV, over=(1, 1)) * slope_IJ, 0.0)


def _query_kernel(
    low: Any, high: Any, n_ref: Any, qf: Any, kf: Any, grad_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any,
    dq_ref: Any, dq_sum: Any, *, walk: Walk,
) -> None:  # fmt: skip
    i, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(walk.meets(i, walk.keys_of(i, step), low, high))
    def _() -> None:
        k_JA = _real(k_ref, kf)
        _, dscores_IJ = _slopes(qf, kf, _real(grad_ref, qf), _real(q_ref, qf), k_JA, _real(v_ref, kf), walk)
        dq_sum[...] += dot(dscores_IJ.astype(k_JA.dtype), k_JA, over=(1, 0))

    @pl.when(step == walk.span - 1)
    def _() -> None:
        dq_ref[...] = (dq_sum[...] * (walk.alpha / n_ref[0])).astype(dq_ref.dtype)


def _key_kernel(
    low: Any, high: Any, n_ref: Any, qf: Any, kf: Any, grad_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any,
    dk_ref: Any, dv_ref: Any, dk_sum: Any, dv_sum: Any, *, walk: Walk,
) -> None:  # fmt: skip
    j, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(walk.meets(walk.queries_of(j, step), j, low, high))
    def _() -> None:
        grad_IV, q_IA = _real(grad_ref, qf), _real(q_ref, qf)
        weights_IJ, dscores_IJ = _slopes(qf, kf, grad_IV, q_IA, _real(k_ref, kf), _real(v_ref, kf), walk)
        dv_sum[...] += dot(weights_IJ.astype(grad_IV.dtype), grad_IV, over=(0, 0))
        dk_sum[...] += dot(dscores_IJ.astype(q_IA.dtype), q_IA, over=(0, 0))

    @pl.when(step == walk.span - 1)
    def _() -> None:
        dk_ref[...] = (dk_sum[...] * (walk.alpha / n_ref[0])).astype(dk_ref.dtype)
        dv_ref[...] = (dv_sum[...] / n_ref[0]).astype(dv_ref.dtype)


@dataclass(frozen=True, slots=True)
class _Heads:
    """How one head's [tokens, width] is cut out of [M, H, width]: no copy where widths fill whole registers."""

    packed: bool

    @staticmethod
    def of(*widths: int) -> _Heads:
        return _Heads(all(width % LANES == 0 for width in widths))

    def bring(self, x_MHE: jax.Array) -> jax.Array:
        return x_MHE.reshape(x_MHE.shape[0], -1) if self.packed else jnp.transpose(x_MHE, (1, 0, 2))

    def back(self, x: jax.Array, num_heads: int) -> jax.Array:
        return x.reshape(x.shape[0], num_heads, -1) if self.packed else jnp.transpose(x, (1, 0, 2))

    def spec(self, tokens: int, width: int, block: Callable[..., Any]) -> pl.BlockSpec:
        """Return the spec of one head's block; `block` says which, from the grid's place and the prefetched facts."""
        if self.packed:
            return pl.BlockSpec((tokens, width), lambda h, *rest: (block(*rest), h))
        return pl.BlockSpec((None, tokens, width), lambda h, *rest: (h, block(*rest), 0))

    def shape(self, M: int, H: int, E: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((M, H * E) if self.packed else (H, M, E), dtype)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Call:
    """What the three kernels' calls have alike: grid, blocks and operands."""

    walk: Walk
    heads: _Heads
    H: int
    A: int
    V: int
    interpret: Any

    def _own(self, block: Any, *_: Any) -> Any:
        return block

    def _other(self, other: Callable[[Any, Any], Any], mine_is_query: bool) -> Callable[..., Any]:
        """Return the block at a step of the walk; a block's own where nobody meets, which is not fetched again."""

        def block(mine: Any, step: Any, low: Any, high: Any, _: Any) -> Any:
            there = other(mine, step)
            met = self.walk.meets(mine, there, low, high) if mine_is_query else self.walk.meets(there, mine, low, high)
            return jnp.where(met, there, mine)

        return block

    def run(
        self, kernel: Any, arrays: tuple[Any, ...], out: tuple[tuple[int, Any], ...], name: str, *, keys: bool
    ) -> list[Any]:
        """Run a kernel.

        Args:
            arrays: facts, low, high, n, then the gradient or none, q, k and v.
            out: width and dtype of each result.
            keys: whether a block of keys walks over queries; else the other way round.
        """
        walk, heads = self.walk, self.heads
        facts, low, high, n, *given = arrays
        own, other = self._own, self._other(walk.queries_of if keys else walk.keys_of, not keys)
        query, key = (other, own) if keys else (own, other)

        def of_facts(block: Callable[..., Any]) -> pl.BlockSpec:
            return pl.BlockSpec((FACTS, walk.block), lambda h, *rest: (0, block(*rest)))

        of_given = [(self.V, query)] * (len(given) - 3) + [(self.A, query), (self.A, key), (self.V, key)]
        call = pl.pallas_call(
            functools.partial(kernel, walk=walk),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(self.H, walk.num_blocks, walk.span),
                in_specs=[of_facts(query), of_facts(key), *(heads.spec(walk.block, *each) for each in of_given)],
                out_specs=[heads.spec(walk.block, width, own) for width, _ in out],
                scratch_shapes=[pltpu.VMEM((walk.block, width), jnp.float32) for width, _ in out],
            ),
            out_shape=[heads.shape(walk.num_tokens, self.H, width, dtype) for width, dtype in out],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            cost_estimate=self._cost(len(given), len(out)),
            interpret=self.interpret,
            name=name,
        )
        found = call(low, high, n, facts, facts, *map(heads.bring, given))
        return [heads.back(each, self.H) for each in found]

    def _cost(self, given: int, out: int) -> pl.CostEstimate:
        walk, wide = self.walk, self.A + self.V
        pairs = self.H * walk.num_blocks * walk.span * walk.block**2
        products = wide if given == 3 else 2 * self.A + self.V + (self.V if out == 2 else 0)
        moved = self.H * walk.num_tokens * 4 * (wide * walk.span + wide)
        return pl.CostEstimate(flops=2 * pairs * products, transcendentals=pairs, bytes_accessed=moved)


def _prepared(
    q_MHA: jax.Array, v_MHV: jax.Array, segments_M: jax.Array, prefix_B: jax.Array, targets_B: jax.Array, n: jax.Array,
    rule: AttentionRule, alpha: float, longest: int, interpret: Any,
) -> tuple[_Call, tuple[jax.Array, ...]]:  # fmt: skip
    M, H, A = q_MHA.shape
    V = v_MHV.shape[2]
    size = block_size(M)
    walk = Walk(M, longest, size, rule, alpha)
    facts, low, high = facts_of(segments_M, prefix_B, targets_B, walk)
    return _Call(walk, _Heads.of(A, V), H, A, V, interpret), (facts, low, high, n.astype(jnp.float32).reshape(1))


def forward(
    q_MHA: jax.Array, k_MHA: jax.Array, v_MHV: jax.Array, segments_M: jax.Array, prefix_B: jax.Array,
    targets_B: jax.Array, n: jax.Array, rule: AttentionRule, alpha: float, *, longest: int, interpret: Any = False,
) -> jax.Array:  # fmt: skip
    """Return silu(alpha · q·kᵀ)/n, masked by `rule` within rows, times v: [M, H, V], zeros where no token stands.

    Args:
        segments_M: int32, the row of each token: rows ascend, a row's tokens stand side by side, its targets last;
            −1 where no token stands.
        prefix_B: tokens of each row before its targets; of a row that has none here, any number.
        targets_B: targets of each row.
        n: [], what scores are divided by.
        rule: its `num_targets` has no meaning here: how many targets a row has, `targets_B` says.
        longest: the most tokens that any row has; a row with more would be cut.
    """
    call, facts = _prepared(q_MHA, v_MHV, segments_M, prefix_B, targets_B, n, rule, alpha, longest, interpret)
    out = ((v_MHV.shape[2], v_MHV.dtype),)
    found: jax.Array = call.run(
        _forward_kernel, (*facts, q_MHA, k_MHA, v_MHV), out, "hstu_jagged_attention", keys=False
    )[0]
    return found


def backward(
    grad_MHV: jax.Array, q_MHA: jax.Array, k_MHA: jax.Array, v_MHV: jax.Array, segments_M: jax.Array,
    prefix_B: jax.Array, targets_B: jax.Array, n: jax.Array, rule: AttentionRule, alpha: float, *, longest: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of q, k and v, zeros where no token stands; arguments as of `forward`."""
    call, facts = _prepared(q_MHA, v_MHV, segments_M, prefix_B, targets_B, n, rule, alpha, longest, interpret)
    arrays = (*facts, grad_MHV, q_MHA, k_MHA, v_MHV)
    A, V = q_MHA.shape[2], v_MHV.shape[2]
    (dq,) = call.run(_query_kernel, arrays, ((A, q_MHA.dtype),), "hstu_jagged_attention_dq", keys=False)
    of_keys = ((A, k_MHA.dtype), (V, v_MHV.dtype))
    dk, dv = call.run(_key_kernel, arrays, of_keys, "hstu_jagged_attention_dkv", keys=True)
    return dq, dk, dv
