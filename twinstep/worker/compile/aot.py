"""Ahead-of-time compilation for a TPU slice by the real TPU compiler, on any x86-64 Linux host: what it reports.

compiled = compile_ahead(train_step, model, optimizer, batch, topology="v5p:4x4x8")
compiled.report.hbm.peak       # bytes on one device

The model may live on the `meta` device, and so may the batch: only shapes are read, so that tables of any size can be
compiled for. The step is the very one that the XLA backend runs: `capture.py` captures it, `lower/tpu.py` lowers it.
Each device gets its part of the batch; the state lives where `spec/placement.py` says.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from twinstep.spec.errors import CompileError, UnavailableError
from twinstep.spec.placement import Mesh, Placed, Placement, Spec, in_lines, place
from twinstep.spec.slices import Slice, parse_slice
from twinstep.worker.compile.annotate import Inputs, Spread
from twinstep.worker.compile.aot_report import AotReport, Cuts, Effort
from twinstep.worker.compile.around import Around
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.kept import Kept
from twinstep.worker.compile.shipped import Shipped, slice_key
from twinstep.worker.compile.state import Optimizers
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.compile.strategies import Strategy, resolve
from twinstep.worker.compile.structure import TrainStep, batch_leaves

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # JAX itself computes on the host; the TPU is only compiled for
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would wait for a metadata server
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # it complains where there is none; the topology is what counts
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process on this host may compile too
}
"""What libtpu needs in the environment before it is loaded on a machine without a TPU."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was compiled ahead of time."""

    executable: Any
    """A `jax.stages.Compiled` for the slice."""
    report: AotReport
    captured: Captured


def _ready_for_libtpu() -> None:
    need_libtpu()
    os.environ.update(ENVIRONMENT | dict(os.environ))


def compile_ahead(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizers,
    example_batch: Any,
    *,
    topology: str,
    strategies: Sequence[Strategy | str] | None = None,
    batch_size: int | None = None,
    batch_dims: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
    effort: Effort = "full",
    keep: Path | None = None,
    around: Callable[[Any], Around] | None = None,
) -> Ahead:
    """Compile a whole training step for every device of a TPU slice.

    Args:
        train_step: `(model, optimizer, batch) → outputs`, as for `compile`.
        model: may be on the `meta` device; nothing is computed.
        example_batch: the global batch, over all devices; shapes and dtypes count.
        topology: name of the slice: `v5p:4x4x8`.
        strategies: what to ask of the compiler; None: the defaults.
        effort: `quick` to ask what a slice would need, `full` for what is going to run.
        batch_size: B, the size that marks a batch dimension; None: the size that most leaves have.
        batch_dims: position of the batch dimension by batch leaf; None: the first whose size is a multiple of B.
        sizes: named sizes of the batch, as for `StepCompiler`.
        keep: directory of the compile cache that the program is kept in, for a run on such a slice.
        around: makes an embedding engine's work around the step, over the slice's mesh; its arrays are shapes.

    Raises:
        SpecError: there is no such slice.
        UnavailableError: libtpu is not installed.
        CompileError: the batch does not divide over the devices, the step cannot be captured or lowered, or lacks room.
    """
    target = parse_slice(topology)
    _ready_for_libtpu()
    from twinstep.worker.compile.lower import tpu, xla_trace  # JAX reads the environment when it is imported

    leaves, names, _ = batch_leaves(example_batch)
    size, mesh = batch_size or _common_size(leaves), Mesh.of_slice(target.devices)
    check_divides(size, target)
    options: dict[str, Any] = {"mesh": mesh, "batch_dims": batch_dims, "strategies": strategies, "ahead": True}
    chips = tpu.slice_mesh(target)
    options["around"] = engine = around and around(chips)
    compiler, started = StepCompiler(train_step, model, optimizer, backend="xla", **options), time.perf_counter()
    state, ops = compiler.state, xla_trace.decompositions()
    captured = capture(train_step, state, optimizer, example_batch, ops, backend="xla", strategies=resolve(strategies))
    capture_seconds, inputs = time.perf_counter() - started, state_of(captured)
    placed = place(inputs, mesh)
    dims = {name: batch_dimension(leaf, size) for name, leaf in zip(names, leaves, strict=True)}
    of_batch = tuple((dims if batch_dims is None else batch_dims).get(name) for name in names)
    cuts = _cuts(inputs, placed, of_batch)
    program = tpu.compile_for(captured, cuts, target, effort, mesh=chips, around=engine)
    key = slice_key(compiler.key(example_batch, sizes=sizes), target.name)
    report = AotReport(
        topology=target.name,
        devices=target.devices,
        effort=effort,
        key=key.digest,
        sharded=tuple(s.path for s, dim in zip(state.slots, cuts.state, strict=True) if dim is not None),
        nodes=len(captured.graph.graph.nodes),
        capture_seconds=capture_seconds,
        versions=key.versions,
        passes=tuple(captured.changed.items()),
        **program.found,
    )
    if keep is not None:
        given = 0 if engine is None else engine.given
        parts = tpu.written(program.executable, captured, placed, cuts, mesh, given=given)
        kept = Kept.of(captured, compiler.reached)
        file = Shipped(keep, target.name).put(key, kept, parts, devices=program.devices, report=report.as_json())
        report = dataclasses.replace(report, kept=None if file is None else str(file))
    return Ahead(program.executable, report, captured)


