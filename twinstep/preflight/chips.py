"""What a chip can do: peak rates and the memory that a program may have, by TPU generation and GPU model, with sources.

Rates are what the vendor publishes; no measurement. How many chips there are and their HBM is `spec/topology.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twinstep.spec.accelerator import GpuSpec, TpuSpec
from twinstep.spec.devices import devices_of, place_of
from twinstep.spec.job import JobSpec
from twinstep.spec.topology import GIB, GPUS, TPUS

GIGA, TERA = 1e9, 1e12
_TPU = "docs.cloud.google.com/tpu/docs"
_INFO = "jax 0.12, jax/_src/tpu_info.py"
_V4 = "Jouppi et al. 2023, TPU v4: six links of 50 GB/s each way"
_LIBTPU = "libtpu 0.0.42.1's own limit, from its message"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipFacts:
    """One JAX device, or one GPU."""

    flops_bf16: float
    """Products of bfloat16 a second; a TPU multiplies float32 so too, unless told otherwise."""
    flops_f32: float
    """Products of float32 a second, as the spec's default precision does them."""
    hbm_bytes_per_s: float
    memory: int
    """Bytes that a program may have: the chip's HBM without what the compiler or the driver keeps."""
    ici_bytes_per_s: float
    """To and from the other devices of a slice or node, one direction, all links of the device together."""
    dcn_bytes_per_s: float
    """Out of a host to other hosts (GPU) or slices (TPU), a device's share."""
    source: str


def _tpu(
    name: str, *, tflops: float, hbm_gb: float, ici_gb: float, usable_gib: float, dcn_gbit: float, source: str
) -> ChipFacts:
    """Return a device's facts from a chip's: TFLOP/s, GB/s of HBM and of all links both ways, Gbit/s of network."""
    per_chip = TPUS[name].devices_per_chip
    return ChipFacts(
        flops_bf16=tflops * TERA / per_chip,
        flops_f32=tflops * TERA / per_chip,
        hbm_bytes_per_s=hbm_gb * GIGA / per_chip,
        memory=int(usable_gib * GIB),
        ici_bytes_per_s=ici_gb / 2 * GIGA / per_chip,
        dcn_bytes_per_s=dcn_gbit / 8 * GIGA / per_chip,
        source=source,
    )


def _gpu(
    name: str, *, bf16: float, f32: float, hbm_gb: float, nvlink_gb: float, nic_gbit: float, source: str
) -> ChipFacts:
    """Return a GPU's facts; rates without sparsity in TFLOP/s, GB/s, NVLink in GB/s over both directions."""
    return ChipFacts(
        flops_bf16=bf16 * TERA,
        flops_f32=f32 * TERA,
        hbm_bytes_per_s=hbm_gb * GIGA,
        memory=GPUS[name].memory_bytes - GPU_RESERVED,
        ici_bytes_per_s=nvlink_gb / 2 * GIGA,
        dcn_bytes_per_s=nic_gbit / 8 * GIGA,
        source=source,
    )


PLANNED = 0.95  # share of what a program may have: the model was up to 4 % below the TPU compiler's report
GPU_RESERVED = 2 * GIB  # the driver's context, NCCL's buffers, cuBLAS's workspace: a rule of thumb, not measured
_NVIDIA = "NVIDIA's data sheet"

FACTS: dict[str, ChipFacts] = {
    "v4": _tpu(
        "v4", tflops=275, hbm_gb=1228, ici_gb=600, usable_gib=31.0, dcn_gbit=50 / 4, source=f"{_TPU}/v4; ICI: {_V4}",
    ),
    "v5e": _tpu("v5e", tflops=197, hbm_gb=819, ici_gb=400, usable_gib=15.75, dcn_gbit=100 / 4, source=f"{_TPU}/v5e"),
    "v5p": _tpu(
        "v5p", tflops=459, hbm_gb=2765, ici_gb=1200, usable_gib=95.74, dcn_gbit=200 / 4,
        source=f"{_TPU}/v5p; memory: {_LIBTPU}",
    ),
    "v6e": _tpu(
        "v6e", tflops=918, hbm_gb=1638, ici_gb=800, usable_gib=31.25, dcn_gbit=200 / 4,
        source=f"{_TPU}/v6e; memory: {_LIBTPU}",
    ),
    "v7x": _tpu(
        "v7x", tflops=2307, hbm_gb=7380, ici_gb=1200, usable_gib=94.75, dcn_gbit=400 / 4,
        source=f"{_TPU}/tpu7x; {_INFO}; memory: {_LIBTPU}",
    ),
    "h100": _gpu("h100", bf16=989, f32=67, hbm_gb=3350, nvlink_gb=900, nic_gbit=200, source=f"{_NVIDIA}, H100 SXM"),
    "h200": _gpu("h200", bf16=989, f32=67, hbm_gb=4800, nvlink_gb=900, nic_gbit=400, source=f"{_NVIDIA}, H200 SXM"),
    "b200": _gpu("b200", bf16=2250, f32=75, hbm_gb=8000, nvlink_gb=1800, nic_gbit=400, source=f"{_NVIDIA}, B200"),
    "a100": _gpu("a100", bf16=312, f32=19.5, hbm_gb=1555, nvlink_gb=600, nic_gbit=12.5, source=f"{_NVIDIA}, A100 40"),
    "l4": _gpu("l4", bf16=121, f32=30.3, hbm_gb=300, nvlink_gb=64, nic_gbit=12.5, source=f"{_NVIDIA}, L4, over PCIe 4"),
}  # fmt: skip
"""By TPU generation and GPU model, per device. The network between hosts is that of Google's machine types (a TPU
host's share of its network card; a3, a4: one card a GPU; a2, g2: 100 Gbit/s for eight)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """The devices of a job."""

    kind: Literal["cpu", "tpu", "gpu"]
    name: str
    """v5p:4x4x8, 128 × h100, cpu."""
    devices: int
    """Of all slices or nodes."""
    slices: int
    """Parts that are joined by the network between hosts alone: slices of a TPU job, nodes of a GPU job."""
    facts: ChipFacts | None
    """None on host processors, of which nothing is known here."""

    @property
    def memory(self) -> int | None:
        """Bytes of one device that may be planned; None: not known here."""
        return None if self.facts is None else int(PLANNED * self.facts.memory)


def where(spec: JobSpec) -> Where:
    """Return the devices that a spec asks for."""
    asked, slices = spec.accelerator, 1
    facts: ChipFacts | None = None
    if isinstance(asked, GpuSpec):
        slices, facts = -(-asked.count // GPUS[asked.model].per_node), FACTS[asked.model]
    elif isinstance(asked, TpuSpec):
        slices, facts = asked.slices, FACTS[asked.generation]
    return Where(kind=asked.kind, name=place_of(asked), devices=devices_of(asked), slices=slices, facts=facts)
