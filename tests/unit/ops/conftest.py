"""What the tests of operators share: a cache of their own for built libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from twinstep.worker.ops import hstu_kernel


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of libraries, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hstu_kernel._kernel.cache_clear()
    yield tmp_path / "twinstep" / "native"
    hstu_kernel._kernel.cache_clear()
