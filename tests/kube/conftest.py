"""A cluster for tests: the fake API server of `fakekube/`, or a real one where TWINSTEP_TEST_KUBECONFIG names it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakekube.server import FakeServer


def eventually(check: Callable[[], Any], *, seconds: float = 20) -> Any:
    """Return the first true value of `check`, or fail once the time is over."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := check():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come to pass in time")


@pytest.fixture
def wait() -> Callable[..., Any]:
    return eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    """A fake API server of the test's own."""
    with FakeServer(tmp_path / "cluster") as server:
        yield server
