"""Names of TPU slices."""

from __future__ import annotations

import pytest

from twinstep.spec.errors import SpecError
from twinstep.spec.slices import parse_slice
from twinstep.spec.topology import TPUS


@pytest.mark.parametrize(
    ("name", "chips", "devices", "compiler_name"),
    [
        ("v5p:4x4x8", 128, 128, "v5p:4x4x8"),
        ("v6e:8x16", 128, 128, "v6e:8x16"),
        ("v4:2x2x1", 4, 8, "v4:2x2x1"),
        ("v7x:2x2x1", 4, 8, "tpu7x:2x2x1"),
        ("tpu7x:4x4x8", 128, 256, "tpu7x:4x4x8"),
        ("v5p:2x2x2 × 2", 16, 16, "v5p:2x2x2"),
        ("v7x:4x4x8*3", 384, 768, "tpu7x:4x4x8"),
    ],
)
def test_a_slice_knows_its_chips_its_devices_and_what_the_compiler_calls_it(
    name: str, chips: int, devices: int, compiler_name: str
) -> None:
    found = parse_slice(name)
    assert (found.chips, found.devices, found.compiler_name) == (chips, devices, compiler_name)
    assert parse_slice(found.name) == found


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("v5p:4x8x4", "v5p:4x4x8"),
        ("v5p:3x3x3", "v5p:2x4x4"),
        ("v6e:4x4x4", "v6e:8x8"),
        ("v5q:4x4x8", "v5p:4x4x8"),
        ("v5p", "v5p:2x2x1"),
        ("v5p:4x8x4 × 2", "v5p:4x4x8"),
        ("v5p:4x4x8 × 0", "v5p:4x4x8"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_slice(given)
    generation = nearest.partition(":")[0]
    assert f"did you mean '{generation}:" in caught.value.remedy
    if given.count("x") > 0 and given.partition(":")[0] in TPUS:
        assert repr(nearest) in caught.value.remedy


def test_an_accelerator_type_is_told_how_a_slice_is_named() -> None:
    with pytest.raises(SpecError, match="GENERATION:TOPOLOGY, not 'v5p-8'"):
        parse_slice("v5p-8")
