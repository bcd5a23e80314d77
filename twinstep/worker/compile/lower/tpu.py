"""Stage 5, lower for a TPU slice ahead of time: a captured step compiled by libtpu on the host, and what it reports.

`aot.py` asks. Nothing runs, and no array is made: all that goes in is shapes, dtypes and shardings.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]
from torch import Tensor
from torchax.ops.mappings import t2j_dtype

from twinstep.preflight.chips import FACTS
from twinstep.spec.errors import CompileError
from twinstep.spec.placement import DATA, Placement
from twinstep.spec.placement import Mesh as Axes
from twinstep.spec.slices import Slice
from twinstep.worker.compile.aot_report import Cuts, Effort, HbmBytes
from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.hlo import HloText, parse_hlo, with_entry
from twinstep.worker.compile.lower import pallas_attention, xla_attention
from twinstep.worker.compile.lower.layout import lines
from twinstep.worker.compile.lower.ring_on import RingOn
from twinstep.worker.compile.lower.tpu_traffic import traffic
from twinstep.worker.compile.lower.tpu_words import in_plain_words
from twinstep.worker.compile.lower.xla import parts_of
from twinstep.worker.compile.lower.xla_around import with_around
from twinstep.worker.compile.lower.xla_trace import as_jax, result_dtypes
from twinstep.worker.compile.overlap import overlap

AXIS = DATA
"""The mesh's one axis: all devices."""

EFFORTS: dict[Effort, dict[str, str]] = {
    "quick": {"xla_optimization_level": "EFFORT_O1"},
    "full": {},
}
"""Options of the compiler, nearly all whose time goes into the code of single fusions."""

CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "v7x": 2.2e9}
"""A TensorCore's cycles a second, by generation: the published peak of bfloat16 products over what its systolic arrays
do in a cycle (8 of 128 × 128 in v4 and v5p, 4 in v5e; of 256 × 256 4 in v6e and 8 in v7x)."""


@dataclass(frozen=True, slots=True)
class TpuProgram:
    """A compiled step and what the compiler says of it."""

    executable: Any
    found: dict[str, Any]
    """Fields of an AotReport."""
    devices: tuple[Any, ...]
    """Of the mesh, in its order."""


def compile_for(
    captured: Captured, cuts: Cuts, target: Slice, effort: Effort, *, mesh: Mesh | None = None, around: Any = None
) -> TpuProgram:
    """Compile a captured step for each device of a slice.

    Args:
        captured: the step.
        cuts: how state and batch are split.
        target: the slice.
        effort: of the compiler.
        mesh: its devices, where they are known already: `slice_mesh`.
        around: an engine's work around the step (`around.Around`), over that mesh; its arrays may be shapes.

    Raises:
        CompileError: an op has no lowering, the compiler refuses the program, or a device's memory does not hold it.
    """
    mesh = mesh or slice_mesh(target)
    arguments = _arguments(captured, cuts, mesh, given=0 if around is None else around.given)
    ring = RingOn.of(captured, mesh, [(AXIS,) if dim == 0 else () for dim in cuts.state], cuts.lines)
    donated: tuple[int, ...] = (0,)
    function, results = as_jax(captured, ring=ring), _results(arguments, mesh)
    if around is not None:
        function, donated = with_around(function, around), (0, 5)
        results, arguments = (*results, around.placing, None), (*arguments, around.state, around.arguments)
    started = time.perf_counter()
    on_slice = (xla_attention.platform("tpu"), pallas_attention.over(mesh, rows=AXIS))
    with _in_words(target), warnings.catch_warnings(), on_slice[0], on_slice[1]:
        warnings.filterwarnings("ignore", "Explicitly requested dtype")  # 64-bit integers are 32 bits wide on XLA
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=results)
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("tpu",))
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=EFFORTS[effort])
    compile_seconds = time.perf_counter() - lowered_at
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    hlo = parse_hlo(text)
    per_cycle = FACTS[target.generation].hbm_bytes_per_s / CLOCKS[target.generation]
    found = {
        "hbm": HbmBytes(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            alias=memory.alias_size_in_bytes,
            temp=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
        ),
        "state_bytes": sum(_local_bytes(each) for at in donated for each in jax.tree.leaves(arguments[at])),
        "collectives": hlo.collectives(),
        "overlap": overlap(text, lambda called: _part_costs(with_entry(text, called))["bytes accessed"] / per_cycle),
        "traffic": traffic(text),
        "lower_seconds": lowered_at - started,
        "compile_seconds": compile_seconds,
        **_costs(compiled.cost_analysis(), text, hlo),
    }
    return TpuProgram(compiled, found, tuple(mesh.devices.flat))


