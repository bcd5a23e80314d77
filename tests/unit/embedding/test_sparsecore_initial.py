"""First values: the published generator, the same bits on host and device, and what they must not depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.initial import Normal, Uniform, first_rows, table_key, threefry


def test_the_generator_gives_the_published_numbers() -> None:
    """Known answers of Random123 (Salmon et al.), threefry2x32 with 20 rounds."""
    one = np.array([0xFFFFFFFF], np.uint32)
    zero = np.zeros(1, np.uint32)
    with np.errstate(over="ignore"):
        assert [int(x[0]) for x in threefry((0, 0), zero, zero, np)] == [0x6B200159, 0x99BA4EFE]
        assert [int(x[0]) for x in threefry((0xFFFFFFFF, 0xFFFFFFFF), one, one, np)] == [0x1CB996FC, 0xBB002BE7]
        both = threefry((5, 9), np.arange(4, dtype=np.uint32), np.arange(4, 8, dtype=np.uint32), np)
    theirs = threefry_2x32(jnp.array([5, 9], jnp.uint32), jnp.arange(8, dtype=jnp.uint32))
    assert np.concatenate(both).tolist() == np.asarray(theirs).tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(-(2**63), 2**63), st.text(min_size=1), st.integers(1, 9), st.booleans())
def test_host_and_device_make_the_same_bits(seed: int, table: str, dim: int, normal: bool) -> None:
    how = Normal(std=0.05) if normal else Uniform(bound=0.3)
    rows = np.array([0, 1, 5, 2**31 - 2])
    key = table_key(seed, table)
    host = first_rows(how, key, rows, dim, np)
    device = first_rows(how, key, jnp.asarray(rows, jnp.int32), dim, jnp)
    assert host.dtype == np.float32
    assert host.tobytes() == np.asarray(device).tobytes()
    assert host[2:3].tobytes() == first_rows(how, key, rows[2:3], dim, np).tobytes()


def test_compiled_it_makes_the_same_bits_still() -> None:
    key = table_key(1, "item")
    rows = np.arange(1000)
    for how in (Normal(std=0.0123), Uniform(bound=0.1)):
        compiled = jax.jit(lambda r, how=how: first_rows(how, key, r, 7, jnp))(jnp.asarray(rows))
        assert np.asarray(compiled).tobytes() == first_rows(how, key, rows, 7, np).tobytes()


def test_values_are_distributed_as_asked() -> None:
    normal = first_rows(Normal(std=2.0), table_key(0, "a"), np.arange(40_000), 8, np)
    assert abs(float(normal.mean())) < 0.02
    assert float(normal.std()) == pytest.approx(2.0, rel=0.01)
    assert float((np.abs(normal) < 2.0).mean()) == pytest.approx(0.6827, abs=0.005)
    uniform = first_rows(Uniform(bound=0.5), table_key(0, "a"), np.arange(40_000), 8, np)
    assert float(uniform.std()) == pytest.approx(0.5 / 3**0.5, rel=0.01)
    assert float(np.abs(uniform).max()) < 0.5
    assert abs(float(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1])) < 0.02


def test_tables_alike_do_not_start_alike() -> None:
    rows = np.arange(50)
    one, other = (first_rows(Normal(std=1.0), table_key(7, name), rows, 4, np) for name in ("user", "item"))
    assert not np.isin(one, other).all()
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, first_rows(Normal(std=1.0), table_key(8, "user"), rows, 4, np))


def test_a_distribution_without_a_width_is_refused() -> None:
    for build in (lambda: Normal(std=-1.0), lambda: Normal(std=float("nan")), lambda: Uniform(bound=float("inf"))):
        with pytest.raises(SpecError):
            build()
