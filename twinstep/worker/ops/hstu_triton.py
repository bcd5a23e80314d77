"""The CUDA kernels of HSTU attention, in Triton: forward, and backward with the scores computed again.

No scores are written to memory, blocks that nobody sees are skipped (`hstu_blocks.py`), and no gradient is added to by
two programs, so results are the same bits on every run. Sums are float32; numbers may be float32, bfloat16 or float16.
Any strides are read. `hstu_attention.py` imports this late: it needs Triton, which CPU builds of torch come without.

# Shapes: B rows, S slots per row, K of them target slots, H heads, A query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.worker.ops import hstu_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 256  # of a head: four blocks of 32 slots must fit into a multiprocessor's shared memory


def _compiled(function: Callable[..., Any]) -> Any:
    """Return plain arithmetic as a function that kernels may call; Triton's interpreter calls it as it is."""
    made = triton.jit(function)
    return made if isinstance(made, triton.JITFunction) else function


_block_slots = _compiled(hstu_blocks.block_slots)
_keys_of = _compiled(hstu_blocks.keys_of)
_queries_of = _compiled(hstu_blocks.queries_of)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel is cut and launched."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


def blocks_for(width: int, dtype: torch.dtype) -> Blocks:
    """Return blocks whose operands fit into shared memory, by the wider of A and V."""
    if width <= 64:
        return Blocks(64, 64)
    narrow = dtype is not torch.float32 and width <= 128
    return Blocks(64, 64, warps=8) if narrow else Blocks(32, 32)


def takes(q: Tensor, v: Tensor) -> bool:
    """Say whether the kernels take tensors of this dtype and these widths."""
    return q.dtype in DTYPES and v.dtype == q.dtype and 0 < q.shape[3] <= MAX_WIDTH and 0 < v.shape[3] <= MAX_WIDTH


