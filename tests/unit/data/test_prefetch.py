"""Prefetch: the same items, bounded, errors in their place, and a clean stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from twinstep.worker.data.prefetch import Prefetch


def test_items_come_in_order_and_the_end_stays_the_end() -> None:
    with Prefetch(iter(range(50)), depth=3) as items:
        assert list(items) == list(range(50))
        assert list(items) == []


def test_no_more_than_depth_and_one_are_drawn_ahead() -> None:
    drawn: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            drawn.append(i)
            yield i

    with Prefetch(source(), depth=2) as items:
        for _ in range(12):
            next(items)
        time.sleep(0.2)
        assert len(drawn) <= 12 + 2 + 1


def test_an_error_is_raised_after_the_items_before_it_and_once() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("row 7 is bad")

    items = Prefetch(source())
    assert next(items) == 1
    with pytest.raises(ValueError, match="row 7 is bad"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


def test_stopping_early_ends_the_thread_even_of_an_endless_source() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    before = threading.active_count()
    items = Prefetch(endless(), depth=1)
    next(items)
    items.close()
    items.close()
    assert threading.active_count() == before
    assert list(items) == []


def test_an_exception_in_the_body_still_stops_the_thread() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Prefetch(iter(range(10**9))):
        raise KeyError("body")
    assert threading.active_count() == before
