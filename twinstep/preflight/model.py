"""A spec with all that preflight knows of it: devices, shape of the data, parameters, memory. One call, no state."""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.preflight.chips import Where, where
from twinstep.preflight.memory import Memory, memory_of
from twinstep.preflight.parameters import Parameter, parameters
from twinstep.preflight.shapes import DataShape, data_shape
from twinstep.spec.job import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Modelled:
    """What follows from a spec."""

    where: Where
    shape: DataShape
    parameters: tuple[Parameter, ...]
    memory: Memory


def modelled(spec: JobSpec) -> Modelled:
    """Return what follows from a spec."""
    place, shape = where(spec), data_shape(spec.data)
    found = parameters(spec, shape)
    return Modelled(where=place, shape=shape, parameters=found, memory=memory_of(spec, shape, found, place))
