"""What must be set before torch and jax are imported, and what a run's surroundings are. Imports neither."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from twinstep.spec.accelerator import CpuSpec, TpuSpec
from twinstep.spec.errors import SpecError, UnavailableError
from twinstep.spec.job import CheckpointSpec, JobSpec
from twinstep.spec.machine import ROOT, has_tpu_chips
from twinstep.spec.topology import slice_shape
from twinstep.worker.train.processes import NAMES, Process
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.toolchain import check_compiler


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """Where a run's worker is: set in the environment by whatever started it."""

    run_id: str
    run_dir: Path
    """The run's own directory; docs/architecture.md lists its files."""
    api_url: str
    token: str
    """Lets this run report, and nothing else."""

    @classmethod
    def from_environment(cls) -> RunContext | None:
        """Return the context, or None for a run by hand.

        Raises:
            UnavailableError: only some of the four variables are set.
        """
        names = ("TWINSTEP_RUN_ID", "TWINSTEP_RUN_DIR", "TWINSTEP_API_URL", "TWINSTEP_RUN_TOKEN")
        values = {name: os.environ.get(name, "") for name in names}
        if not any(values.values()):
            return None
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise UnavailableError(
                f"the environment of a run lacks {', '.join(missing)}",
                remedy=f"set all of {', '.join(names)}, or none",
            )
        run_id, run_dir, api_url, token = values.values()
        return cls(run_id=run_id, run_dir=Path(run_dir), api_url=api_url, token=token)


PLACE = "TWINSTEP_CHECKPOINTS"
"""Environment variable: the job's own place, where a control plane gave it one."""


def named_place(spec: CheckpointSpec) -> str | None:
    """Return where checkpoints go, None for nowhere."""
    return os.environ.get(PLACE) or spec.path


RESTART = "TWINSTEP_RESTART"
"""Environment variable: what whoever starts workers again says of the one before; JSON, as PreviousWorker has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviousWorker:
    """The worker that this one is started in place of."""

    count: int
    """Which restart this is, from 1."""
    reason: str
    """How the one before ended, in words."""
    step: int | None
    """Steps that it had done; None: nobody knows."""
    seconds: float = 0.0
    """Since the first worker was started, until this one was."""


def previous_worker() -> PreviousWorker | None:
    """Return what a supervisor says of the worker before this one; None: this is the first, or nobody says."""
    told = os.environ.get(RESTART)
    if not told:
        return None
    try:
        found = json.loads(told)
        step = None if found["step"] is None else int(found["step"])
        seconds = float(found.get("seconds", 0.0))
        return PreviousWorker(count=int(found["count"]), reason=str(found["reason"]), step=step, seconds=seconds)
    except (ValueError, TypeError, KeyError):
        return None


def grace_seconds(spec: JobSpec) -> float:
    """Return how long a run of `spec` has between SIGTERM and SIGKILL."""
    if isinstance(spec.accelerator, CpuSpec):
        return spec.runtime.stop_grace_seconds
    return float(spec.kubernetes.grace_seconds)


def settle_threads(environ: MutableMapping[str, str]) -> None:
    """Say how OpenMP's threads wait, where nobody has said so; libgomp reads it when it is loaded.

    Threads that spin while they wait take the processor from those that work, which on small shared machines made steps
    several times slower; asleep after each of a step's hundreds of short loops, two are as fast as one.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    environ.setdefault("GOMP_SPINCOUNT", "1000")  # turns, some microseconds


