"""The table of accelerators as plain data, with what follows from each slice: for people, for the API, for scripts."""

from __future__ import annotations

from typing import Any

from twinstep.spec.topology import GIB, GPUS, LISTED_CHIPS, TPUS, host_sizes, slice_shape, topologies, wraps


def catalogue(*, up_to: int = LISTED_CHIPS) -> dict[str, list[dict[str, Any]]]:
    """Return {"tpus": […], "gpus": […]}; slices of at most `up_to` chips, one row per topology and host size."""
    return {
        "tpus": [
            {
                "name": tpu.name,
                "label": tpu.label,
                "hbm_gib": tpu.hbm_bytes // GIB,
                "tensor_cores_per_chip": tpu.tensor_cores,
                "devices_per_chip": tpu.devices_per_chip,
                "sparse_cores_per_chip": tpu.usable_sparse_cores,
                "max_chips": tpu.max_chips,
                "source": tpu.source,
                "slices": [
                    _slice(tpu.name, topology, size)
                    for topology in topologies(tpu.name, up_to=up_to)
                    for size in host_sizes(tpu.name, topology)
                ],
            }
            for tpu in TPUS.values()
        ],
        "gpus": [
            {
                "name": gpu.name,
                "label": gpu.label,
                "machine_type": gpu.machine.name,
                "per_node": gpu.per_node,
                "memory_gib": gpu.memory_bytes // GIB,
                "source": gpu.source,
            }
            for gpu in GPUS.values()
        ],
    }


def _slice(generation: str, topology: str, chips_per_host: int) -> dict[str, Any]:
    shape = slice_shape(generation, topology, chips_per_host=chips_per_host)
    return {
        "topology": topology,
        "chips": shape.chips,
        "chips_per_host": shape.chips_per_host,
        "machine_type": shape.machine_type,
        "hosts": shape.hosts,
        "processes": shape.hosts,
        "devices": shape.devices,
        "wraps": list(wraps(generation, topology)),
    }
