"""TPU slices by name: generation and chips along each axis, `v5p:4x4x8`; the nearest name for one that is none. Pure.

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
        return f"{TPUS[self.generation].compiler_name}:{self.topology}"

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        return chips_of(self.topology)

    @property
    def devices(self) -> int:
        """Devices that a program is spread over."""
        return self.chips * TPUS[self.generation].compiler_devices


def parse_slice(name: str) -> Slice:
    """Return the slice of a name, `GENERATION:TOPOLOGY`; the compiler's own name of a generation is taken too.

    Raises:
        SpecError: there is no such slice; the message names the nearest.
    """
    given, colon, topology = name.strip().partition(":")
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
        return Slice(generation, topology)
    listed = [each for each in topologies(known, up_to=256) if chips_of(each) >= LEAST_CHIPS]
    near = nearest_topology(known, topology) if sides else nearest(topology, listed)
    if chips_of(near) < LEAST_CHIPS:
        near = listed[0]
    has = f"generations are {', '.join(TPUS)}" if generation not in TPUS else f"{known} has {', '.join(listed)}, …"
    raise SpecError(f"there is no TPU slice {name[:80]!r}", remedy=f"did you mean '{known}:{near}'? {has}")
