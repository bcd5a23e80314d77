"""Which slots a block of attention looks at: every slot that the reference's mask lets it see, once, and few others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.ops.hstu_attention import AttentionRule, slot_mask
from twinstep.worker.ops.hstu_blocks import block_slots, keys_of, queries_of

BLOCK = 16


def blocks(num_slots: int, first: int) -> list[tuple[int, int]]:
    count = -(-first // BLOCK) + -(-(num_slots - first) // BLOCK)
    return [block_slots(number, first, num_slots, BLOCK) for number in range(count)]


def looked_at(prefix: int, targets: int, num_slots: int, rule: AttentionRule, *, by_keys: bool) -> Tensor:
    """Return how often each pair (query slot, key slot) is looked at by the blocks of one row."""
    first = num_slots - rule.num_targets
    options = (rule.contextual_len, rule.window, int(rule.target_aware), rule.full_len)
    times = torch.zeros(num_slots, num_slots, dtype=torch.int64)
    for begin, end in blocks(num_slots, first):
        if by_keys:
            head, *ranges = queries_of(begin, end, prefix, targets, first, *options)
            low, high, target_low, target_high = ranges
            for lowest, highest in ((0, head), (low, high), (target_low, target_high)):
                times[lowest : max(highest, lowest), begin:end] += 1
        else:
            low, high, target_low, target_high = keys_of(begin, end, prefix, targets, first, *options)
            for lowest, highest in ((low, high), (target_low, target_high)):
                times[begin:end, lowest : max(highest, lowest)] += 1
    return times


@settings(max_examples=300, deadline=None)
@given(case=cases(), by_keys=st.booleans())
def test_every_pair_that_is_seen_is_looked_at_once(case: dict[str, Any], by_keys: bool) -> None:
    rule, slots = case["rule"], case["slots"]
    first = slots - rule.num_targets
    prefix = torch.tensor(case["prefix"]).clamp(max=first)
    targets = torch.tensor(case["targets"])
    seen = slot_mask(prefix, targets, slots, rule)
    for row in range(len(prefix)):
        times = looked_at(int(prefix[row]), int(targets[row]), slots, rule, by_keys=by_keys)
        assert int(times.max()) <= 1
        assert bool((times[seen[row]] == 1).all())


@settings(max_examples=50, deadline=None)
@given(first=st.integers(0, 70), num_targets=st.integers(0, 40))
def test_blocks_are_all_slots_in_order_and_none_holds_both_kinds(first: int, num_targets: int) -> None:
    found = blocks(first + num_targets, first)
    assert [slot for begin, end in found for slot in range(begin, end)] == list(range(first + num_targets))
    assert all(end <= first or begin >= first for begin, end in found)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("rule", "most"),
    [
        # Shares of all pairs of a row of 512 whose prefix is half full: what is seen, and the blocks' own corners.
        (AttentionRule(8), 0.16),
        (AttentionRule(8, window=32), 0.05),
        (AttentionRule(8, window=32, contextual_len=4), 0.06),
        (AttentionRule(8, window=32, full_len=32), 0.11),
    ],
    ids=str,
)
def test_blocks_that_nobody_sees_are_left_out(rule: AttentionRule, most: float, by_keys: bool) -> None:
    if rule.full_len and by_keys:
        most = 0.16  # a key does not know which queries see beyond the window: it asks all
    times = looked_at(256, 8, 512, rule, by_keys=by_keys)
    # A block without a token looks at nothing, whatever it would be told.
    alive = torch.tensor([slot < 256 or slot >= 504 for slot in range(512)])
    times[~alive] = 0
    times[:, ~alive] = 0
    assert float(times.sum()) / 512**2 <= most
