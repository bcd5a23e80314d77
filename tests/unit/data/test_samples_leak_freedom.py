"""No sample sees what was not known when it was made, whatever the times, ties and splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.spec.job import SplitSpec
from twinstep.worker.data.events import Events, make_events
from twinstep.worker.data.samples import Samples, UserLog, make_samples, split_events, user_log


def events_of(rows: list[tuple[int, int]]) -> Events:
    """Events of (user, time); items number the rows, so that an event is known by its item."""
    user, time = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    num_users = int(user.max()) + 1
    return make_events(
        user=user,
        item=np.arange(len(rows)),
        rating=np.ones(len(rows), dtype=np.float32),
        time=time,
        user_features=np.arange(num_users)[:, None],
        item_features=np.arange(len(rows))[:, None],
        source="test",
    )


def cut(events: Events, split: SplitSpec, k: int, u: int) -> tuple[np.ndarray, UserLog, Samples, Samples]:
    held_out = split_events(events, split)
    log = user_log(events, held_out)
    train, held = (make_samples(events, log, held_out=side, num_candidates=k, uih_len=u) for side in (False, True))
    return held_out, log, train, held


rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=2, max_size=60)
splits = st.builds(SplitSpec, by=st.sampled_from(["time", "user"]), eval_fraction=st.sampled_from([0.1, 0.3, 0.6]))


@given(rows, splits, st.integers(1, 5), st.integers(1, 7))
def test_histories_hold_the_newest_strictly_earlier_events_of_the_user_and_nothing_else(
    pairs: list[tuple[int, int]], split: SplitSpec, k: int, u: int
) -> None:
    events = events_of(pairs)
    try:
        held_out, log, train, held = cut(events, split, k, u)
    except DataError:
        return
    for side, samples in ((False, train), (True, held)):
        seen: list[int] = []
        for s in range(len(samples)):
            cand = log.event[samples.cand_start[s] : samples.cand_end[s]]
            history = log.event[samples.history_start[s] : samples.history_end[s]]
            assert 1 <= len(cand) <= k
            assert len(history) <= u
            assert (events.user[cand] == samples.user[s]).all()
            assert (events.user[history] == samples.user[s]).all()
            assert (held_out[cand] == side).all()
            assert np.all(np.diff(events.time[history]) >= 0)
            first = int(events.time[cand].min())
            assert (events.time[history] < first).all()
            own_earlier = np.flatnonzero((events.user == samples.user[s]) & (events.time < first))
            assert len(history) == min(u, len(own_earlier))
            assert set(history.tolist()) == set(own_earlier[len(own_earlier) - len(history) :].tolist())
            if not side:
                assert not held_out[history].any()
            seen += cand.tolist()
        assert sorted(seen) == np.flatnonzero(held_out == side).tolist()


@given(rows, st.sampled_from([0.1, 0.3, 0.6]))
def test_a_split_by_time_holds_out_whole_seconds_later_than_all_training(
    pairs: list[tuple[int, int]], fraction: float
) -> None:
    events = events_of(pairs)
    try:
        held_out = split_events(events, SplitSpec(eval_fraction=fraction))
    except DataError:
        return
    assert events.time[~held_out].max() < events.time[held_out].min()


@given(rows, st.sampled_from([0.1, 0.3, 0.6]))
def test_a_split_by_user_holds_out_each_users_newest_and_never_all_of_them(
    pairs: list[tuple[int, int]], fraction: float
) -> None:
    events = events_of(pairs)
    try:
        held_out = split_events(events, SplitSpec(by="user", eval_fraction=fraction))
    except DataError:
        return
    for user in np.unique(events.user):
        own = events.user == user
        assert (own & ~held_out).any()
        if (own & held_out).any():
            assert events.time[own & ~held_out].max() < events.time[own & held_out].min()


@pytest.mark.parametrize("by", ["time", "user"])
def test_events_of_a_single_second_cannot_be_split_and_say_so(by: str) -> None:
    with pytest.raises(DataError, match=f"split by {by} leaves no events"):
        split_events(events_of([(0, 7), (1, 7), (1, 7)]), SplitSpec.model_validate({"by": by}))


def test_times_in_milliseconds_are_refused_before_they_wrap_in_int32() -> None:
    with pytest.raises(DataError, match="1650000000000") as error:
        events_of([(0, 1_650_000_000_000)])
    assert "seconds" in error.value.remedy
