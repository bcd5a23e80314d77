"""What a spec's accelerator is called, and its chips: `v5p 4x4x8`, `2 × v5p 4x4x4`, `128 × h100`; and a host's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstep.spec.topology import GPUS, chips_of, slice_shape

ROOT = Path("/")
CHIPS = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
"""Under the root, where TPU chips are devices of their host: by the TPU driver, or by VFIO on newer machines."""


def has_tpu_chips(root: Path = ROOT) -> bool:
    """Return whether this host has TPU chips."""
    return any(any(root.glob(pattern)) for pattern in CHIPS)


@dataclass(frozen=True, slots=True)
class MachineWords:
    """An accelerator, in words and in chips."""

    name: str
    chips: int
    """TPU chips or GPUs; 0 for host processors."""


def machine_hosts(accelerator: Mapping[str, Any]) -> tuple[int, int]:
    """Return (slices, hosts of a slice) of the `accelerator` of a spec that is valid."""
    match accelerator["kind"]:
        case "tpu":
            shape = slice_shape(
                accelerator["generation"],
                accelerator["topology"],
                chips_per_host=accelerator.get("chips_per_host"),
                slices=accelerator.get("slices", 1),
            )
            return shape.slices, shape.hosts_per_slice
        case "gpu":
            return 1, max(1, int(accelerator["count"]) // GPUS[accelerator["model"]].per_node)
    return 1, 1


def machine_words(accelerator: Mapping[str, Any]) -> MachineWords:
    """Return the words for the `accelerator` of a spec that is valid."""
    match accelerator["kind"]:
        case "tpu":
            slices, topology = int(accelerator.get("slices", 1)), str(accelerator["topology"])
            name = f"{accelerator['generation']} {topology}"
            return MachineWords(name if slices == 1 else f"{slices} × {name}", slices * chips_of(topology))
        case "gpu":
            return MachineWords(f"{accelerator['count']} × {accelerator['model']}", int(accelerator["count"]))
    devices = int(accelerator.get("devices", 1))
    return MachineWords("cpu" if devices == 1 else f"cpu, {devices} devices", 0)
