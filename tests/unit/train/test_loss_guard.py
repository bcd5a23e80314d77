"""What a run says of a loss that is not to be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinstep.worker.train.guard import remedy_of


def test_at_the_first_step_nothing_was_updated_so_that_no_learning_rate_is_to_blame() -> None:
    assert "forward" in remedy_of(1)
    assert "lr" not in remedy_of(1)


@given(step=st.integers(2, 1 << 40))
def test_later_the_update_may_be_to_blame(step: int) -> None:
    assert "optimizers.dense.lr" in remedy_of(step)
