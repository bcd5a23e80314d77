"""What is said of a step that was compiled ahead of time, as frozen values; `aot.py` and `lower/tpu.py` fill them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twinstep.worker.compile.hlo import Collective
from twinstep.worker.compile.overlap import Overlap

Effort = Literal["quick", "full"]
"""How long the TPU compiler may look for fast code. `quick` takes about half of the time, and is for asking;
`full` is for what is going to run. Collectives come out alike, and memory nearly; bytes accessed do not: at full effort
the compiler brings values into the chip's fast memory ahead of their use, and counts that too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Along which dimension each tensor of a step is cut over the devices; None: each device holds it all."""

    state: tuple[int | None, ...]
    extra: tuple[int, ...]
    """Rows added to each tensor of the state, so that the devices divide them; a step does not see them."""
    batch: tuple[int | None, ...]
    lines: tuple[bool, ...] = ()
    """Of each tensor of the state, whether its rows lie in whole lines (`placement.in_lines`); empty: none does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HbmBytes:
    """The compiler's memory report: bytes on one device."""

    arguments: int
    """State, learning rates and batch."""
    outputs: int
    """New state and the step's results."""
    alias: int
    """Outputs that take the place of arguments: the donated state."""
    temp: int
    """What lives within a step."""
    code: int
    """The program."""

    @property
    def peak(self) -> int:
        """Bytes in all."""
        return self.arguments + self.outputs - self.alias + self.temp + self.code


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one kind of work reads and writes."""

    kind: str
    """products, collectives, gathers and scatters, moves to and from VMEM, …, or `kernel NAME` for one of our own."""
    bytes: int
    """As the compiler counts: every operand and result, four times the size for a move to or from VMEM."""
    hbm_bytes: int
    """Of them, what crosses HBM; a move to or from VMEM once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AotReport:
    """What the TPU compiler says of a step; amounts are for one step on one device."""

    topology: str
    devices: int
    effort: Effort
    key: str
    """Digest of the CompileKey."""
    hbm: HbmBytes
    state_bytes: int
    """State on one device."""
    sharded: tuple[str, ...]
    """Tensors of the state that are split over the devices; all others are on each of them."""
    flops: float
    bytes_accessed: float
    """Bytes read and written by all operations, in the chip's fast memory too; only reports of one effort compare. A
    loop's body counts as often as it turns."""
    traffic: tuple[Traffic, ...]
    """The same by kind of work, most first, as far as the program's text tells."""
    optimal_seconds: float | None
    """The compiler's lower bound for a step's time; None where it gives none."""
    unestimated: int
    """Operations that the compiler has no time for; `optimal_seconds` is without them."""
    collectives: tuple[Collective, ...]
    nodes: int
    """Nodes of the captured graph."""
    capture_seconds: float
    lower_seconds: float
    """From the graph to XLA's input."""
    compile_seconds: float
    """In the TPU compiler."""
    versions: tuple[tuple[str, str], ...]
    passes: tuple[tuple[str, int], ...]
    """Nodes that each pass of ours changed."""
    overlap: Overlap | None = None
    """TensorCore work beside SparseCore calls; None: of a report before there was one. `quick` does not schedule so."""
    kept: str | None = None
    """File that the program is kept in, for a run on the slice; None: it was not asked for, or cannot be kept."""

    @property
    def hbm_traffic(self) -> int:
        """Bytes of `traffic` that cross HBM."""
        return sum(each.hbm_bytes for each in self.traffic)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        found = dataclasses.asdict(self)
        found["hbm"]["peak"] = self.hbm.peak
        return {**found, "versions": dict(self.versions), "passes": dict(self.passes)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> AotReport:
        """Return the report that `as_json` gave."""
        hbm = {name: value for name, value in found["hbm"].items() if name != "peak"}
        return cls(
            **{
                **found,
                "hbm": HbmBytes(**hbm),
                "sharded": tuple(found["sharded"]),
                "traffic": tuple(Traffic(**each) for each in found["traffic"]),
                "collectives": tuple(Collective(**each) for each in found["collectives"]),
                "overlap": Overlap(**found["overlap"]) if found.get("overlap") else None,
                "versions": tuple(found["versions"].items()),
                "passes": tuple(found["passes"].items()),
            }
        )
