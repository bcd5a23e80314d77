"""Cut events into training and held-out samples so that no sample sees what was not known when it was made. Pure.

A sample is a user, up to K candidates (neighbouring events of that user) and a history: that user's events strictly
earlier, in whole seconds, than the first candidate. Two events of one second never see each other. A sample is scored
at the time of its first candidate, from which the ages of its events are counted: all its candidates are asked for at
that moment. `loader.py` turns samples into batches.

The public model counts ages from the last candidate, and its data gives all candidates of a request one time, so the
two agree there. Ours differ by up to days, and the last one's time would tell the first how busy its user will be.
Held-out AUC of examples/ml-100k.yaml (eager, seeds 0 to 2): 0.7393, 0.7378, 0.7393 from the first candidate, and the
same to within 0.0001 from the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.errors import DataError
from twinstep.spec.job import SplitSpec
from twinstep.worker.data.events import Events, Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UserLog:
    """Events grouped by user: each user's are neighbours, oldest first (same second: order of the source)."""

    event: Ints
    """[E] int64: position in `Events` of each entry."""
    held_out: NDArray[np.bool_]
    """[E] bool; a user's held-out entries follow all of its training entries."""
    start: Ints
    """[P + 1] int64: entries of user p are start[p]..start[p+1]-1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """Ranges of a UserLog; row s is one sample, ordered by (time of its first candidate, user)."""

    user: Ints
    """[S] int64."""
    history_start: Ints
    """[S] int64: oldest entry kept."""
    history_end: Ints
    """[S] int64: one past the newest entry."""
    cand_start: Ints
    """[S] int64."""
    cand_end: Ints
    """[S] int64: one past the last candidate; 1 to K after cand_start."""

    def __len__(self) -> int:
        return len(self.user)


def split_events(events: Events, split: SplitSpec) -> NDArray[np.bool_]:
    """Return which events are held out, [E] bool.

    `time`: events from the second on at which the newest `eval_fraction` of all events begins. `user`: the same for
    each user alone; a user whose events all share one second keeps them for training. A second is never divided.

    Raises:
        DataError: nothing would be left to train on, or nothing held out.
    """
    count = len(events)
    if split.by == "time":
        first = min(round(count * (1 - split.eval_fraction)), count - 1)
        held_out: NDArray[np.bool_] = events.time >= events.time[first]
    else:
        held_out = np.zeros(count, dtype=bool)
        by_user = np.argsort(events.user, kind="stable")
        for own in np.split(by_user, np.flatnonzero(np.diff(events.user[by_user])) + 1):
            first = round(len(own) * (1 - split.eval_fraction))
            if first < len(own):
                late = events.time[own] >= events.time[own[first]]
                held_out[own] = late & (not late.all())
    if not held_out.any() or held_out.all():
        raise DataError(
            f"a split by {split.by} leaves no events {'to train on' if held_out.any() else 'held out'}",
            remedy="change data.split.eval_fraction, or give more events spread over more than one second",
        )
    return held_out


def user_log(events: Events, held_out: NDArray[np.bool_]) -> UserLog:
    """Group events by user, oldest first."""
    event = np.argsort(events.user, kind="stable")  # events are sorted by time already
    start = np.searchsorted(events.user[event], np.arange(len(events.user_features) + 1))
    return UserLog(event=event, held_out=held_out[event], start=start.astype(np.int64))


def make_samples(events: Events, log: UserLog, *, held_out: bool, num_candidates: int, uih_len: int) -> Samples:
    """Cut the training (or held-out) entries of each user, in order, into samples of at most `num_candidates`.

    Histories of held-out samples hold every earlier event of the user, held-out ones too: that is what a server
    would know when the first candidate is asked for. Training samples never reach a held-out event, for those are
    later.
    """
    chosen = np.flatnonzero(log.held_out == held_out)
    user = events.user[log.event]
    time = events.time[log.event]
    # Rank of each chosen entry among the user's chosen entries; they are contiguous within a user.
    firsts = np.concatenate(([True], user[chosen][1:] != user[chosen][:-1])) if len(chosen) else np.zeros(0, bool)
    run_start = np.flatnonzero(firsts)
    run_length = np.diff(np.append(run_start, len(chosen)))
    rank = np.arange(len(chosen)) - np.repeat(run_start, run_length)
    cand_start = chosen[rank % num_candidates == 0]
    owner = user[cand_start]
    run_end = chosen[run_start] + run_length
    cand_end = np.minimum(cand_start + num_candidates, np.repeat(run_end, -(-run_length // num_candidates)))
    # First entry of the user with the second of the first candidate: entries before it are strictly earlier.
    new_second = np.concatenate(([True], (user[1:] != user[:-1]) | (time[1:] != time[:-1])))
    second_start = np.maximum.accumulate(np.where(new_second, np.arange(len(user)), 0))
    history_end = second_start[cand_start]
    history_start = np.maximum(history_end - uih_len, log.start[owner])
    order = np.lexsort((owner, time[cand_start]))
    return Samples(
        user=owner[order],
        history_start=history_start[order],
        history_end=history_end[order],
        cand_start=cand_start[order],
        cand_end=cand_end[order],
    )
