"""The CPU kernel of HSTU attention against the reference in float64, for any row lengths, widths and rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.ops import hstu_kernel, native
from twinstep.worker.ops.hstu_attention import AttentionRule, reference, reference_backward, slot_mask, slot_valid

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
WIDTHS = ((32, 32), (16, 32), (5, 7), (48, 1))
ALPHA = 0.3


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


def by_kernel(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule) -> tuple[Tensor, ...]:
    grad, q, k, v = inputs
    kernel = hstu_kernel.runs(q, v)
    assert kernel is not None
    options = (rule.num_targets, rule.contextual_len, rule.window, rule.target_aware, rule.full_len, ALPHA)
    return (
        hstu_kernel.forward(kernel, q, k, v, *rest, *options),
        *hstu_kernel.backward(kernel, grad, q, k, v, *rest, *options),
    )


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


def check(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule, tolerance: float = 5e-7) -> None:
    """Hold the kernel to the reference in float64, each element by the sizes of its own terms."""
    found, want = by_kernel(inputs, rest, rule), by_reference(inputs, rest, rule)
    for ours, theirs, size in zip(found, want, magnitudes(inputs, rest, rule), strict=True):
        assert ours.shape == theirs.shape
        assert torch.isfinite(ours).all()
        assert bool(((ours - theirs).abs() <= tolerance * size + 1e-30).all())


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_forward_and_gradients_are_the_references(case: dict[str, Any]) -> None:
    inputs, rest = tensors(case)
    check(inputs, rest, case["rule"])


BASE: dict[str, Any] = {
    "widths": (32, 32),
    "heads": 2,
    "slots": 76,
    "prefix": [70, 33, 0],
    "targets": [6, 2, 0],
    "rule": AttentionRule(6),
    "seed": 1,
}


def test_any_strides_are_read_without_a_copy() -> None:
    inputs, rest = tensors(BASE)
    want = by_kernel(inputs, rest, BASE["rule"])
    packed = torch.cat([x.flatten(2) for x in inputs], dim=2)
    views = [x.unflatten(2, (2, -1)) for x in packed.split([64] * 4, dim=2)]
    assert not views[1].is_contiguous()
    turned = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in inputs]
    expanded = [inputs[0], inputs[1][:, :, :1].expand(-1, -1, 2, -1), *inputs[2:]]
    for strided in (views, turned):
        for ours, theirs in zip(by_kernel(strided, rest, BASE["rule"]), want, strict=True):
            assert torch.equal(ours, theirs)
    check(expanded, rest, BASE["rule"])


def test_bfloat16_is_read_and_written_with_sums_in_float32() -> None:
    inputs, rest = tensors(BASE, torch.bfloat16)
    assert {x.dtype for x in by_kernel(inputs, rest, BASE["rule"])} == {torch.bfloat16}
    check(inputs, rest, BASE["rule"], tolerance=2.0**-8)


def test_the_number_of_threads_changes_no_bit() -> None:
    inputs, rest = tensors(BASE)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(by_kernel(inputs, rest, BASE["rule"]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_scores_of_any_size_stay_finite() -> None:
    inputs, rest = tensors({**BASE, "prefix": [70], "targets": [6]})
    inputs[1] *= 1e3
    check(inputs, rest, BASE["rule"])


def test_lengths_beyond_the_slots_are_cut() -> None:
    inputs, rest = tensors({**BASE, "prefix": [70], "targets": [6]})
    want = by_kernel(inputs, rest, BASE["rule"])
    beyond = (torch.tensor([10**12]), torch.tensor([10**12]), rest[2])
    assert all(torch.equal(a, b) for a, b in zip(by_kernel(inputs, beyond, BASE["rule"]), want, strict=True))
    check(inputs, beyond, BASE["rule"])


def test_other_dtypes_and_widths_run_the_reference() -> None:
    q = torch.zeros(1, 1, 1, 4)
    assert hstu_kernel.runs(q.double(), q.double()) is None
    assert hstu_kernel.runs(q, q.double()) is None
    assert hstu_kernel.runs(torch.zeros(1, 1, 1, 4096), q) is None
    inputs, rest = tensors(BASE, torch.float64)
    options = (6, 0, 0, True, 0, ALPHA)
    out = torch.ops.twinstep.hstu_attention(*inputs[1:], *rest, *options)
    assert out.dtype is torch.float64
    assert torch.equal(out, reference(*inputs[1:], *rest, BASE["rule"], ALPHA))
