"""Which slots a block of HSTU attention has to look at: integers of one row, for kernels that go block by block.

Plain functions of integers, so that one source is run twice: `hstu_triton.py` compiles them into its kernels, and tests
hold them to the reference's mask without a GPU. They never leave out a slot that is seen; they may name some that are
not, which the kernels mask. A block never holds prefix and target slots at once. `rule` fields are those of
`hstu_attention.AttentionRule`; a rule that is compiled in costs nothing where it is off.

# Names: prefix, targets: tokens of the row; first: slot of its first target, P; rank, window: as in the rule.
"""

from __future__ import annotations

# Triton reads these functions' source: no calls of functions of ours, one return, no chained comparison.


def block_slots(number: int, first: int, num_slots: int, BLOCK: int) -> tuple[int, int]:
    """Return (begin, end), the slots of a block: ⌈P / BLOCK⌉ blocks of the prefix, then those of the targets."""
    before = (first + BLOCK - 1) // BLOCK
    begin = number * BLOCK if number < before else first + (number - before) * BLOCK
    end = min(begin + BLOCK, first if number < before else num_slots)
    return begin, end


def keys_of(
    begin: int,
    end: int,
    prefix: int,
    targets: int,
    first: int,
    CONTEXTUAL: int,
    WINDOW: int,
    TARGET_AWARE: int,
    FULL: int,
) -> tuple[int, int, int, int]:
    """Return the keys that queries in slots `begin` to `end` may see: prefix (low, high), targets (low, high)."""
    shift = CONTEXTUAL - 1 if CONTEXTUAL > 0 else 0
    in_targets = begin >= first
    column = begin - first + prefix if in_targets else begin
    last = prefix - shift
    low = 0
    if WINDOW > 0:
        rank = max(column - shift, 0)
        top = max(column + (end - begin) - 1 - shift, 0)
        limit = prefix + targets - shift
        if TARGET_AWARE:
            rank = min(rank, last)
            top = min(top, last)
            limit = last
        # Keys of rank 0 are the contextual columns, all of them.
        low = rank - WINDOW + shift if rank > WINDOW else 0
        if FULL > 0:
            low = low if top < limit - FULL else 0
    high = prefix if in_targets else min(end, prefix)
    target_low = begin if in_targets else first
    target_high = min(end, first + targets) if in_targets else first
    if CONTEXTUAL > 0:
        wide = begin < CONTEXTUAL
        if not TARGET_AWARE:
            wide = wide | (prefix < CONTEXTUAL)  # targets among the first columns are contextual too
        high = prefix if wide else high
        low = 0 if wide else low
    if not TARGET_AWARE:
        target_low = first
        if CONTEXTUAL > 0:
            target_high = first + targets if wide else target_high
    return low, high, target_low, target_high


def queries_of(
    begin: int,
    end: int,
    prefix: int,
    targets: int,
    first: int,
    CONTEXTUAL: int,
    WINDOW: int,
    TARGET_AWARE: int,
    FULL: int,
) -> tuple[int, int, int, int, int]:
    """Return the queries that may see keys in slots `begin` to `end`: a head, 0 to it, prefix and targets (low, high).

    The head holds contextual queries, which see keys behind them.
    """
    shift = CONTEXTUAL - 1 if CONTEXTUAL > 0 else 0
    in_targets = begin >= first
    last = prefix - shift
    low = prefix if in_targets else begin
    high = prefix
    target_low = first
    target_high = first + targets
    head = 0
    if WINDOW > 0 and FULL == 0:
        top = max(end - 1 - shift, 0)
        if TARGET_AWARE:
            top = min(top, last)
        reach = max(top + WINDOW + shift + 1, end)
        high = high if in_targets else min(reach, prefix)
        if TARGET_AWARE:
            far = last - top > WINDOW
            target_high = target_high if in_targets else (first if far else target_high)
    if CONTEXTUAL > 0:
        head = min(begin, min(CONTEXTUAL, prefix))
        if TARGET_AWARE:
            head = 0 if in_targets else head
    if TARGET_AWARE:
        target_low = begin if in_targets else first
        target_high = min(end, target_high) if in_targets else target_high
    else:
        if CONTEXTUAL == 0:
            target_low = begin if in_targets else first
    return head, low, high, target_low, target_high
