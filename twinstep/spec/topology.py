"""The table of accelerators, and what follows from a slice: chips, hosts, processes, devices are derived, never typed.

A topology is the source of truth, never an accelerator-type suffix: `v5p-128` counts TensorCores (64 chips), `v6e-128`
counts chips. Imports nothing of ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

GIB = 2**30
CUBE = 64  # chips of a 4x4x4 cube, the unit that larger 3-D slices are built from
LISTED_CHIPS = 1024  # largest slice that a list for people names; larger ones are valid too

_GKE = "cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"
_ISCA = "Jouppi et al., TPU v4, ISCA 2023, arXiv 2304.01433"
_TPU = "cloud.google.com/tpu/docs/system-architecture-tpu-vm"
_GPU = "cloud.google.com/compute/docs/gpus"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine type."""

    name: str
    accelerators: int
    """Chips or GPUs of it."""
    cpus: int
    """Virtual processors."""
    memory_gib: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuGeneration:
    """One TPU generation as GKE offers it."""

    name: str
    """As a spec writes it: v5p."""
    label: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    machines: tuple[Machine, ...]
    """Machine types, smallest first; a host is one of them."""
    hbm_bytes: int
    """HBM of one chip."""
    tensor_cores: int
    """Per chip."""
    devices_per_chip: int
    """JAX devices a chip shows up as."""
    sparse_cores: int
    """SparseCores per chip, whether or not anyone can program them; 0: none."""
    dims: int
    """Numbers in a topology."""
    max_chips: int
    """Of the largest slice."""
    compiler_name: str
    """What libtpu's compiler calls the generation."""
    compiler_devices: int = 1
    """Devices per chip in the compiler's own topologies; v4's are two cores, though JAX joins them on hardware."""
    source: str
    sparse_cores_closed: bool = False
    """Nobody outside Google can program its SparseCores."""

    @property
    def usable_sparse_cores(self) -> int:
        """SparseCores per chip that embedding tables can use."""
        return 0 if self.sparse_cores_closed else self.sparse_cores

    @property
    def sparse_cores_per_device(self) -> int:
        """SparseCores of one JAX device."""
        return self.sparse_cores // self.devices_per_chip

    @property
    def chips_per_host(self) -> tuple[int, ...]:
        """Host sizes, in chips."""
        return tuple(machine.accelerators for machine in self.machines)

    def machine(self, chips_per_host: int) -> Machine:
        """Return the machine type with so many chips."""
        return next(machine for machine in self.machines if machine.accelerators == chips_per_host)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuModel:
    """One GPU model as GKE offers it."""

    name: str
    label: str
    """Value of the node label cloud.google.com/gke-accelerator."""
    machine: Machine
    """A whole node."""
    memory_bytes: int
    """Memory of one GPU."""
    source: str

    @property
    def per_node(self) -> int:
        """GPUs of a whole node."""
        return self.machine.accelerators


