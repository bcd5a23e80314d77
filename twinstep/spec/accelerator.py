"""Where a job runs: host processors, TPU slices, GPUs; and how its pods are made. `job.py` puts them into a JobSpec."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import Count, Spec, with_kind
from twinstep.spec.topology import (
    GPUS,
    TPUS,
    host_sizes,
    is_topology,
    nearest_topology,
    slice_shape,
    topologies,
)

LABEL_VALUE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
IMAGE = r"^[a-z0-9]([a-z0-9._:/-]{0,250}[a-zA-Z0-9])?(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$"


class CpuSpec(Spec):
    """Host processors: a laptop, a smoke test."""

    kind: Literal["cpu"] = "cpu"
    """The accelerator."""
    devices: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Devices the step is spread over; more than one are parts of the host that compile.backend xla makes of it."""


class TpuSpec(Spec):
    """A GKE TPU slice, or several. Chips, hosts, processes and devices follow from it: see `twinstep topologies`."""

    kind: Literal["tpu"]
    """The accelerator."""
    generation: Literal["v4", "v5e", "v5p", "v6e", "v7x"]
    """TPU generation."""
    topology: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}$", examples=["2x2x1"])]
    """Chips along each axis of a slice: 2x2x1, 4x4x8, 8x16. Never the number in an accelerator type."""
    chips_per_host: Annotated[Literal[1, 4, 8] | None, Field(validate_default=True)] = None
    """Chips of one host; null where only one size is possible. v5e and v6e need it for 2x4, which comes as both."""
    slices: Annotated[Count, Field(le=1024)] = 1
    """Slices of that topology, joined over the data-centre network; more than one only where a slice has many hosts."""

    @field_validator("topology")
    @classmethod
    def _is_one(cls, value: str, info: ValidationInfo) -> str:
        generation = info.data.get("generation")  # not there where it is not valid itself
        if generation is None or is_topology(generation, value):
            return value
        small = ", ".join(topologies(generation, up_to=256))
        most = TPUS[generation].max_chips
        more = f" and larger ones (`twinstep topologies {generation} --up-to {most}`)" if most > 256 else ""
        raise PydanticCustomError(
            "between_fields",
            "is no topology of {generation}",
            {
                "generation": generation,
                "allowed": f"{small}{more}",
                "nearest": nearest_topology(generation, value),
            },
        )

    @field_validator("chips_per_host", mode="before")
    @classmethod
    def _host_size_fits(cls, value: Any, info: ValidationInfo) -> Any:
        generation, topology = info.data.get("generation"), info.data.get("topology")
        if generation is None or topology is None:
            return value
        sizes = host_sizes(generation, topology)
        if isinstance(value, bool) or (value is None and len(sizes) > 1) or (value is not None and value not in sizes):
            raise PydanticCustomError(
                "between_fields",
                "is required: {topology} comes with hosts of either size"
                if value is None
                else "is no host size of {generation} {topology}",
                {
                    "generation": generation,
                    "topology": topology,
                    "allowed": " or ".join(map(str, sizes)),
                    "nearest": sizes[-1],
                },
            )
        return value

    @field_validator("slices")
    @classmethod
    def _slices_have_hosts(cls, value: int, info: ValidationInfo) -> int:
        generation, topology = info.data.get("generation"), info.data.get("topology")
        if value == 1 or generation is None or topology is None or "chips_per_host" not in info.data:
            return value
        shape = slice_shape(generation, topology, chips_per_host=info.data["chips_per_host"])
        if shape.hosts_per_slice == 1:
            raise PydanticCustomError(
                "between_fields",
                "cannot be joined: a slice of {topology} has one host, and only slices of several hosts can",
                {"topology": topology, "allowed": "1, or a topology of more than one host", "nearest": 1},
            )
        return value


