"""The CPU kernel of HSTU attention against the reference in float64, for any row lengths, widths and rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import ALPHA, BASE, cases, hold, tensors
from hypothesis import given, settings
from torch import Tensor

from twinstep.worker.ops import hstu_kernel, native
from twinstep.worker.ops.hstu_attention import AttentionRule, reference

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")


def by_kernel(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule) -> tuple[Tensor, ...]:
    grad, q, k, v = inputs
    kernel = hstu_kernel.runs(q, v)
    assert kernel is not None
    options = (rule.num_targets, rule.contextual_len, rule.window, rule.target_aware, rule.full_len, ALPHA)
    return (
        hstu_kernel.forward(kernel, q, k, v, *rest, *options),
        *hstu_kernel.backward(kernel, grad, q, k, v, *rest, *options),
    )


def check(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule, tolerance: float = 5e-7) -> None:
    hold(by_kernel(inputs, rest, rule), inputs, rest, rule, tolerance)


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_forward_and_gradients_are_the_references(case: dict[str, Any]) -> None:
    inputs, rest = tensors(case)
    check(inputs, rest, case["rule"])


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