TPUS: dict[str, TpuGeneration] = {
    each.name: each
    for each in (
        TpuGeneration(
            name="v4", label="tpu-v4-podslice", machines=(Machine("ct4p-hightpu-4t", 4, 240, 407),),
            hbm_bytes=32 * GIB, tensor_cores=2, devices_per_chip=1, sparse_cores=4, dims=3, max_chips=64 * CUBE,
            compiler_name="v4", compiler_devices=2, sparse_cores_closed=True, source=f"{_GKE}; {_TPU}; {_ISCA}",
        ),
        TpuGeneration(
            name="v5e", label="tpu-v5-lite-podslice",
            machines=(
                Machine("ct5lp-hightpu-1t", 1, 24, 48),
                Machine("ct5lp-hightpu-4t", 4, 112, 192),
                Machine("ct5lp-hightpu-8t", 8, 224, 384),
            ),
            hbm_bytes=16 * GIB, tensor_cores=1, devices_per_chip=1, sparse_cores=0, dims=2, max_chips=256,
            compiler_name="v5e", source=f"{_GKE}; {_TPU}",
        ),
        TpuGeneration(
            name="v5p", label="tpu-v5p-slice", machines=(Machine("ct5p-hightpu-4t", 4, 208, 448),),
            hbm_bytes=95 * GIB, tensor_cores=2, devices_per_chip=1, sparse_cores=4, dims=3, max_chips=96 * CUBE,
            compiler_name="v5p", source=f"{_GKE}; {_TPU}",
        ),
        TpuGeneration(
            name="v6e", label="tpu-v6e-slice",
            machines=(
                Machine("ct6e-standard-1t", 1, 44, 176),
                Machine("ct6e-standard-4t", 4, 180, 720),
                Machine("ct6e-standard-8t", 8, 180, 1440),
            ),
            hbm_bytes=32 * GIB, tensor_cores=1, devices_per_chip=1, sparse_cores=2, dims=2, max_chips=256,
            compiler_name="v6e", source=f"{_GKE}; {_TPU}",
        ),
        TpuGeneration(
            name="v7x", label="tpu7x",
            machines=(Machine("tpu7x-standard-1t", 1, 56, 240), Machine("tpu7x-standard-4t", 4, 224, 960)),
            hbm_bytes=192 * GIB, tensor_cores=2, devices_per_chip=2, sparse_cores=4, dims=3, max_chips=144 * CUBE,
            compiler_name="tpu7x", compiler_devices=2, source=f"{_GKE}; {_TPU}",
        ),
    )
}  # fmt: skip
"""TPU generations by name; nowhere else is the number of their SparseCores written.

v4 has four (the ISCA paper) that nobody outside can program: jax-tpu-embedding's NUM_SC_PER_DEVICE_MAP does not list
it, jax's tpu_info.py gives it no sparse core, and libtpu 0.0.42.1 compiles no SparseCore work for it ("Only Megachip
mode is supporting mixed device type computations"). The numbers of the others are those of both.
"""

GPUS: dict[str, GpuModel] = {
    each.name: each
    for each in (
        GpuModel(
            name="h100", label="nvidia-h100-80gb", machine=Machine("a3-highgpu-8g", 8, 208, 1872),
            memory_bytes=80 * GIB, source=_GPU,
        ),
        GpuModel(
            name="h200", label="nvidia-h200-141gb", machine=Machine("a3-ultragpu-8g", 8, 224, 2952),
            memory_bytes=141 * GIB, source=_GPU,
        ),
        GpuModel(
            name="b200", label="nvidia-b200", machine=Machine("a4-highgpu-8g", 8, 224, 3968),
            memory_bytes=180 * GIB, source=_GPU,
        ),
        GpuModel(
            name="a100", label="nvidia-tesla-a100", machine=Machine("a2-highgpu-8g", 8, 96, 680),
            memory_bytes=40 * GIB, source=_GPU,
        ),
        GpuModel(
            name="l4", label="nvidia-l4", machine=Machine("g2-standard-96", 8, 96, 384),
            memory_bytes=24 * GIB, source=_GPU,
        ),
    )
}  # fmt: skip
"""GPU models by name."""

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_UNDER_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceShape:
    """What follows from a generation, a topology, a host size and a number of slices."""

    generation: str
    topology: str
    chips_per_host: int
    machine_type: str
    slices: int
    hosts_per_slice: int
    chips_per_slice: int

    @property
    def hosts(self) -> int:
        """Hosts of all slices: pods, and JAX processes."""
        return self.hosts_per_slice * self.slices

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.chips_per_slice * self.slices

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * TPUS[self.generation].devices_per_chip


def dimensions(topology: str) -> tuple[int, ...]:
    """Return `4x4x8` as (4, 4, 8)."""
    return tuple(int(part) for part in topology.split("x"))


def chips_of(topology: str) -> int:
    """Return the chips of one slice."""
    return math.prod(dimensions(topology))


