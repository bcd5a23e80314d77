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
from twinstep.spec.topology import TPUS, slice_shape

BACKENDS = {"cpu": ("inductor", "xla", "eager"), "gpu": ("inductor", "eager"), "tpu": ("xla",)}
"""Backends that can run on a kind of accelerator, the usual one first."""
SPREADS = "xla"  # the one backend that spreads a step over devices of its own process
SPARSECORE = "sparsecore"  # the engine whose SparseCores have as many samples each
USUAL_BATCH = 32
_ACCELERATOR: TypeAdapter[CpuSpec | TpuSpec | GpuSpec] = TypeAdapter(Accelerator)

Said = dict[str, Any]


def accelerator_of(data: Mapping[str, Any]) -> CpuSpec | TpuSpec | GpuSpec | None:
    """Return the accelerator of a spec from its fields as they were given, plain or as specs; None: it is not valid."""
    given = data.get("accelerator")
    try:
        return _ACCELERATOR.validate_python("cpu" if given is None else given)
    except ValidationError:
        return None


def named(of: Any, name: str) -> Any:
    """Return a field of a part of a spec as it was given, plain or as a spec; None: it is not there."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


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


def shares_of(accelerator: CpuSpec | TpuSpec | GpuSpec, engine: str) -> int:
    """Return the equal parts that a step on all devices has of its batch: one a device, or one a SparseCore of each."""
    devices = devices_of(accelerator)
    if engine != SPARSECORE or not isinstance(accelerator, TpuSpec):
        return devices
    return devices * max(TPUS[accelerator.generation].sparse_cores_per_device, 1)


def usual_batch(data: Mapping[str, Any]) -> int:
    """Return the batch of a spec that names none, from its fields as they were given, plain or as specs.

    It is the least of 32 samples or more that its devices divide, and their SparseCores where tables are kept there.
    """
    accelerator = accelerator_of(data)
    if accelerator is None:
        return USUAL_BATCH
    spread = named(data.get("compile"), "backend") == SPREADS or isinstance(accelerator, TpuSpec)
    shares = shares_of(accelerator, named(data.get("embedding"), "engine")) if spread else 1
    size = -(-USUAL_BATCH // shares) * shares
    return size if size <= MAX_BATCH else USUAL_BATCH


def devices_problem(compiler: Any, accelerator: Any) -> Said | None:
    """Return why devices cannot run a backend, where both are valid; None stands for a part that is not."""
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
    return None


def batch_problem(engine: str, compiler: Any, accelerator: Any, data: Any) -> Said | None:
    """Return why a batch cannot be shared out, where all parts are valid; None stands for one that is not.

    Devices of a step take as many samples each, and so does each of their SparseCores where tables are kept there.
    Processes of engine torchrec share any batch.
    """
    if None in (compiler, accelerator, data) or compiler.backend != SPREADS:
        return None
    shares = shares_of(accelerator, engine)
    return None if data.batch_size % shares == 0 else _not_divided(data.batch_size, accelerator, shares)


def _not_divided(size: int, accelerator: CpuSpec | TpuSpec, shares: int) -> Said:
    what = "devices" if shares == devices_of(accelerator) else "SparseCores"
    if isinstance(accelerator, TpuSpec) and shares > MAX_BATCH:
        most = MAX_BATCH * accelerator.slices // shares
        problem = f"make {shares:,} {what}, and a batch has at most {MAX_BATCH:,} samples"
        said = {"at": ("accelerator", "slices"), "given": accelerator.slices}
        return said | {"problem": problem, "allowed": f"at most {most}", "nearest": most}
    below, above = size // shares * shares, -(-size // shares) * shares
    sizes = [each for each in (below, above) if 0 < each <= MAX_BATCH]
    return {
        "at": ("data", "batch_size"),
        "given": size,
        "problem": f"does not divide over the {shares:,} {what} of {place_of(accelerator)}",
        "allowed": f"a multiple of {shares:,}: {' or '.join(map(str, sizes))}",
        "nearest": min(sizes, key=lambda each: (abs(each - size), -each)),
    }
