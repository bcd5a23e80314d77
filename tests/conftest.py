"""Settings all tests share: they must stand in the environment before torch and jax are imported.

Tests that compile with Inductor (marked `inductor`, or given "inductor" as a parameter) are skipped, with the reason,
on a machine that cannot build its code.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["JAX_PLATFORMS"] = "cpu"
# A shell without job control starts what it puts in the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
KEPT = ("TWINSTEP_FIXTURES", "TWINSTEP_CHROMIUM", "TWINSTEP_KEEP_PICTURE", "TWINSTEP_TEST_KUBECONFIG")
# A test that starts processes must not find a control plane or a run of the person who runs the tests.
for name in [name for name in os.environ if name.startswith("TWINSTEP_") and name not in KEPT]:
    del os.environ[name]


@pytest.fixture(autouse=True)
def _handlers_end_with_their_test() -> Iterator[None]:
    """Take back what a command run in this process gave the root logger: its stream is closed after the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for each in [each for each in root.handlers if each not in before]:
        root.removeHandler(each)
    root.setLevel(level)


def _compiles_with_inductor(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("inductor") is not None or "inductor" in map(str, parameters.values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    concerned = [item for item in items if _compiles_with_inductor(item)]
    if not concerned:
        return
    from twinstep.spec.errors import UnavailableError
    from twinstep.worker.train.toolchain import check_compiler

    try:
        check_compiler()
    except UnavailableError as error:
        for item in concerned:
            item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture(scope="session")
def seeded() -> ModuleType:
    """`seeded.py`: fills a store directly."""
    place = importlib.util.spec_from_file_location("seeded", Path(__file__).parent / "seeded.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module
