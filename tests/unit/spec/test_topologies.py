"""The table of accelerators: what a slice may look like, what follows from it, and what a wrong one is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.catalogue import catalogue
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import validate_spec
from twinstep.spec.topology import (
    TPUS,
    chips_of,
    dimensions,
    host_sizes,
    is_topology,
    nearest_topology,
    slice_shape,
    topologies,
    wraps,
)


def accelerator(**fields: Any) -> Any:
    return validate_spec({"name": "a", "accelerator": fields}).accelerator


def tpu(generation: str, topology: str, **fields: Any) -> Any:
    return accelerator(kind="tpu", generation=generation, topology=topology, **fields)


def fault(call: Any) -> Any:
    with pytest.raises(SpecError) as caught:
        call()
    assert len(caught.value.faults) == 1
    return caught.value.faults[0]


# generation, topology, chips per host, slices → chips, hosts per slice, pods, JAX devices: GKE's own table.
DERIVED = [
    ("v5p", "2x2x1", None, 1, 4, 1, 1, 4),
    ("v4", "2x2x1", None, 1, 4, 1, 1, 4),
    ("v6e", "2x2", None, 1, 4, 1, 1, 4),
    ("v5e", "2x2", None, 1, 4, 1, 1, 4),
    ("v7x", "2x2x1", None, 1, 4, 1, 1, 8),
    ("v6e", "2x4", 8, 1, 8, 1, 1, 8),
    ("v6e", "2x4", 4, 1, 8, 2, 2, 8),
    ("v5p", "4x4x8", None, 1, 128, 32, 32, 128),
    ("v6e", "8x16", None, 1, 128, 32, 32, 128),
    ("v7x", "4x4x8", None, 1, 128, 32, 32, 256),
    ("v5p", "4x4x4", None, 2, 128, 16, 32, 128),
    ("v5p", "4x4x12", None, 1, 192, 48, 48, 192),
]


@pytest.mark.parametrize(("generation", "topology", "size", "slices", "chips", "hosts", "pods", "devices"), DERIVED)
def test_chips_hosts_and_devices_follow_from_a_slice(
    generation: str, topology: str, size: int | None, slices: int, chips: int, hosts: int, pods: int, devices: int
) -> None:
    spec = tpu(generation, topology, chips_per_host=size, slices=slices)
    shape = slice_shape(spec.generation, spec.topology, chips_per_host=spec.chips_per_host, slices=spec.slices)
    assert (shape.chips, shape.hosts_per_slice, shape.hosts, shape.devices) == (chips, hosts, pods, devices)


@pytest.mark.parametrize(
    ("generation", "topology", "remedy"),
    [
        ("v5p", "8x4x4", "4x4x8"),  # the right sides in the wrong order
        ("v6e", "4x4x4", "8x8"),
        ("v6e", "2x8", "4x4"),  # Ray accepts it, GKE has none
        ("v5p", "2x4", "2x2x2"),
        ("v5p", "1x1x1", "2x2x1"),
        ("v7x", "4x8x4", "4x4x8"),
    ],
)
def test_a_topology_that_a_generation_has_not_is_refused_with_the_nearest(
    generation: str, topology: str, remedy: str
) -> None:
    found = fault(lambda: tpu(generation, topology))
    assert found.field == "accelerator.topology"
    assert generation in found.problem
    assert found.remedy == f"topology: {remedy}"


@pytest.mark.parametrize("text", ["4X4x8", "4x4x", "0x4", "128", "v5p-128", "", "4x4x4x4", "-4x4", " 4x4", "4x04x4"])
def test_what_is_no_topology_at_all_is_refused(text: str) -> None:
    assert fault(lambda: tpu("v5p", text)).field == "accelerator.topology"


def test_a_slice_that_comes_with_two_sizes_of_host_must_say_which() -> None:
    found = fault(lambda: tpu("v6e", "2x4"))
    assert (found.field, found.allowed, found.remedy) == (
        "accelerator.chips_per_host",
        "4 or 8",
        "chips_per_host: 8",
    )
    assert fault(lambda: tpu("v5e", "2x4", chips_per_host=1)).allowed == "4 or 8"
    assert fault(lambda: tpu("v5p", "4x4x4", chips_per_host=8)).allowed == "4"
    assert fault(lambda: tpu("v5p", "4x4x4", chips_per_host=True)).field == "accelerator.chips_per_host"


def test_slices_of_one_host_cannot_be_joined() -> None:
    assert fault(lambda: tpu("v5p", "2x2x1", slices=2)).remedy == "slices: 1"
    assert fault(lambda: tpu("v6e", "2x4", chips_per_host=8, slices=2)).field == "accelerator.slices"
    assert tpu("v6e", "2x4", chips_per_host=4, slices=2).slices == 2


@pytest.mark.parametrize("slices", [-1, 0, 2**31, 1.5, True, "2"])
def test_a_count_that_is_none_is_refused(slices: Any) -> None:
    assert fault(lambda: tpu("v5p", "4x4x4", slices=slices)).field == "accelerator.slices"


@pytest.mark.parametrize(("count", "remedy"), [(3, 8), (12, 16), (9, 16), (5, 8)])
def test_gpus_fill_nodes(count: int, remedy: int) -> None:
    def make() -> Any:
        return validate_spec({"name": "a", "accelerator": {"kind": "gpu", "model": "h100", "count": count}})

    assert fault(make).remedy == f"count: {remedy}"


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 128])
def test_part_of_a_node_or_whole_nodes_are_taken(count: int) -> None:
    spec = validate_spec({"name": "a", "accelerator": {"kind": "gpu", "model": "l4", "count": count}})
    assert spec.accelerator.count == count  # type: ignore[union-attr]


def test_a_tpu_has_the_backend_that_compiles_for_it() -> None:
    v5p = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
    assert validate_spec({"name": "a", "accelerator": v5p}).compile.backend == "xla"
    assert validate_spec({"name": "a", "accelerator": v5p, "compile": {"cache": False}}).compile.backend == "xla"
    assert validate_spec({"name": "a"}).compile.backend == "inductor"
    found = fault(lambda: validate_spec({"name": "a", "accelerator": v5p, "compile": {"backend": "inductor"}}))
    assert (found.field, found.given, found.remedy) == ("compile.backend", "'inductor'", "backend: xla")
    h100 = {"kind": "gpu", "model": "h100", "count": 8}
    found = fault(lambda: validate_spec({"name": "a", "accelerator": h100, "compile": {"backend": "xla"}}))
    assert (found.field, found.allowed) == ("compile.backend", "inductor, eager")


@settings(deadline=None, max_examples=300)
@given(generation=st.sampled_from(sorted(TPUS)), sides=st.lists(st.integers(1, 9999), min_size=2, max_size=3))
def test_the_nearest_topology_is_valid_and_a_valid_one_is_its_own_nearest(generation: str, sides: list[int]) -> None:
    topology = "x".join(map(str, sides))
    near = nearest_topology(generation, topology)
    assert is_topology(generation, near)
    assert tpu(generation, near, chips_per_host=host_sizes(generation, near)[0]).topology == near
    if is_topology(generation, topology):
        assert near == topology


@pytest.mark.parametrize("generation", sorted(TPUS))
def test_the_nearest_of_a_slice_too_large_is_the_largest(generation: str) -> None:
    sides = [64] * TPUS[generation].dims
    near = nearest_topology(generation, "x".join(map(str, sides)))
    assert chips_of(near) == TPUS[generation].max_chips
    with pytest.raises(SpecError) as caught:
        tpu(generation, "x".join(map(str, sides)))
    (found,) = caught.value.faults
    assert (f"twinstep topologies {generation} --up-to" in found.allowed) == (TPUS[generation].max_chips > 256)


@pytest.mark.parametrize("generation", sorted(TPUS))
def test_every_listed_topology_is_valid_and_divides_into_hosts(generation: str) -> None:
    listed = topologies(generation, up_to=None)
    assert len(set(listed)) == len(listed)
    assert [chips_of(each) for each in listed] == sorted(chips_of(each) for each in listed)
    assert chips_of(listed[-1]) == TPUS[generation].max_chips
    for each in listed:
        assert is_topology(generation, each)
        assert len(wraps(generation, each)) == len(dimensions(each))
        for size in host_sizes(generation, each):
            shape = slice_shape(generation, each, chips_per_host=size)
            assert shape.hosts * size == shape.chips


def test_the_catalogue_is_plain_data_with_a_source_for_each_row() -> None:
    found = json.loads(json.dumps(catalogue(up_to=128)))
    assert [each["name"] for each in found["tpus"]] == list(TPUS)
    for each in (*found["tpus"], *found["gpus"]):
        assert each["source"]
    v6e = next(each for each in found["tpus"] if each["name"] == "v6e")
    assert [row["chips_per_host"] for row in v6e["slices"] if row["topology"] == "2x4"] == [4, 8]