def written(
    executable: Any, captured: Captured, placed: Placement, cuts: Cuts, axes: Axes, *, given: int = 0
) -> dict[str, bytes]:
    """Return the parts of which a worker's backend on the slice makes the program (`XlaBackend.load`).

    Args:
        given: leaves at the end of the batch that an engine makes on the devices.
    """
    start = captured.num_state + captured.num_rates
    leaves = captured.example[start : start + captured.num_batch - given]
    (axis, _), *_ = axes.axes
    batch = tuple(
        tuple(axis if at == dim else None for at in range(leaf.dim()))
        for leaf, dim in zip(leaves, cuts.batch[: len(leaves)], strict=True)
    )
    places = (placed.specs, placed.extra, batch, cuts.lines)
    return parts_of(executable, result_dtypes(captured), places, [])


def slice_mesh(target: Slice) -> Mesh:
    """Return the devices of a slice, none of which need exist, as a mesh of one axis; of several one after the other.

    Raises:
        CompileError: the TPU compiler does not take the topology.
    """
    try:
        joined = {"num_slices": target.slices} if target.slices > 1 else {}
        description = topologies.get_topology_desc(platform="tpu", topology_name=target.compiler_name, **joined)
    except Exception as error:
        raise CompileError(
            f"the TPU compiler takes no slice {target.name}: {_first_line(error)}",
            remedy="use another topology of the generation, or another version of libtpu",
        ) from error
    return Mesh(np.array(description.devices), (AXIS,))


def _arguments(captured: Captured, cuts: Cuts, mesh: Mesh, *, given: int = 0) -> tuple[Any, ...]:
    def shape(tensor: Tensor, dim: int | None, extra: int = 0, whole: bool = False) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(t2j_dtype(tensor.dtype))
        sizes = (tensor.shape[0] + extra, *tensor.shape[1:]) if extra else tuple(tensor.shape)
        sharding = NamedSharding(mesh, _spec(dim))
        return _struct(sizes, dtype, lines(sharding) if whole else sharding)

    def shapes(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[jax.ShapeDtypeStruct]:
        return [shape(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]

    rates_at, batch_at = captured.num_state, captured.num_state + captured.num_rates
    rates = captured.example[rates_at:batch_at]
    batch = captured.example[batch_at : batch_at + captured.num_batch]
    key = jax.eval_shape(lambda: jax.random.key(0))
    return (
        list(map(shape, captured.example[:rates_at], cuts.state, cuts.extra, cuts.lines or [False] * rates_at)),
        shapes(rates, [None] * len(rates)),
        shapes(batch[: len(batch) - given], cuts.batch[: len(batch) - given]),
        shapes(captured.constants, [None] * len(captured.constants)),
        _struct(key.shape, key.dtype, NamedSharding(mesh, _spec(None))),
    )


def _results(arguments: tuple[Any, ...], mesh: Mesh) -> Any:
    """Return where results live: new state where the old is, or the next step could not take it; outputs wherever."""
    return [each.format for each in arguments[0]], None, NamedSharding(mesh, _spec(None))


def _struct(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | Format) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _spec(dim: int | None) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS)  # type: ignore[no-untyped-call]


def _local_bytes(argument: jax.ShapeDtypeStruct) -> int:
    assert argument.sharding is not None, "every argument is given one"  # noqa: S101
    return int(math.prod(argument.sharding.shard_shape(argument.shape)) * argument.dtype.itemsize)


def _costs(total: dict[str, float], text: str, hlo: HloText) -> dict[str, Any]:
    """Return the costs of one step, with the bodies of loops counted as often as they turn."""
    flops, moved, seconds = total["flops"], total["bytes accessed"], total.get("optimal_seconds", 0.0)
    unestimated = math.ceil(-seconds) if seconds < 0 else 0
    seconds += unestimated  # each of them was entered as -1
    per_byte = seconds / max(moved, 1.0)
    runs = hlo.runs()
    for loop in hlo.loops():
        more = runs[loop.body] - 1
        if more > 0:
            body = _part_costs(with_entry(text, loop.body))
            flops, moved = flops + more * body["flops"], moved + more * body["bytes accessed"]
            seconds += more * per_byte * body["bytes accessed"]  # the part's analysis knows no times
    return {
        "flops": flops,
        "bytes_accessed": moved,
        "optimal_seconds": seconds or None,
        "unestimated": unestimated,
    }


def _part_costs(text: str) -> dict[str, float]:
    """Return XLA's own cost analysis of a program's text."""
    module = _hlo.hlo_module_from_text(text)
    found: dict[str, float] = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return found


@contextlib.contextmanager
def _in_words(target: Slice) -> Iterator[None]:
    """Say in plain words why the compiler refused."""
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        if (known := in_plain_words(str(error), target.name)) is not None:
            raise CompileError(known[0], remedy=known[1]) from error
        raise CompileError(
            f"XLA cannot compile the step for {target.name}: {type(error).__name__}: {_first_line(error)}",
            remedy="compile for the CPU (compile.backend: xla) to see whether the step itself is at fault",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
