"""How long to wait before what failed is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.backoff import backoff


@given(
    failures=st.integers(1, 10**6),
    first=st.floats(0.001, 10.0),
    longest=st.floats(10.0, 1e4),
    share=st.floats(0.0, 1.0),
    least=st.floats(0.0, 1.0),
)
def test_waits_grow_up_to_a_bound_and_stay_within_their_spread(
    failures: int, first: float, longest: float, share: float, least: float
) -> None:
    def wait(count: int, part: float) -> float:
        return backoff(count, first=first, longest=longest, spread=(least, 1.0), share=part)

    assert wait(1, 1.0) == first
    assert wait(failures, share) <= wait(failures + 1, share) <= longest
    assert least * wait(failures, 1.0) <= wait(failures, share) * (1 + 1e-12) + 1e-300
    assert wait(200, 1.0) == longest


def test_those_who_failed_together_do_not_come_back_together() -> None:
    waits = {backoff(4, first=1.0, longest=60.0) for _ in range(50)}
    assert len(waits) > 40
    assert 4.0 <= min(waits) <= max(waits) <= 8.0
