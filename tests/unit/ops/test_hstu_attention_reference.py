"""The attention operator's reference: against a loop over tokens, numeric gradients, and what stands in empty slots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twinstep.worker.ops.hstu_attention import (
    AttentionRule,
    attention_rows,
    fused,
    hstu_attention,
    reference,
    reference_backward,
)

RULES = [
    AttentionRule(0),
    AttentionRule(3),
    AttentionRule(3, window=2),
    AttentionRule(3, contextual_len=2),
    AttentionRule(3, contextual_len=2, window=1),
    AttentionRule(3, contextual_len=2, target_aware=False),
    AttentionRule(3, window=3, target_aware=False),
    AttentionRule(3, window=1, full_len=2),
    AttentionRule(3, window=1, contextual_len=2, full_len=1),
    AttentionRule(3, window=1, target_aware=False, full_len=2),
    AttentionRule(3, window=1, contextual_len=2, target_aware=False, full_len=3),
]
PREFIX, TARGETS = torch.tensor([5, 0, 1, 4, 0]), torch.tensor([3, 2, 0, 1, 0])


def rows(rule: AttentionRule, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    S = 5 + rule.num_targets
    q, k = (torch.randn(5, S, 2, 3, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(5, S, 2, 4, dtype=dtype), PREFIX, TARGETS.clamp(max=rule.num_targets), torch.tensor(7.0)


def sees(rule: AttentionRule, query: int, key: int, prefix: int, length: int) -> bool:
    def rank(column: int) -> int:
        found = max(column - rule.contextual_len + 1, 0) if rule.contextual_len else column
        return min(found, last) if rule.target_aware else found

    last = prefix - rule.contextual_len + 1 if rule.contextual_len else prefix
    far = rank(query) - rank(key)
    end = last if rule.target_aware else length - max(rule.contextual_len - 1, 0)
    full = rule.window == 0 or (rule.full_len > 0 and rank(query) >= end - rule.full_len)
    plain = query == key or (far > 0 and (full or far <= rule.window))
    contextual = rule.contextual_len > 0 and rank(query) == 0 and (rank(key) < last if rule.target_aware else True)
    return plain or contextual


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_reference_is_the_sum_over_tokens_that_are_seen(rule: AttentionRule) -> None:
    q, k, v, prefix, targets, n = rows(rule)
    alpha, first = 0.4, q.shape[1] - rule.num_targets
    want = torch.zeros_like(v)
    for b in range(5):
        slots = [*range(int(prefix[b])), *(first + i for i in range(int(targets[b])))]
        for i, query in enumerate(slots):
            for j, key in enumerate(slots):
                if sees(rule, i, j, int(prefix[b]), len(slots)):
                    for h in range(2):
                        score = alpha * float(q[b, query, h] @ k[b, key, h])
                        want[b, query, h] += score / (1 + math.exp(-score)) / float(n) * v[b, key, h]
    got = reference(q, k, v, prefix, targets, n, rule, alpha)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_are_the_numeric_ones(rule: AttentionRule) -> None:
    q, k, v, *rest = rows(rule)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: reference(*x, *rest, rule, 0.4), leaves, fast_mode=True)
    with fused():
        packed = attention_rows(rest[0], rest[1], num_slots=q.shape[1], rule=rule)
        assert torch.autograd.gradcheck(
            lambda *x: hstu_attention(*x, packed, rest[2], alpha=0.4), leaves, fast_mode=True
        )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_operator_equals_plain_pytorch_and_hides_what_stands_in_empty_slots(rule: AttentionRule) -> None:
    q, k, v, prefix, targets, n = rows(rule)
    plain = attention_rows(prefix, targets, num_slots=q.shape[1], rule=rule)
    want = hstu_attention(q, k, v, plain, n, alpha=0.4)
    grad = torch.randn_like(v)
    assert plain.mask_BSS is not None
    dead = ~plain.mask_BSS.diagonal(dim1=1, dim2=2)
    clean = reference_backward(grad, q, k, v, prefix, targets, n, rule, 0.4)
    for x in (q, k, v, grad):
        x[dead] = math.nan
    got = torch.ops.twinstep.hstu_attention(
        q,
        k,
        v,
        prefix,
        targets,
        n,
        rule.num_targets,
        rule.contextual_len,
        rule.window,
        rule.target_aware,
        rule.full_len,
        0.4,
    )
    torch.testing.assert_close(got, want.masked_fill(dead[:, :, None, None], 0.0))
    for hidden, seen in zip(reference_backward(grad, q, k, v, prefix, targets, n, rule, 0.4), clean, strict=True):
        assert torch.equal(hidden, seen)


# Its test of tracing asks Dynamo, which cannot run once torchax is loaded; other tests trace both operators.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_the_operators_are_well_registered() -> None:
    q, k, v, prefix, targets, n = rows(RULES[1])
    rest = (k, v, prefix, targets, n, 3, 0, 0, True, 0, 0.4)
    backward = (torch.randn_like(v), q, *rest)
    torch.library.opcheck(torch.ops.twinstep.hstu_attention_backward.default, backward, test_utils=CHECKS)
    torch.library.opcheck(torch.ops.twinstep.hstu_attention.default, (q.requires_grad_(), *rest), test_utils=CHECKS)