@triton.jit
def _load(base, slots, there, slot_stride, width_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return [slots, BLOCK] numbers, zeros where there is no token: what stands there, NaN included, is not read."""
    columns = tl.arange(0, BLOCK)
    place = slots.to(tl.int64)[:, None] * slot_stride + columns[None, :] * width_stride
    return tl.load(base + place, mask=there[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(base, slots, there, slot_stride, width_stride, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    place = slots.to(tl.int64)[:, None] * slot_stride + columns[None, :] * width_stride
    tl.store(base + place, value.to(base.dtype.element_ty), mask=there[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _ranks(slots, prefix, targets, first, CONTEXTUAL: tl.constexpr, TARGET_AWARE: tl.constexpr):
    """Return (column, rank, whether a token stands there) of slots."""
    in_prefix = slots < first
    columns = tl.where(in_prefix, slots, slots - first + prefix)
    ranks = columns
    last = prefix
    if CONTEXTUAL > 0:
        ranks = tl.maximum(columns - (CONTEXTUAL - 1), 0)
        last = prefix - (CONTEXTUAL - 1)
    if TARGET_AWARE:
        ranks = tl.minimum(ranks, last)
    return columns, ranks, tl.where(in_prefix, slots < prefix, slots - first < targets)


@triton.jit
def _sees(
    q_slots,
    q_there,
    k_slots,
    k_there,
    prefix,
    targets,
    first,
    CONTEXTUAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TARGET_AWARE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return which query slot may look at which key slot; `attention_mask` in integers."""
    q_columns, q_ranks, _ = _ranks(q_slots, prefix, targets, first, CONTEXTUAL, TARGET_AWARE)
    k_columns, k_ranks, _ = _ranks(k_slots, prefix, targets, first, CONTEXTUAL, TARGET_AWARE)
    last = prefix
    limit = prefix + targets
    if CONTEXTUAL > 0:
        last = prefix - (CONTEXTUAL - 1)
        limit = limit - (CONTEXTUAL - 1)
    if TARGET_AWARE:
        limit = last
    far = q_ranks[:, None] - k_ranks[None, :]
    seen = far > 0
    if WINDOW > 0:
        near = far <= WINDOW
        if FULL > 0:
            near = near | (q_ranks >= limit - FULL)[:, None]
        seen = seen & near
    seen = seen | (q_columns[:, None] == k_columns[None, :])
    if CONTEXTUAL > 0:
        if TARGET_AWARE:
            seen = seen | ((q_ranks == 0)[:, None] & (k_ranks < last)[None, :])
        else:
            seen = seen | ((q_ranks == 0)[:, None] & (k_ranks >= 0)[None, :])
    return seen & q_there[:, None] & k_there[None, :]


@triton.jit
def _attend(
    sums, q_block, q_slots, q_there, k, v, low, high, n, alpha, prefix, targets, first,
    k_slot, k_width, v_slot, v_width,
    A: tl.constexpr, V: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
    CONTEXTUAL: tl.constexpr, WINDOW: tl.constexpr, TARGET_AWARE: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `sums` with the weighted values of keys `low` to `high` added."""
    for begin in range(low, high, KEYS):
        k_slots = begin + tl.arange(0, KEYS)
        k_there = k_slots < high
        k_block = _load(k, k_slots, k_there, k_slot, k_width, A, BLOCK_A)
        v_block = _load(v, k_slots, k_there, v_slot, v_width, V, BLOCK_V)
        seen = _sees(q_slots, q_there, k_slots, k_there, prefix, targets, first, CONTEXTUAL, WINDOW, TARGET_AWARE, FULL)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION) * alpha
        weights = tl.where(seen, scores * tl.sigmoid(scores) / n, 0.0)
        sums += tl.dot(weights.to(v_block.dtype), v_block, input_precision=PRECISION)
    return sums


@triton.jit
def _forward(
    q, k, v, out, prefix_lengths, target_lengths, n_place, alpha, num_slots, first, heads,
    q_row, q_slot, q_head, q_width, k_row, k_slot, k_head, k_width, v_row, v_slot, v_head, v_width,
    o_row, o_slot, o_head, o_width,
    A: tl.constexpr, V: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CONTEXTUAL: tl.constexpr, WINDOW: tl.constexpr, TARGET_AWARE: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    prefix = tl.load(prefix_lengths + row)
    targets = tl.load(target_lengths + row)
    n = tl.load(n_place)
    begin, end = _block_slots(tl.program_id(1), first, num_slots, QUERIES)
    slots = begin + tl.arange(0, QUERIES)
    inside = slots < end
    _, _, token = _ranks(slots, prefix, targets, first, CONTEXTUAL, TARGET_AWARE)
    there = inside & token
    q_block = _load(q + row * q_row + head * q_head, slots, there, q_slot, q_width, A, BLOCK_A)
    low, high, target_low, target_high = _keys_of(
        begin, end, prefix, targets, first, CONTEXTUAL, WINDOW, TARGET_AWARE, FULL
    )
    some = tl.max(there.to(tl.int32), 0) > 0  # a block without tokens looks at nothing
    high = high if some else low
    target_high = target_high if some else target_low
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    sums = tl.zeros((QUERIES, BLOCK_V), dtype=tl.float32)
    sums = _attend(
        sums, q_block, slots, there, k, v, low, high, n, alpha, prefix, targets, first,
        k_slot, k_width, v_slot, v_width, A, V, BLOCK_A, BLOCK_V, KEYS,
        CONTEXTUAL, WINDOW, TARGET_AWARE, FULL, PRECISION,
    )  # fmt: skip
    sums = _attend(
        sums, q_block, slots, there, k, v, target_low, target_high, n, alpha, prefix, targets, first,
        k_slot, k_width, v_slot, v_width, A, V, BLOCK_A, BLOCK_V, KEYS,
        CONTEXTUAL, WINDOW, TARGET_AWARE, FULL, PRECISION,
    )  # fmt: skip
    _store(out + row * o_row + head * o_head, slots, inside, o_slot, o_width, sums, V, BLOCK_V)


@triton.jit
def _slopes(scores, seen, grad_weights, n, alpha):
    """Return the gradient of q·k: of silu(s) / n, times alpha, where it is seen."""
    gate = tl.sigmoid(scores)
    return tl.where(seen, grad_weights / n * gate * (1.0 + scores * (1.0 - gate)), 0.0) * alpha


@triton.jit
def _query_sums(
    sums, q_block, grad_block, q_slots, q_there, k, v, low, high, n, alpha, prefix, targets, first,
    k_slot, k_width, v_slot, v_width,
    A: tl.constexpr, V: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
    CONTEXTUAL: tl.constexpr, WINDOW: tl.constexpr, TARGET_AWARE: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `sums`, gradients of queries, with the part of keys `low` to `high` added."""
    for begin in range(low, high, KEYS):
        k_slots = begin + tl.arange(0, KEYS)
        k_there = k_slots < high
        k_block = _load(k, k_slots, k_there, k_slot, k_width, A, BLOCK_A)
        v_block = _load(v, k_slots, k_there, v_slot, v_width, V, BLOCK_V)
        seen = _sees(q_slots, q_there, k_slots, k_there, prefix, targets, first, CONTEXTUAL, WINDOW, TARGET_AWARE, FULL)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION) * alpha
        grad_weights = tl.dot(grad_block, tl.trans(v_block), input_precision=PRECISION)
        slopes = _slopes(scores, seen, grad_weights, n, alpha)
        sums += tl.dot(slopes.to(k_block.dtype), k_block, input_precision=PRECISION)
    return sums


@triton.jit
def _backward_queries(
    q, k, v, grad, dq, prefix_lengths, target_lengths, n_place, alpha, num_slots, first, heads,
    q_row, q_slot, q_head, q_width, k_row, k_slot, k_head, k_width, v_row, v_slot, v_head, v_width,
    g_row, g_slot, g_head, g_width, d_row, d_slot, d_head, d_width,
    A: tl.constexpr, V: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CONTEXTUAL: tl.constexpr, WINDOW: tl.constexpr, TARGET_AWARE: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    prefix = tl.load(prefix_lengths + row)
    targets = tl.load(target_lengths + row)
    n = tl.load(n_place)
    begin, end = _block_slots(tl.program_id(1), first, num_slots, QUERIES)
    slots = begin + tl.arange(0, QUERIES)
    inside = slots < end
    _, _, token = _ranks(slots, prefix, targets, first, CONTEXTUAL, TARGET_AWARE)
    there = inside & token
    q_block = _load(q + row * q_row + head * q_head, slots, there, q_slot, q_width, A, BLOCK_A)
    grad_block = _load(grad + row * g_row + head * g_head, slots, there, g_slot, g_width, V, BLOCK_V)
    low, high, target_low, target_high = _keys_of(
        begin, end, prefix, targets, first, CONTEXTUAL, WINDOW, TARGET_AWARE, FULL
    )
    some = tl.max(there.to(tl.int32), 0) > 0
    high = high if some else low
    target_high = target_high if some else target_low
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    sums = tl.zeros((QUERIES, BLOCK_A), dtype=tl.float32)
    sums = _query_sums(
        sums, q_block, grad_block, slots, there, k, v, low, high, n, alpha, prefix, targets, first,
        k_slot, k_width, v_slot, v_width, A, V, BLOCK_A, BLOCK_V, KEYS,
        CONTEXTUAL, WINDOW, TARGET_AWARE, FULL, PRECISION,
    )  # fmt: skip
    sums = _query_sums(
        sums, q_block, grad_block, slots, there, k, v, target_low, target_high, n, alpha, prefix, targets, first,
        k_slot, k_width, v_slot, v_width, A, V, BLOCK_A, BLOCK_V, KEYS,
        CONTEXTUAL, WINDOW, TARGET_AWARE, FULL, PRECISION,
    )  # fmt: skip
    _store(dq + row * d_row + head * d_head, slots, inside, d_slot, d_width, sums, A, BLOCK_A)


@triton.jit
def _key_sums(
    k_sums, v_sums, k_block, v_block, k_slots, k_there, q, grad, low, high, n, alpha, prefix, targets, first,
    q_slot, q_width, g_slot, g_width,
    A: tl.constexpr, V: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, QUERIES: tl.constexpr,
    CONTEXTUAL: tl.constexpr, WINDOW: tl.constexpr, TARGET_AWARE: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums, gradients of keys and values, with the part of queries `low` to `high` added."""
    for begin in range(low, high, QUERIES):
        q_slots = begin + tl.arange(0, QUERIES)
        q_there = q_slots < high
        q_block = _load(q, q_slots, q_there, q_slot, q_width, A, BLOCK_A)
        grad_block = _load(grad, q_slots, q_there, g_slot, g_width, V, BLOCK_V)
        seen = _sees(q_slots, q_there, k_slots, k_there, prefix, targets, first, CONTEXTUAL, WINDOW, TARGET_AWARE, FULL)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION) * alpha
        weights = tl.where(seen, scores * tl.sigmoid(scores) / n, 0.0)
        v_sums += tl.dot(tl.trans(weights.to(grad_block.dtype)), grad_block, input_precision=PRECISION)
        grad_weights = tl.dot(grad_block, tl.trans(v_block), input_precision=PRECISION)
        slopes = _slopes(scores, seen, grad_weights, n, alpha)
        k_sums += tl.dot(tl.trans(slopes.to(q_block.dtype)), q_block, input_precision=PRECISION)
    return k_sums, v_sums


@triton.jit
def _backward_keys(
    q, k, v, grad, dk, dv, prefix_lengths, target_lengths, n_place, alpha, num_slots, first, heads,
    q_row, q_slot, q_head, q_width, k_row, k_slot, k_head, k_width, v_row, v_slot, v_head, v_width,
    g_row, g_slot, g_head, g_width, dk_row, dk_slot, dk_head, dk_width, dv_row, dv_slot, dv_head, dv_width,
    A: tl.constexpr, V: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CONTEXTUAL: tl.constexpr, WINDOW: tl.constexpr, TARGET_AWARE: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    prefix = tl.load(prefix_lengths + row)
    targets = tl.load(target_lengths + row)
    n = tl.load(n_place)
    begin, end = _block_slots(tl.program_id(1), first, num_slots, KEYS)
    slots = begin + tl.arange(0, KEYS)
    inside = slots < end
    _, _, token = _ranks(slots, prefix, targets, first, CONTEXTUAL, TARGET_AWARE)
    there = inside & token
    k_block = _load(k + row * k_row + head * k_head, slots, there, k_slot, k_width, A, BLOCK_A)
    v_block = _load(v + row * v_row + head * v_head, slots, there, v_slot, v_width, V, BLOCK_V)
    head_end, low, high, target_low, target_high = _queries_of(
        begin, end, prefix, targets, first, CONTEXTUAL, WINDOW, TARGET_AWARE, FULL
    )
    some = tl.max(there.to(tl.int32), 0) > 0
    head_end = head_end if some else 0
    high = high if some else low
    target_high = target_high if some else target_low
    q += row * q_row + head * q_head
    grad += row * g_row + head * g_head
    k_sums = tl.zeros((KEYS, BLOCK_A), dtype=tl.float32)
    v_sums = tl.zeros((KEYS, BLOCK_V), dtype=tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            part_low, part_high = low, high
        elif part == 1:
            part_low, part_high = target_low, target_high
        else:
            part_low, part_high = 0, head_end
        if part < 2 or CONTEXTUAL > 0:
            k_sums, v_sums = _key_sums(
                k_sums, v_sums, k_block, v_block, slots, there, q, grad, part_low, part_high, n, alpha,
                prefix, targets, first, q_slot, q_width, g_slot, g_width, A, V, BLOCK_A, BLOCK_V, QUERIES,
                CONTEXTUAL, WINDOW, TARGET_AWARE, FULL, PRECISION,
            )  # fmt: skip
    _store(dk + row * dk_row + head * dk_head, slots, inside, dk_slot, dk_width, k_sums, A, BLOCK_A)
    _store(dv + row * dv_row + head * dv_head, slots, inside, dv_slot, dv_width, v_sums, V, BLOCK_V)


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, blocks: Blocks | None = None) -> Tensor:
    """Return the attention's output, contiguous; `rest` as the operator takes it."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    cut = blocks or blocks_for(max(q.shape[3], v.shape[3]), q.dtype)
    numbers, rule = _arguments(q, v, cut, *rest)
    grid = (q.shape[0] * q.shape[2], _blocks(q, rest, cut.queries))
    strides = (*q.stride(), *k.stride(), *v.stride(), *out.stride())
    _forward[grid](q, k, v, out, *numbers, *strides, **rule, num_warps=cut.warps, num_stages=cut.stages)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if dq.numel() == 0:
        return dq, dk, dv
    grad = grad.to(v.dtype)
    cut = blocks or blocks_for(max(q.shape[3], v.shape[3]), q.dtype)
    numbers, rule = _arguments(q, v, cut, *rest)
    pairs = q.shape[0] * q.shape[2]
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride())
    launch = {"num_warps": cut.warps, "num_stages": 1}  # operands of four products fill shared memory as they are
    grid = (pairs, _blocks(q, rest, cut.queries))
    _backward_queries[grid](q, k, v, grad, dq, *numbers, *strides, *dq.stride(), **rule, **launch)
    grid = (pairs, _blocks(q, rest, cut.keys))
    _backward_keys[grid](q, k, v, grad, dk, dv, *numbers, *strides, *dk.stride(), *dv.stride(), **rule, **launch)
    return dq, dk, dv


def _blocks(q: Tensor, rest: tuple[Any, ...], size: int) -> int:
    """Return how many blocks of so many slots a row has: those of its prefix, and those of its targets."""
    num_targets = rest[3]
    return triton.cdiv(q.shape[1] - num_targets, size) + triton.cdiv(num_targets, size)


def _arguments(
    q: Tensor,
    v: Tensor,
    cut: Blocks,
    prefix: Tensor,
    targets: Tensor,
    n: Tensor,
    num_targets: int,
    contextual_len: int,
    window: int,
    target_aware: bool,
    full_len: int,
    alpha: float,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a kernel's arguments after its tensors, and what is compiled into it."""
    S, heads = q.shape[1], q.shape[2]
    first = S - num_targets
    lengths = (prefix.clamp(0, first).to(torch.int32), targets.clamp(0, num_targets).to(torch.int32))
    exact = q.dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    rule = {
        "A": q.shape[3],
        "V": v.shape[3],
        "BLOCK_A": max(16, triton.next_power_of_2(q.shape[3])),  # tl.dot takes no less
        "BLOCK_V": max(16, triton.next_power_of_2(v.shape[3])),
        "QUERIES": cut.queries,
        "KEYS": cut.keys,
        "CONTEXTUAL": contextual_len,
        "WINDOW": window,
        "TARGET_AWARE": target_aware,
        "FULL": full_len,
        "PRECISION": "ieee" if exact else "tf32",
    }
    return (*lengths, n.to(torch.float32), alpha, S, first, heads), rule
