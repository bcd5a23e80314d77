"""TPU slices by name: generation and chips along each axis, `v5p:4x4x8`; the nearest name for one that is none. Pure.

The compiler and the command line read a slice's name here. Which shapes there are: the Cloud TPU documentation of each
generation, less those under a host's four chips, which the TPU compiler takes no topology for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinstep.spec.errors import SpecError
from twinstep.spec.nearest import nearest

_TORUS = tuple(
    "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 4x4x12 4x4x16 4x8x16 8x8x12 8x12x16 "  # noqa: SIM905
    "12x12x12 12x12x16 16x16x16 16x16x24".split()
)
_MESH = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What all slices of a TPU generation share."""

    compiler_name: str
    """What the TPU compiler calls it."""
    topologies: tuple[str, ...]
    """Chips along each axis."""
    devices_per_chip: int
    """Devices that a program sees on one chip."""


GENERATIONS: dict[str, Generation] = {
    "v4": Generation(compiler_name="v4", topologies=_TORUS, devices_per_chip=2),
    "v5e": Generation(compiler_name="v5e", topologies=_MESH, devices_per_chip=1),
    "v5p": Generation(compiler_name="v5p", topologies=_TORUS, devices_per_chip=1),
    "v6e": Generation(compiler_name="v6e", topologies=_MESH, devices_per_chip=1),
    "v7x": Generation(compiler_name="tpu7x", topologies=_TORUS, devices_per_chip=2),
}
"""TPU generations by the name that a job spec uses."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One TPU slice."""

    generation: str
    topology: str

    @property
    def name(self) -> str:
        """`v5p:4x4x8`."""
        return f"{self.generation}:{self.topology}"

    @property
    def compiler_name(self) -> str:
        """The name that the TPU compiler takes: `tpu7x:2x2x1` for `v7x:2x2x1`."""
        return f"{GENERATIONS[self.generation].compiler_name}:{self.topology}"

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        return math.prod(int(axis) for axis in self.topology.split("x"))

    @property
    def devices(self) -> int:
        """Devices that a program is spread over."""
        return self.chips * GENERATIONS[self.generation].devices_per_chip


def parse_slice(name: str) -> Slice:
    """Return the slice of a name, `GENERATION:TOPOLOGY`; the compiler's own name of a generation is taken too.

    Raises:
        SpecError: there is no such slice; the message names the nearest.
    """
    given, _, topology = name.strip().partition(":")
    aliases = {each.compiler_name: generation for generation, each in GENERATIONS.items()}
    generation = aliases.get(given, given)
    if generation in GENERATIONS and topology in GENERATIONS[generation].topologies:
        return Slice(generation, topology)
    generations = [generation] if generation in GENERATIONS else list(GENERATIONS)
    names = [f"{each}:{shape}" for each in generations for shape in GENERATIONS[each].topologies]
    allowed = ", ".join(GENERATIONS[generation].topologies if len(generations) == 1 else GENERATIONS)
    raise SpecError(
        f"there is no TPU slice {name[:80]!r}",
        remedy=f"did you mean {_nearest(f'{generation}:{topology}', names)!r}? "
        f"{f'{generation} has' if len(generations) == 1 else 'generations are'} {allowed}",
    )


def _nearest(given: str, names: list[str]) -> str:
    """Return the name like `given`: of the same axes, or nearest in chips where `given` has axes, else by spelling."""
    axes = given.partition(":")[2].split("x")
    if not all(axis.isdecimal() and len(axis) < 6 for axis in axes):
        return nearest(given, names)
    chips = math.prod(map(int, axes))

    def distance(name: str) -> tuple[bool, float]:
        found = [int(axis) for axis in name.partition(":")[2].split("x")]
        return sorted(found) != sorted(map(int, axes)), abs(math.log(math.prod(found) / max(chips, 1)))

    return min(names, key=distance)