def need_libtpu() -> None:
    """Raise unless the TPU compiler is installed, in the version that the installed jax is made for.

    Raises:
        UnavailableError: it is not.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UnavailableError(
            "the TPU compiler, libtpu, is not installed here",
            remedy="pip install 'twinstep[worker,aot]' on x86-64 Linux",
        )
    wanted, there = wanted_libtpu(importlib.metadata.requires("jax") or ()), _version("libtpu")
    if wanted is not None and there is not None and not fnmatch.fnmatch(there, wanted):
        raise UnavailableError(
            f"libtpu {there} is installed, and jax {_version('jax')} is made for libtpu {wanted}: what one compiles, "
            "the other may not run",
            remedy=f"pip install 'libtpu=={wanted}'",
        )


def wanted_libtpu(requirements: Iterable[str]) -> str | None:
    """Return the version of libtpu, perhaps with a `*`, that a distribution's requirements name; None: any."""
    found = (re.match(r"libtpu\s*==\s*([\w.*]+)", each) for each in requirements)
    return next((each[1] for each in found if each), None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_divides(batch_size: int, target: Slice) -> None:
    """Raise unless each device gets as many rows of the batch as any other.

    Raises:
        CompileError: it does not; the message names the nearest batch sizes that do.
    """
    if batch_size % target.devices:
        below = batch_size // target.devices * target.devices
        sizes = f"{below} or {below + target.devices}" if below else str(target.devices)
        raise CompileError(
            f"a batch of {batch_size} does not divide over the {target.devices} devices of {target.name}",
            remedy=f"set data.batch_size to {sizes}, or take another topology",
        )


def _common_size(leaves: Sequence[Tensor]) -> int:
    sizes = Counter(size for leaf in leaves for size in set(leaf.shape) if size > 1)
    return max(sizes, key=lambda size: (sizes[size], size), default=1)


def batch_dimension(leaf: Tensor, batch_size: int) -> int | None:
    """Return the dimension along which a batch leaf is cut: the first whose size is a multiple of the batch's."""
    return next((dim for dim, size in enumerate(leaf.shape) if size and size % batch_size == 0), None)


def _cuts(inputs: Sequence[Placed], placed: Placement, batch: tuple[int | None, ...]) -> Cuts:
    state = tuple(map(split_dimension, placed.specs))
    return Cuts(state=state, extra=placed.extra, batch=batch, lines=tuple(map(in_lines, inputs)))


def state_of(captured: Captured) -> tuple[Placed, ...]:
    """Return the state of a captured step as the rules of placement see it."""
    return Inputs.of(captured, Spread(batch_dims={})).placed[: captured.num_state]


def split_dimension(spec: Spec) -> int | None:
    """Return the dimension that a tensor is split along; None: each device holds it all."""
    return next((dim for dim, axis in enumerate(spec) if axis is not None), None)


def tree_to_meta(tree: Any) -> Any:
    """Return the same structure of tensors with shapes and dtypes only, on the `meta` device."""
    return pytree.tree_map_only(Tensor, lambda each: each.to("meta"), tree)
