"""A cluster for tests: the fake API server of `fakekube/`, or a real one where TWINSTEP_TEST_KUBECONFIG names it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakekube.real import REAL, api_server
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


SIMULATED = {
    "test_cluster_faults": "faults of an API server",
    "test_control_plane_with_cluster": "the ends of pods, told to simulated controllers",
    "test_kill_between_steps": "a server for all of many kills",
    "test_killed_process": "requests that never end",
    "test_kube_logs": "logs that a test writes",
    "test_kube_rights": "the rights of a role, held to each request",
    "test_logs_of_a_job": "logs that a test writes",
    "test_put_back": "runs that go on until a test ends them",
    "test_two_replicas": "many jobs that end at once",
    "test_simulated_cluster": "the simulated controllers themselves",
}
"""Modules that need the simulation, and for what. Of the others each test runs on a real cluster as it is, up to where
it asks for something that only the simulated server does: there it is skipped, and says what it asked for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REAL and item.path.parent == Path(__file__).parent and (why := SIMULATED.get(item.path.stem)):
            item.add_marker(pytest.mark.skip(reason=f"on the simulated cluster only: {why}"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    """An API server of the test's own."""
    with api_server(tmp_path / "cluster") as server:
        yield server
