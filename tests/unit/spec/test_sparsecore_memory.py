"""The memory model by itself: it counts what it must, in whole bytes, and grows where more is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.sparsecore_memory import FACTS, Generation, StackShape, device_bytes

BASE = StackShape(rows=1000, width=5, samples_per_core=64, max_ids=10, max_unique=10, devices=4, slots=2)


def test_every_generation_has_its_facts_with_a_source() -> None:
    assert set(FACTS) == set(get_args(Generation))
    assert all(each.source for each in FACTS.values())
    assert device_bytes("v4", [BASE]).fits_tile is None


def test_padding_is_counted_by_the_documented_multiples() -> None:
    found = device_bytes("v5p", [BASE])
    # 1000 rows over 16 SparseCores: 64 each, of 8 columns, with two slots; partitions of 16 slots.
    assert found.tables == 4 * 64 * 8 * 4 * 3
    assert found.inputs == 4 * 16 * 16 * 12 + 4 * 16 * 4
    assert found.activations == 4 * 64 * 8 * 4


def test_counts_do_not_overflow() -> None:
    huge = replace(BASE, rows=2**31 - 1, width=1024, devices=1)
    assert device_bytes("v5p", [huge]).tables > 2**44


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(FACTS)),
    st.sampled_from(["rows", "width", "samples_per_core", "max_ids", "max_unique", "slots"]),
    st.integers(1, 10_000),
)
def test_more_of_anything_never_takes_less(generation: Generation, field: str, more: int) -> None:
    less = device_bytes(generation, [BASE])
    bigger = device_bytes(generation, [replace(BASE, **{field: getattr(BASE, field) + more})])
    assert bigger.hbm >= less.hbm
    assert bigger.tile >= less.tile
    both = device_bytes(generation, [BASE, BASE])
    assert both.tables == 2 * less.tables
    assert both.tile == less.tile