class GpuSpec(Spec):
    """GPUs under Ray."""

    kind: Literal["gpu"]
    """The accelerator."""
    model: Literal["h100", "h200", "b200", "a100", "l4"]
    """GPU model."""
    count: Annotated[Count, Field(le=65536)]
    """GPUs in all: part of one node (1, 2 or 4), or whole nodes."""

    @field_validator("count")
    @classmethod
    def _fills_nodes(cls, value: int, info: ValidationInfo) -> int:
        model = info.data.get("model")
        if model is None:
            return value
        node = GPUS[model].per_node
        parts = [size for size in (1, 2, 4) if size < node]
        if value in parts or value % node == 0:
            return value
        raise PydanticCustomError(
            "between_fields",
            "does not fill nodes of {node}",
            {
                "node": node,
                "allowed": f"{', '.join(map(str, parts))}, or a multiple of {node}",
                "nearest": -(-value // node) * node,
            },
        )


def _accelerator(value: Any) -> Any:
    """Let `accelerator: cpu` stand for `accelerator: {kind: cpu}`."""
    return {"kind": value} if isinstance(value, str) else with_kind(value)


Accelerator = Annotated[
    Annotated[CpuSpec | TpuSpec | GpuSpec, Field(discriminator="kind")], BeforeValidator(_accelerator)
]

RESERVED_PREFIXES = ("TPU_", "MEGASCALE_", "TWINSTEP_", "JAX_COORDINATOR_", "RAY_", "KUBERNETES_")
"""Beginnings of names that the cluster or Twinstep sets itself; another value would break a run in ways hard to see."""
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
SECRET_PLACE = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[-._A-Za-z0-9]{1,253}$"  # noqa: S105  a form, no secret
MAX_ENV = 100
EnvText = Annotated[str, Field(max_length=32_768, pattern=r"^[^\x00]*$")]
"""A process's environment holds no NUL, and Linux takes 128 KiB of one variable at most."""

Security = Literal["restricted", "tpu-memlock", "tpu-privileged", "host-network"]


class KubernetesSpec(Spec):
    """How a job's pods are made; jobs on this machine's own processors do not look at it."""

    image: Annotated[str, Field(max_length=512, pattern=IMAGE)] | None = None
    """Container image of the worker, best by digest; null: the control plane's own setting."""
    namespace: Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)] = "default"
    """Namespace of the job's objects."""
    queue: Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)] | None = None
    """Kueue LocalQueue that admits the job; null: it starts at once."""
    priority: Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)] | None = None
    """Kueue WorkloadPriorityClass."""
    topology_aware: StrictBool = False
    """Let Kueue place the pods by topology instead of asking for one node pool per slice; needs a queue."""
    max_restarts: Annotated[StrictInt, Field(ge=0, le=100)] = 3
    """Times that failed pods are started again; a preempted slice does not count."""
    ttl_seconds: Annotated[StrictInt, Field(ge=0, le=30 * 86400)] = 86400
    """Seconds that a finished job's objects are kept."""
    env: Annotated[dict[Annotated[str, Field(pattern=ENV_NAME)], EnvText], Field(max_length=MAX_ENV)] = Field(
        default_factory=dict
    )
    """Environment of the worker, over the platform's own; values are text without NUL, taken byte for byte."""
    secret_env: Annotated[
        dict[Annotated[str, Field(pattern=ENV_NAME)], Annotated[str, Field(max_length=300, pattern=SECRET_PLACE)]],
        Field(max_length=MAX_ENV),
    ] = Field(default_factory=dict)
    """Environment of the worker out of Secrets, each as SECRET/KEY; the values are never seen here."""
    service_account: Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)] | None = None
    """Service account of the pods, which must be there; null: one of the job's own, without rights."""
    security: Security = "restricted"
    """Pod security: restricted, or a named exception that the audit log shows."""
    cpu: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Processors requested per pod; null: by accelerator."""
    memory_gib: Annotated[StrictInt, Field(ge=1, le=8192)] | None = None
    """Memory per pod, in GiB, requested and limited; null: by accelerator."""
    shm_gib: Annotated[StrictInt, Field(ge=1, le=1024)] = 16
    """Shared memory (/dev/shm) of a GPU worker, in GiB; counts against its memory."""
    grace_seconds: Annotated[StrictInt, Field(ge=1, le=3600)] = 300
    """Seconds between asking a pod to stop and killing it: time to save a checkpoint."""

    @field_validator("topology_aware")
    @classmethod
    def _has_a_queue(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("queue") is None:
            raise PydanticCustomError(
                "between_fields",
                "needs kubernetes.queue: Kueue places what a queue admits",
                {"allowed": "true with a queue, else false", "nearest": False},
            )
        return value

    @field_validator("env", "secret_env")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        both = info.data.get("env") or {} if info.field_name == "secret_env" else {}
        taken = [name for name in value if name.startswith(RESERVED_PREFIXES) or name in both]
        if taken:
            raise PydanticCustomError(
                "between_fields",
                "sets {names}, which the cluster, Twinstep or kubernetes.env sets",
                {
                    "names": ", ".join(taken[:5]),
                    "allowed": f"names that do not begin with {', '.join(RESERVED_PREFIXES)}",
                    "nearest": {name: text for name, text in value.items() if name not in taken},
                },
            )
        return value
