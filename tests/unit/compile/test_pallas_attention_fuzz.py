"""The TPU kernels of HSTU attention, interpreted, against its rule written out pair by pair in Python and float64.

Rules, lengths, widths and dtypes are drawn; blocks are small, so that rows of a few dozen slots have several, with
edges at every place. Every slot without a token holds NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.compile.lower import pallas_attention
from twinstep.worker.compile.lower.pallas_attention import backward, forward
from twinstep.worker.ops.hstu_attention import AttentionRule

ROWS, HEADS, ALPHA = 5, 2, 0.4
SHAPES = ((13, 8, 4), (24, 4, 8), (37, 8, 8))
"""Slots, query width, value width: one block, whole blocks, a short last block."""
DTYPES = {"float32": (jnp.float32, 3e-6), "bfloat16": (jnp.bfloat16, 3e-2)}


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_attention, "LANES", 8)
        patch.setattr(pallas_attention, "LARGEST_BLOCK", 16)
        yield


def places(slots: int, rule: AttentionRule, prefix: int, targets: int) -> dict[int, int]:
    """The column, among the row's tokens, of each slot that holds one."""
    first = slots - rule.num_targets
    return {slot: slot for slot in range(prefix)} | {first + k: prefix + k for k in range(targets)}


def may_see(rule: AttentionRule, query: int, key: int, prefix: int, targets: int) -> bool:
    """Whether the token at column `query` sees the one at column `key`, as the paper's code has it."""

    def rank(column: int) -> int:
        shifted = max(column - rule.contextual_len + 1, 0) if rule.contextual_len else column
        return min(shifted, of_targets) if rule.target_aware else shifted

    of_targets = prefix - rule.contextual_len + 1 if rule.contextual_len else prefix
    if query == key:
        return True
    q, k = rank(query), rank(key)
    if rule.contextual_len and q == 0 and (k < of_targets or not rule.target_aware):
        return True
    if q <= k:
        return False
    end = of_targets if rule.target_aware else of_targets + targets
    near = not rule.window or q - k <= rule.window
    return near or bool(rule.full_len and q >= end - rule.full_len)


def expected(inputs: list[Tensor], rule: AttentionRule, prefix: list[int], targets: list[int], n: float) -> Any:
    """Return out, dq, dk, dv in float64, zeros in slots without a token."""
    grad, q, k, v = [each.double().nan_to_num() for each in inputs]
    slots = q.shape[1]
    mask = torch.zeros(ROWS, slots, slots, dtype=torch.bool)
    for row, lengths in enumerate(zip(prefix, targets, strict=True)):
        at = places(slots, rule, *lengths)
        for i, query in at.items():
            for j, key in at.items():
                mask[row, i, j] = may_see(rule, query, key, *lengths)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * ALPHA
    weights = torch.nn.functional.silu(scores) / n * mask[:, None]
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@functools.cache
def compiled(rule: AttentionRule) -> Any:
    return (
        jax.jit(lambda *args: forward(*args, rule, ALPHA, interpret=True)),
        jax.jit(lambda *args: backward(*args, rule, ALPHA, interpret=True)),
    )


@st.composite
def cases(draw: Any) -> Any:
    shape = draw(st.sampled_from(SHAPES))
    most = draw(st.sampled_from([0, 1, 5]))
    window = draw(st.sampled_from([0, 1, 4, 9]))
    rule = AttentionRule(
        most,
        contextual_len=draw(st.sampled_from([0, 1, 3])),
        window=window,
        target_aware=draw(st.booleans()),
        full_len=draw(st.sampled_from([0, 2, 20])) if window else 0,
    )
    lengths = st.lists(st.integers(0, shape[0] - most), min_size=ROWS, max_size=ROWS)
    few = st.lists(st.integers(0, most), min_size=ROWS, max_size=ROWS)
    # A row is full, and one is empty, in every case: what is drawn seldom is where blocks end.
    prefix, targets = [shape[0] - most, 0, *draw(lengths)[2:]], [most, 0, *draw(few)[2:]]
    return shape, rule, prefix, targets, draw(st.sampled_from(sorted(DTYPES))), draw(st.integers(0, 99))


@settings(max_examples=14, deadline=None)
@given(case=cases())
def test_both_kernels_follow_the_rule_pair_by_pair(case: Any) -> None:
    (slots, A, V), rule, prefix, targets, name, seed = case
    dtype, tolerance = DTYPES[name]
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(ROWS, slots, HEADS, width, generator=generator) for width in (V, A, A, V)]
    if name == "bfloat16":
        inputs = [each.bfloat16().float() for each in inputs]
    for row, lengths in enumerate(zip(prefix, targets, strict=True)):
        empty = [slot for slot in range(slots) if slot not in places(slots, rule, *lengths)]
        for each in inputs:
            each[row, empty] = float("nan")
    n = float(max(p + t for p, t in zip(prefix, targets, strict=True)) or 1)
    arrays = [jnp.asarray(each.numpy()).astype(dtype) for each in inputs]
    rest = [jnp.asarray(prefix), jnp.asarray(targets), jnp.asarray(n, jnp.float32)]
    run_forward, run_backward = compiled(rule)
    found = [run_forward(*arrays[1:], *rest), *run_backward(*arrays, *rest)]
    for what, got, want in zip(
        ("out", "dq", "dk", "dv"), found, expected(inputs, rule, prefix, targets, n), strict=True
    ):
        assert got.dtype == dtype
        gap = np.abs(np.asarray(got, np.float64) - want.numpy()).max()
        assert gap <= tolerance * max(float(want.abs().max()), 1e-3), (what, gap)