def settle_memory() -> bool:
    """Let all threads share glibc's first arena from now on; say whether they do. Before any other thread is started.

    XLA allocates the buffer of a step's values from a thread of its own. In an arena that some other thread began, what
    is larger than 64 MiB is mapped at every step and unmapped after it (malloc/arena.c, HEAP_MAX_SIZE): 39,000 page
    faults a step of `bench step`. Which arena XLA's threads get is chance, once there are several.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "MALLOC_ARENA_MAX" in os.environ
    return mallopt is not None and not tuned and bool(mallopt(_M_ARENA_MAX, 1))


_M_ARENA_MAX = -8  # malloc.h


def prepare_environment(spec: JobSpec) -> None:
    """Set the variables that torch, jax and OpenMP read when they are loaded.

    Raises:
        SpecError: the spec's accelerator is not one that this process can train on.
        UnavailableError: the backend needs a compiler that is not here; the cache directory cannot be made, or others
            can write to it.
    """
    divided, ranks = spec.embedding.engine == "torchrec", Ranks.from_environment()
    if spec.accelerator.kind == "gpu" and not divided:
        raise SpecError(
            "accelerator.kind is gpu; this process trains on cpu",
            remedy="accelerator: cpu, or embedding.engine: torchrec; or render the job for a cluster: twinstep render "
            "SPEC",
        )
    if ranks.size > 1 and not divided:
        raise SpecError(
            f"WORLD_SIZE is {ranks.size}, and embedding.engine {spec.embedding.engine} divides no batch over ranks",
            remedy="set embedding.engine: torchrec, or start one process",
        )
    settle_threads(os.environ)
    if isinstance(spec.accelerator, TpuSpec):
        _check_host(spec.accelerator)
        os.environ["JAX_PLATFORMS"] = "tpu,cpu"  # TPUs are the devices of a mesh, and the host's CPU is there too
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        _set_devices(spec)
    if spec.compile.backend == "inductor":
        check_compiler()
    directory = cache_directory(spec)
    if directory is not None and spec.compile.backend != "eager":
        _make_private(directory)
        _make_private(directory / spec.compile.backend)


def _check_host(asked: TpuSpec) -> None:
    """See that this process is one of those that a slice's hosts run, one on each, before libtpu waits for others.

    Raises:
        SpecError: this host has no TPU chips, or processes are not as many as the slices have hosts.
        UnavailableError: libtpu is not installed.
    """
    if not has_tpu_chips(ROOT):
        raise SpecError(
            "accelerator.kind is tpu, and this host has no TPU chips",
            remedy="accelerator: cpu; or render the job for a cluster: twinstep render SPEC",
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UnavailableError(
            "libtpu is not installed, through which JAX reaches TPU chips",
            remedy="use the TPU worker's image, or install the extra: pip install 'twinstep[worker,aot]'",
        )
    shape = slice_shape(asked.generation, asked.topology, chips_per_host=asked.chips_per_host, slices=asked.slices)
    count = Process.from_environment().count
    if count != shape.hosts:
        raise SpecError(
            f"{shape.slices} slice(s) of {shape.generation} {shape.topology} have {shape.hosts} hosts, and the run has "
            f"{count} process(es)",
            remedy=f"start one process on each host, with {', '.join(NAMES)}, as a rendered JobSet does",
        )


def _set_devices(spec: JobSpec) -> None:
    """Let JAX see as many devices as the spec asks for; it reads the variable when it is first imported."""
    wanted, count = mesh_axes(spec), Process.from_environment().count
    if wanted is None:
        if count > 1:
            raise SpecError(
                f"the run has {count} processes and accelerator.devices is 1",
                remedy=f"set accelerator.devices to a multiple of {count}",
            )
        return
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    if wanted["data"] % count:
        raise SpecError(
            f"accelerator.devices is {wanted['data']}, which does not divide over the run's {count} processes",
            remedy=f"set accelerator.devices to a multiple of {count}",
        )
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_DEVICE_COUNT}={wanted['data'] // count}"])


_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def mesh_axes(spec: JobSpec) -> dict[str, int] | None:
    """Return the mesh a spec's step is spread over, or None for one device."""
    devices = spec.accelerator.devices if isinstance(spec.accelerator, CpuSpec) else 1
    return {"data": devices} if devices > 1 else None


def _make_private(directory: Path) -> None:
    """Make a directory that its owner alone can write to, or check one: compiled programs are code that will be run."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise UnavailableError(
            f"the compile cache {directory} cannot be made: {error.strerror}",
            remedy="set compile.cache_dir to a directory that can be written, or compile.cache: false",
        ) from error
    if found.st_uid != os.geteuid():
        raise UnavailableError(
            f"the compile cache {directory} belongs to another user (id {found.st_uid}), who could put code into it",
            remedy="set compile.cache_dir to a directory of your own, or compile.cache: false",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnavailableError(
            f"the compile cache {directory} can be written by others, who could put code into it",
            remedy=f"rm -r {directory}, or set compile.cache_dir to a directory of your own",
        )


def usable_processors() -> int:
    """Return how many processors this process may run on: a container's or a taskset's share, not the machine's."""
    return len(os.sched_getaffinity(0))


def cache_directory(spec: JobSpec) -> Path | None:
    """Return the directory of the compile cache, or None where the spec wants none, or processes are several."""
    # A program of several processes is one process's part, and no other's.
    return None if Process.from_environment().count > 1 else cache_path(spec)


def cache_path(spec: JobSpec) -> Path | None:
    """Return the same whether or not processes are several: what was compiled ahead is all devices' program."""
    if not spec.compile.cache:
        return None
    return users_cache() if spec.compile.cache_dir is None else Path(spec.compile.cache_dir).expanduser()


def users_cache() -> Path:
    """Return the directory of the compile cache where a spec names none."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "twinstep"
