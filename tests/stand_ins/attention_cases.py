"""Rows, rules and numbers for kernels of HSTU attention, and the reference in float64 that they are held to."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.ops.hstu_attention import AttentionRule, reference, reference_backward, slot_mask, slot_valid

WIDTHS = ((32, 32), (16, 32), (5, 7), (48, 1))
ALPHA = 0.3

BASE: dict[str, Any] = {
    "widths": (32, 32),
    "heads": 2,
    "slots": 76,
    "prefix": [70, 33, 0],
    "targets": [6, 2, 0],
    "rule": AttentionRule(6),
    "seed": 1,
}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    B, P, K = draw(st.integers(1, 4)), draw(st.integers(0, 70)), draw(st.integers(0, 20))
    P = max(P, 1 - K)
    return {
        "widths": draw(st.sampled_from(WIDTHS)),
        "heads": draw(st.integers(1, 3)),
        "slots": P + K,
        "prefix": draw(st.lists(st.sampled_from((0, 1, 15, 16, 17, P // 2, P)), min_size=B, max_size=B)),
        "targets": draw(st.lists(st.integers(0, K), min_size=B, max_size=B)),
        "rule": AttentionRule(
            K,
            draw(st.sampled_from((0, 1, 3))),
            draw(st.sampled_from((0, 1, 5, 33))),
            draw(st.booleans()),
            draw(st.sampled_from((0, 0, 1, 7, 40))),
        ),
        "seed": draw(st.integers(0, 99)),
    }


def tensors(case: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return grad, q, k, v with NaN where no token stands, and lengths and n."""
    generator = torch.Generator().manual_seed(case["seed"])
    A, V = case["widths"]
    S, K = case["slots"], case["rule"].num_targets
    prefix = torch.tensor(case["prefix"]).clamp(max=S - K)
    targets = torch.tensor(case["targets"])
    dead = ~slot_valid(prefix, targets, S, K)
    made = []
    for width in (V, A, A, V):
        x = torch.randn(len(prefix), S, case["heads"], width, generator=generator).to(dtype)
        x[dead] = math.nan
        made.append(x)
    return made, (prefix, targets, torch.tensor(11.0))


def by_reference(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule) -> tuple[Tensor, ...]:
    wide = [x.double() for x in inputs]
    return reference(*wide[1:], *rest, rule, ALPHA), *reference_backward(*wide, *rest, rule, ALPHA)


def magnitudes(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule) -> tuple[Tensor, ...]:
    """Return, per element of the output and of the gradients, the sum of the sizes of the terms it is summed from.

    Rounding errors follow these sizes, not the sum's: terms may cancel. |silu(s)| <= |s|, |silu'(s)| < 1.1 and
    |silu''(s)| <= 0.5, so an error of eps in a score's terms moves a slope by less than eps times the score's size.
    """
    prefix, targets, n = rest
    seen = slot_mask(prefix, targets, inputs[0].shape[1], rule).unsqueeze(1)
    grad, q, k, v = (x.double().nan_to_num().abs() for x in inputs)
    scores = torch.einsum("bqha,bkha->bhqk", q, k) * ALPHA * seen / n
    sloped = torch.einsum("bqhv,bkhv->bhqk", grad, v) * ALPHA * (seen + scores * n) / n
    return (
        torch.einsum("bhqk,bkhv->bqhv", scores, v),
        torch.einsum("bhqk,bkha->bqha", sloped, k),
        torch.einsum("bhqk,bqha->bkha", sloped, q),
        torch.einsum("bhqk,bqhv->bkhv", scores, grad),
    )


def hold(
    found: tuple[Tensor, ...],
    inputs: list[Tensor],
    rest: tuple[Tensor, ...],
    rule: AttentionRule,
    tolerance: float = 5e-7,
) -> None:
    """Hold what a kernel gave to the reference in float64, each element by the sizes of its own terms."""
    want = by_reference(inputs, rest, rule)
    for ours, theirs, size in zip(found, want, magnitudes(inputs, rest, rule), strict=True):
        assert ours.shape == theirs.shape
        assert torch.isfinite(ours).all()
        assert bool(((ours - theirs).abs() <= tolerance * size + 1e-30).all())