def topologies(generation: str, *, up_to: int | None = LISTED_CHIPS) -> tuple[str, ...]:
    """Return the generation's valid topologies of at most `up_to` chips (None: all), smallest first."""
    tpu = TPUS[generation]
    most = min(tpu.max_chips, up_to or tpu.max_chips)
    if tpu.dims == 2:
        found = [each for each in _FLAT if chips_of(each) <= most]
    else:
        single = ("1x1x1",) if 1 in tpu.chips_per_host else ()
        found = [*single, *_UNDER_A_CUBE, *_cubes(most // CUBE)]
    return tuple(each for each in found if chips_of(each) <= most)


def _cubes(most: int) -> Iterator[str]:
    """Yield the shapes of at most `most` cubes, each dimension a multiple of 4, none larger than the next."""
    shapes = [
        (a, b, c)
        for a in range(1, most + 1)
        if a**3 <= most
        for b in range(a, most // a + 1)
        if a * b * b <= most
        for c in range(b, most // (a * b) + 1)
    ]
    for shape in sorted(shapes, key=lambda each: (math.prod(each), tuple(reversed(each)))):
        yield "x".join(str(4 * side) for side in shape)


def is_topology(generation: str, topology: str) -> bool:
    """Say whether a slice of the generation can have this topology, written in this very order."""
    tpu, sides = TPUS[generation], dimensions(topology)
    if len(sides) != tpu.dims or chips_of(topology) > tpu.max_chips:
        return False
    if tpu.dims == 2:
        return topology in _FLAT
    if topology in _UNDER_A_CUBE:
        return True
    if topology == "1x1x1":
        return 1 in tpu.chips_per_host
    return all(side % 4 == 0 for side in sides) and list(sides) == sorted(sides)


def nearest_topology(generation: str, topology: str) -> str:
    """Return the valid topology nearest to one that is not: the same sides in order, else the nearest chip count."""
    sides = sorted(dimensions(topology))
    for order in itertools.permutations(sides):
        written = "x".join(map(str, order))
        if is_topology(generation, written):
            return written
    wanted = math.log(max(1, chips_of(topology)))
    return min(
        topologies(generation, up_to=None), key=lambda each: (abs(math.log(chips_of(each)) - wanted), chips_of(each))
    )


def host_sizes(generation: str, topology: str) -> tuple[int, ...]:
    """Return the chips per host that a topology of the generation can have; more than one where it must be said."""
    chips, sizes = chips_of(topology), TPUS[generation].chips_per_host
    if chips == 1:
        return (1,)
    if chips == 8 and 8 in sizes:
        return (4, 8)
    return (4,)


def slice_shape(generation: str, topology: str, *, chips_per_host: int | None = None, slices: int = 1) -> SliceShape:
    """Return what follows from a valid topology; `chips_per_host` is needed where `host_sizes` leaves a choice."""
    sizes = host_sizes(generation, topology)
    size = sizes[0] if chips_per_host is None else chips_per_host
    assert is_topology(generation, topology), "the spec was validated"  # noqa: S101
    assert size in sizes, "the spec was validated"  # noqa: S101
    chips = chips_of(topology)
    return SliceShape(
        generation=generation,
        topology=topology,
        chips_per_host=size,
        machine_type=TPUS[generation].machine(size).name,
        slices=slices,
        hosts_per_slice=chips // size,
        chips_per_slice=chips,
    )


def wraps(generation: str, topology: str) -> tuple[bool, ...]:
    """Say per dimension whether the interconnect closes into a ring.

    Source: the TPU device plugin's environment: v5e and v6e along a side of 16, v4 and v5p when every side is 4 or
    more.
    """
    sides = dimensions(topology)
    if TPUS[generation].dims == 2:
        return tuple(side == 16 for side in sides)
    return tuple(min(sides) >= 4 for _ in sides)
