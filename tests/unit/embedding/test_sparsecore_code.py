"""Where machine code is kept: by all that it depends on, and nowhere when a disk does not take it."""

import errno

import numpy as np
import pytest

from twinstep.spec.errors import DataError
from twinstep.worker.embedding.sparsecore import compiled
from twinstep.worker.embedding.sparsecore.inputs import Ragged, rows_of


def twice(value):
    return value * 2


def digest():
    compiled.sources_digest.cache_clear()
    return compiled.sources_digest()


@pytest.fixture(autouse=True)
def forget():
    yield
    compiled.sources_digest.cache_clear()


def test_another_processor_or_numba_keeps_its_code_elsewhere(monkeypatch):
    here = digest()
    assert digest() == here
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "get_host_cpu_name", lambda: "another")
        assert digest() != here
    with monkeypatch.context() as patch:
        patch.setattr(compiled.numba, "__version__", "0")
        assert digest() != here


@pytest.mark.parametrize("fails", ["save", "load"])
def test_code_stays_in_memory_where_a_disk_stops_taking_or_giving_it(monkeypatch, tmp_path, fails):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    made = compiled.kernel(twice)
    monkeypatch.setattr(made._cache._cache_file, fails, full)
    assert made(21) == 42
    assert bool(list(tmp_path.rglob("*.nbc"))) is (fails == "load")


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_before_it_spoils_its_sample(weight):
    """NaN is what marks padding in gains; under a mean, one makes all gains of its sample NaN."""
    with pytest.raises(DataError, match=r"feature 'f' has weight (nan|inf) at 1"):
        rows_of("f", Ragged(np.array([1, 2, 3]), np.array([2, 1]), weights=[1.0, weight, 1.0]), 2)
