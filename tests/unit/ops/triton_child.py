"""The CUDA kernels of HSTU attention against the reference in float64, run by Triton's interpreter on the CPU.

`test_hstu_triton.py` runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import ALPHA, BASE, cases, hold, tensors
from hypothesis import given, settings
from torch import Tensor

from twinstep.worker.ops import hstu_triton
from twinstep.worker.ops.hstu_attention import AttentionRule


def by_triton(inputs: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule) -> tuple[Tensor, ...]:
    grad, q, k, v = inputs
    options = (rule.num_targets, rule.contextual_len, rule.window, rule.target_aware, rule.full_len, ALPHA)
    assert hstu_triton.takes(q, v)
    blocks = hstu_triton.Blocks(16, 16)  # small, so that rows of a few dozen tokens have several
    return (
        hstu_triton.forward(q, k, v, *rest, *options, blocks=blocks),
        *hstu_triton.backward(grad, q, k, v, *rest, *options, blocks=blocks),
    )


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_forward_and_gradients_are_the_references(case: dict[str, Any]) -> None:
    inputs, rest = tensors(case)
    hold(by_triton(inputs, rest, case["rule"]), inputs, rest, case["rule"], tolerance=1e-6)


RULES = [
    AttentionRule(6),
    AttentionRule(6, window=5),
    AttentionRule(6, contextual_len=3),
    AttentionRule(6, contextual_len=3, window=5, full_len=7),
    AttentionRule(6, contextual_len=3, target_aware=False),
    AttentionRule(6, window=5, target_aware=False, full_len=4),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_rule_is_followed(rule: AttentionRule) -> None:
    inputs, rest = tensors({**BASE, "rule": rule, "prefix": [40, 17, 1], "slots": 46})
    hold(by_triton(inputs, rest, rule), inputs, rest, rule, tolerance=1e-6)


def test_any_strides_are_read_and_float16_has_sums_in_float32() -> None:
    inputs, rest = tensors({**BASE, "prefix": [20, 3, 0], "slots": 26}, torch.float16)
    turned = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in inputs]
    found = by_triton(turned, rest, BASE["rule"])
    assert {x.dtype for x in found} == {torch.float16}
    # The interpreter knows no bfloat16. Weights and slopes are rounded once more than in the CPU's kernel.
    hold(found, inputs, rest, BASE["rule"], tolerance=2.0**-10)
    for ours, plain in zip(found, by_triton(inputs, rest, BASE["rule"]), strict=True):
        assert torch.equal(ours, plain)


def test_an_empty_batch_and_wide_heads() -> None:
    q = torch.zeros(0, 5, 1, 4)
    rest = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.tensor(1.0))
    assert hstu_triton.forward(q, q, q, *rest, 2, 0, 0, True, 0, ALPHA).shape == q.shape
    assert not hstu_triton.takes(torch.zeros(1, 1, 1, 512), q)
    assert not hstu_triton.takes(q.double(), q.double())
