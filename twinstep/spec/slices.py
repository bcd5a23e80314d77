"""TPU slices by name: generation and chips along each axis, `v5p:4x4x8`; the nearest name for one that is none. Pure.

`v5p:4x4x8 × 2` is two of them, joined over the data-centre network.

The compiler and the command line read a slice's name here; which slices there are is `topology.py`'s table, less those
under a host's four chips, which the TPU compiler takes no topology for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinstep.spec.errors import SpecError
from twinstep.spec.nearest import nearest
from twinstep.spec.topology import TPUS, chips_of, is_topology, nearest_topology, topologies

LEAST_CHIPS = 4


@dataclass(frozen=True, slots=True)
class Slice:
    """One TPU slice, or several alike that one job has."""

    generation: str
    topology: str
    slices: int = 1

    @property
    def name(self) -> str:
        """`v5p:4x4x8`, `v5p:4x4x8 × 2`."""
        return f"{self.generation}:{self.topology}" + (f" × {self.slices}" if self.slices > 1 else "")

    @property
    def compiler_name(self) -> str:
        """The name that the TPU compiler takes of one: `tpu7x:2x2x1` for `v7x:2x2x1`."""
        return f"{TPUS[self.generation].compiler_name}:{self.topology}"

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return chips_of(self.topology) * self.slices

    @property
    def devices(self) -> int:
        """Devices that a program is spread over."""
        return self.chips * TPUS[self.generation].compiler_devices


def parse_slice(name: str) -> Slice:
    """Return the slice of a name, `GENERATION:TOPOLOGY`; the compiler's own name of a generation is taken too.

    `GENERATION:TOPOLOGY × 2`, or with `*`, is two of them.

    Raises:
        SpecError: there is no such slice; the message names the nearest.
    """
    one, joined = _joined(name)
    given, colon, topology = one.partition(":")
    generation = {each.compiler_name: each.name for each in TPUS.values()}.get(given, given)
    if not colon and "-" in given:
        raise SpecError(
            f"a TPU slice is GENERATION:TOPOLOGY, not {name[:80]!r}",
            remedy="give v5p:2x2x1, say; an accelerator type such as v5p-8 counts cores and names no topology: "
            "`twinstep topologies` lists them",
        )
    known = generation if generation in TPUS else nearest(generation, TPUS)
    sides = re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", topology)
    if generation in TPUS and sides and is_topology(generation, topology) and chips_of(topology) >= LEAST_CHIPS:
        return Slice(generation, topology, joined)
    listed = [each for each in topologies(known, up_to=256) if chips_of(each) >= LEAST_CHIPS]
    near = nearest_topology(known, topology) if sides else nearest(topology, listed)
    if chips_of(near) < LEAST_CHIPS:
        near = listed[0]
    has = f"generations are {', '.join(TPUS)}" if generation not in TPUS else f"{known} has {', '.join(listed)}, …"
    raise SpecError(f"there is no TPU slice {name[:80]!r}", remedy=f"did you mean '{known}:{near}'? {has}")


def _joined(name: str) -> tuple[str, int]:
    """Return the name of one slice, and how many of it there are."""
    found = re.fullmatch(r"(.*?)\s*[×*]\s*([1-9][0-9]{0,3})", name.strip())
    return (name.strip(), 1) if found is None else (found[1], int(found[2]))
