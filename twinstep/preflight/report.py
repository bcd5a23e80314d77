"""What preflight says of a spec, as frozen values that become JSON; `check.py` makes them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Bound = Literal["compute", "memory", "interconnect", "network", "host", "unknown"]


@dataclass(frozen=True, slots=True)
class Part:
    """One category of a device's memory."""

    name: str
    bytes: int
    what: str
    """What it is made of, in words."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the spec with which it fits: tried by the same model."""

    text: str
    """What to do, in words."""
    fields: dict[str, Any]
    """The fields to set, by path: {"data.batch_size": 512}."""
    bytes: int
    """Of one device, with the change."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a job cannot run."""

    field: str
    """The field of the spec that asks for it."""
    problem: str
    """What is wrong, with the number that broke."""
    given: str
    allowed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The least a step can take by the published rates of the chip; a real one takes longer."""

    flops: float
    """Of one device."""
    hbm_bytes: float
    ici_bytes: float
    """To other devices of a slice, or of a node, from one device."""
    dcn_bytes: float
    """To other slices, or nodes, from one device."""
    compute_s: float
    memory_s: float
    interconnect_s: float
    network_s: float
    seconds: float
    """The largest of them: work that overlaps perfectly."""
    bound: Bound
    """Which of them it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Will a spec fit, and how fast could it be; amounts are of one device."""

    fits: bool
    """Whether nothing speaks against it, as far as is known; warnings may."""
    accelerator: str
    devices: int
    engine: str
    parameters: int
    """Numbers in the model, tables included."""
    table_rows: int
    parts: tuple[Part, ...]
    hbm: int
    """Bytes of all parts."""
    limit: int | None
    """Bytes that may be planned: 95 % of what a program may have; None where nothing is known of the device."""
    step: StepTime | None
    problems: tuple[Problem, ...]
    """Why it cannot run; none: it fits, as far as is known."""
    warnings: tuple[Problem, ...]
    """What may not fit, by a model that was held to too few measurements there: it is not refused."""
    changes: tuple[Change, ...]
    """What would make it fit, warnings too, nearest first."""
    notes: tuple[str, ...]
    """What is not known or assumed."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)
