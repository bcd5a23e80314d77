"""One Lease, several who want it, clocks that disagree: never two at once, and never nobody for long."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.platform.scheduler.cluster.lease import Elector, LeaseTimes, uptime
from twinstep.spec.errors import ConflictError, UnavailableError

TIMES = LeaseTimes(lasts=15, holds=10, every=2)


class Leases:
    """An API server with one Lease: versions, conflicts, and answers that are lost on the way when a test says so."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.fails: list[str] = []
        """What happens to the next requests: `refused` (nothing is done), `lost` (done, and no answer), or ``."""

    def _fate(self) -> str:
        fate = self.fails.pop(0) if self.fails else ""
        if fate == "refused":
            raise UnavailableError("refused", remedy="")
        return fate

    def _store(self, body: dict[str, Any], fate: str) -> dict[str, Any]:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version), "uid": "u"}
        self.lease = {**body, "metadata": metadata}
        if fate == "lost":
            raise UnavailableError("lost", remedy="")
        return self.lease

    def get(self, *_: str) -> dict[str, Any] | None:
        self._fate()
        return self.lease

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        fate = self._fate()
        if self.lease is not None:
            raise ConflictError("there", remedy="")
        return self._store(body, fate)

    def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        fate = self._fate()
        if self.lease is None or body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError("changed", remedy="")
        return self._store(body, fate)


class Clock:
    def __init__(self, now: float = 0.0, rate: float = 1.0) -> None:
        self.now, self.rate = now, rate

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds * self.rate


def elector(leases: Leases, name: str, clock: Clock) -> Elector:
    return Elector(leases, namespace="n", name="l", identity=name, times=TIMES, clock=clock)  # type: ignore[arg-type]


def test_the_first_one_leads_and_the_second_waits() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    a.step()
    b.step()
    assert (a.leads, b.leads) == (True, False)


def test_a_holder_that_falls_silent_gives_up_before_another_takes_over() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    a.step()
    led_by = []
    for _ in range(20):
        b.step()
        led_by.append((a.leads, b.leads))
        clock.pass_(1)
    assert (True, True) not in led_by
    assert led_by.index((False, False)) == 10
    assert led_by.index((False, True)) == 16
    a.step()
    assert not a.leads
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 1


def test_a_holder_that_renews_is_never_taken_over() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    for _ in range(100):
        a.step()
        b.step()
        assert (a.leads, b.leads) == (True, False)
        clock.pass_(2)


def test_one_that_stops_lets_the_next_take_over_at_once() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    a.step()
    b.step()
    a.stop()
    b.step()
    assert (a.leads, b.leads) == (False, True)


@pytest.mark.parametrize("fails", [["", "refused"], ["refused"], ["", "lost"]])
def test_a_renewal_that_fails_is_no_end_and_no_renewal_by_itself(fails: list[str]) -> None:
    leases, clock = Leases(), Clock()
    a = elector(leases, "a", clock)
    a.step()
    clock.pass_(9)
    leases.fails = fails
    with pytest.raises(UnavailableError):
        a.step()
    assert a.leads
    clock.pass_(1)
    assert not a.leads
    a.step()
    assert a.leads


def test_two_that_take_over_at_one_moment_are_told_apart_by_the_version() -> None:
    leases, clock = Leases(), Clock()
    a, b, c = (elector(leases, name, clock) for name in "abc")
    a.step()
    b.step()
    c.step()
    clock.pass_(16)
    read = leases.lease
    b.step()
    held, leases.get = leases.get, lambda *_: read  # type: ignore[method-assign]  c looked before b wrote
    c.step()
    leases.get = held  # type: ignore[method-assign]
    assert (b.leads, c.leads) == (True, False)


@pytest.mark.parametrize("times", [(10, 10, 2), (15, 20, 2), (15, 10, 10), (15, 10, 0)])
def test_times_that_would_let_two_lead_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="before"):
        LeaseTimes(lasts=times[0], holds=times[1], every=times[2])


def test_time_grows() -> None:
    assert uptime() <= uptime()


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.floats(0.9, 1.1), min_size=3, max_size=3))
def test_never_two_lead_at_once(chance: random.Random, rates: list[float]) -> None:
    """Clocks that start anywhere and drift by a tenth, answers that are lost, replicas that stand still for a while."""
    leases = Leases()
    clocks = [Clock(chance.uniform(-1e6, 1e6), rate) for rate in rates]
    electors = [elector(leases, f"e{number}", clock) for number, clock in enumerate(clocks)]
    asleep = [0.0, 0.0, 0.0]
    leaderless = 0.0
    for _ in range(200):
        for number, each in enumerate(electors):
            if asleep[number] <= 0 and chance.random() < 0.5:
                leases.fails = [chance.choices(["", "refused", "lost"], [8, 1, 1])[0] for _ in range(2)]
                with contextlib.suppress(UnavailableError):
                    each.step()
                leases.fails = []
            if chance.random() < 0.01:
                asleep[number] = chance.uniform(5, 60)
            assert sum(one.leads for one in electors) <= 1
        for number, clock in enumerate(clocks):
            clock.pass_(1)
            asleep[number] -= 1
        leaderless = 0.0 if any(one.leads for one in electors) else leaderless + (min(asleep) <= 0)
        assert leaderless < 60
