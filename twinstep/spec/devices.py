"""What devices ask of the rest of a spec: a backend that runs on them, and a batch that they divide. Pure.

`job.py` asks, so a spec that its devices could not run is refused wherever one is read: by validate, submit, resize and
train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from twinstep.spec.accelerator import Accelerator, CpuSpec, GpuSpec, TpuSpec
from twinstep.spec.base import MAX_BATCH
from twinstep.spec.topology import slice_shape

BACKENDS = {"cpu": ("inductor", "xla", "eager"), "gpu": ("inductor", "eager"), "tpu": ("xla",)}
"""Backends that can run on a kind of accelerator, the usual one first."""
SPREADS = "xla"  # the one backend that spreads a step over devices of its own process
USUAL_BATCH = 32
_ACCELERATOR: TypeAdapter[CpuSpec | TpuSpec | GpuSpec] = TypeAdapter(Accelerator)

Said = dict[str, Any]


def devices_of(accelerator: CpuSpec | TpuSpec | GpuSpec) -> int:
    """Return the devices that a job runs on, over all slices and nodes."""
    if isinstance(accelerator, TpuSpec):
        return slice_shape(
            accelerator.generation,
            accelerator.topology,
            chips_per_host=accelerator.chips_per_host,
            slices=accelerator.slices,
        ).devices
    return accelerator.devices if isinstance(accelerator, CpuSpec) else accelerator.count


def place_of(accelerator: CpuSpec | TpuSpec | GpuSpec) -> str:
    """Return how people call it: `v5p:2x2x1`, `4 × v5p:2x2x1`, `8 × h100`, `cpu`."""
    if isinstance(accelerator, TpuSpec):
        name = f"{accelerator.generation}:{accelerator.topology}"
        return f"{name} × {accelerator.slices}" if accelerator.slices > 1 else name
    return "cpu" if isinstance(accelerator, CpuSpec) else f"{accelerator.count} × {accelerator.model}"


def usual_batch(data: Mapping[str, Any]) -> int:
    """Return the batch of a spec that names none, from its fields as they were given.

    It is the least of 32 samples or more that its devices divide.
    """
    given, compiler = data.get("accelerator"), data.get("compile")
    try:
        accelerator = _ACCELERATOR.validate_python("cpu" if given is None else given)
    except ValidationError:
        return USUAL_BATCH
    spread = isinstance(compiler, Mapping) and compiler.get("backend") == SPREADS
    devices = devices_of(accelerator) if spread or isinstance(accelerator, TpuSpec) else 1
    size = -(-USUAL_BATCH // devices) * devices
    return size if size <= MAX_BATCH else USUAL_BATCH


def devices_problem(compiler: Any, accelerator: Any, data: Any) -> Said | None:
    """Return why devices cannot run a step of these parts, of which those that are not valid are None.

    Devices of a step take as many samples each. Processes of engine torchrec share any batch.
    """
    if accelerator is None:
        return None
    fitting, devices = BACKENDS[accelerator.kind], devices_of(accelerator)
    backend: Said = {"at": ("compile", "backend"), "given": compiler.backend}
    if compiler.backend not in fitting:
        problem = f"cannot run on a {accelerator.kind}"
        return backend | {"problem": problem, "allowed": ", ".join(fitting), "nearest": fitting[0]}
    if isinstance(accelerator, CpuSpec) and devices > 1 and compiler.backend != SPREADS:
        problem, allowed = f"uses one device, not {devices}", f"{SPREADS}, or accelerator.devices: 1"
        return backend | {"problem": problem, "allowed": allowed, "nearest": SPREADS}
    if data is None or compiler.backend != SPREADS or data.batch_size % devices == 0:
        return None
    return _not_divided(data.batch_size, accelerator, devices)


def _not_divided(size: int, accelerator: CpuSpec | TpuSpec, devices: int) -> Said:
    if isinstance(accelerator, TpuSpec) and devices > MAX_BATCH:
        most = MAX_BATCH * accelerator.slices // devices
        problem = f"make {devices:,} devices, and a batch has at most {MAX_BATCH:,} samples"
        said = {"at": ("accelerator", "slices"), "given": accelerator.slices}
        return said | {"problem": problem, "allowed": f"at most {most}", "nearest": most}
    below, above = size // devices * devices, -(-size // devices) * devices
    sizes = [each for each in (below, above) if 0 < each <= MAX_BATCH]
    return {
        "at": ("data", "batch_size"),
        "given": size,
        "problem": f"does not divide over the {devices:,} devices of {place_of(accelerator)}",
        "allowed": f"a multiple of {devices:,}: {' or '.join(map(str, sizes))}",
        "nearest": min(sizes, key=lambda each: (abs(each - size), -each)),
    }
