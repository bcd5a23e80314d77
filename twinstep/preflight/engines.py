"""What embedding engines take of a device: one row each. `memory.py` adds it to the rest of a step.

`dense` is the compiled step's own: whole tables on each device, or their rows split by `spec/placement.py`. `ring` has
an equal share of rows on each device, and passes ids and partial rows around. `sparsecore` has padded shares on the
SparseCores, buffers at the limits of partitions, and the compiler's stacks: `spec/sparsecore_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from twinstep.preflight.chips import Where
from twinstep.preflight.frequency import different_rows
from twinstep.preflight.parameters import Parameter
from twinstep.preflight.report import Part, Problem
from twinstep.preflight.shapes import DataShape
from twinstep.preflight.state import Held, dense_tables, held, is_quiet, slots_of
from twinstep.preflight.tiles import LANES, is_copied, line_bytes, tiled_bytes
from twinstep.preflight.tokens import SPARSE_ROWS_PER_ID, batch_ids, batch_samples
from twinstep.preflight.words import gib
from twinstep.spec.job import JobSpec
from twinstep.spec.placement import is_line
from twinstep.spec.sparsecore import GENERATIONS
from twinstep.spec.sparsecore_memory import ROW_ALIGN, DeviceBytes, Generation, StackShape, device_bytes, in_lines
from twinstep.spec.topology import TPUS

FLOAT = 4
TABLE_GRADIENTS = "table gradients"
"""Part of `dense`, which shares the room of activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBytes:
    """An engine's share of a device."""

    state: tuple[Held, ...]
    """All state of the step, tables as the engine holds them."""
    words: str
    """How it holds tables."""
    parts: tuple[Part, ...]
    """What it takes beside state, for tables' sake."""
    refused: tuple[Problem, ...] = ()
    """What it cannot do."""
    update: int = 0
    """Bytes of rows that are on their way into tables, when activations are over."""


def engine_bytes(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...], where: Where) -> EngineBytes:
    """Return what the spec's engine takes of a device."""
    return ENGINES[spec.embedding.engine](spec, shape, found, where)


def _dense(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...], where: Where) -> EngineBytes:
    state = held(spec, found, where)
    tables = [each for each in state if each.role == "table"]
    split = sum(each.split for each in tables)
    gradients = _gradients(spec, shape, tables, where)
    return EngineBytes(
        state=state,
        words=f"{split} of {len(tables)} split by rows, the others on each device",
        parts=(Part(TABLE_GRADIENTS, gradients, "of rows that a batch names, or of whole tables"),),
    )


def _gradients(spec: JobSpec, shape: DataShape, tables: list[Held], where: Where) -> int:
    """Return the bytes of tables' gradients: of rows, where a step updates rows, else of a table's size."""
    ids, quiet, width = batch_ids(spec, shape), is_quiet(spec), spec.model.embedding_dim
    total = 0
    for table, kept in zip(shape.tables, tables, strict=True):
        sparse = quiet and table.rows >= SPARSE_ROWS_PER_ID * ids[table.name]
        mine = ids[table.name] if kept.split else -(-ids[table.name] // where.devices)
        total += min(mine * width * FLOAT, kept.bytes) if sparse else kept.bytes
    return total


def _torchrec(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...], where: Where) -> EngineBytes:
    """Divided tables are updated within the backward pass, and have no gradient of their own size."""
    rest = held(spec, tuple(each for each in found if each.role != "table"), where)
    asked, ids = spec.optimizers.sparse, batch_ids(spec, shape)
    slots, _ = slots_of(asked)
    state, gradients, divided = list(rest), 0, 0
    tables = [each for each in found if each.role == "table"]
    for table, parameter in zip(shape.tables, tables, strict=True):
        whole = parameter.count * FLOAT
        kept = table.rows * FLOAT if asked.kind == "rowwise_adagrad" else whole * slots
        way = spec.embedding.sharding.get(table.name, "auto")
        split = where.devices > 1 and way != "data_parallel" and (way != "auto" or whole > SMALL_BYTES)
        parts = where.devices if split else 1
        divided += split
        state.append(Held(parameter.name, "table", whole, -(-whole // parts), split=split))
        if kept:
            state.append(Held(f"slots of {parameter.name}", "table optimizer", kept, -(-kept // parts), split=split))
        rows = -(-ids[table.name] // where.devices) * spec.model.embedding_dim * FLOAT
        gradients += min(rows, whole) if split else whole
    return EngineBytes(
        state=tuple(state),
        words=f"torchrec: {divided} of {len(tables)} divided, an even share; the others on each device",
        parts=(Part(TABLE_GRADIENTS, gradients, "of rows that a device looks up, of small tables whole"),),
    )


SMALL_BYTES = 1 << 20
"""Tables up to it are on every process; held by test to the engine's own."""


def _ring(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...], where: Where) -> EngineBytes:
    rest = held(spec, tuple(each for each in found if each.role != "table"), where)
    tables = [each for each in found if each.role == "table"]
    asked = spec.optimizers.sparse
    slots, _ = slots_of(asked)
    state, dense, copied = list(rest), dense_tables(spec, shape, found), is_copied(spec.model.embedding_dim)
    for table in tables:
        rows, width = -(-table.shape[0] // where.devices), table.shape[1]
        lined = is_line(width) and table.name not in dense
        mine, whole = (line_bytes if lined else tiled_bytes)((rows, width)), table.count * FLOAT
        state.append(Held(table.name, "table", whole, mine, split=True, copied=copied and not lined))
        if slots:
            state.append(Held(f"slots of {table.name}", "table optimizer", whole * slots, mine * slots, split=True))
        if asked.kind == "rowwise_adagrad":
            sums = table.shape[0] * FLOAT
            state.append(Held(f"sum of {table.name}", "table optimizer", sums, tiled_bytes((rows, 1)), split=True))
    ids = sum(batch_ids(spec, shape).values())
    mine = -(-ids // where.devices)
    lanes = spec.model.embedding_dim + -spec.model.embedding_dim % LANES
    passed = 2 * 2 * mine * (lanes + 1) * FLOAT  # two buffers each way, of ids and of rows
    return EngineBytes(
        state=tuple(state),
        words=f"ring: rows split over {where.devices} devices",
        parts=(Part("ring buffers", passed, "ids and rows on their way around the ring, twice"),),
    )


def _sparsecore(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...], where: Where) -> EngineBytes:
    generation = getattr(spec.accelerator, "generation", None)
    if generation not in GENERATIONS:
        return replace(_dense(spec, shape, found, where), words="on host processors, as on SparseCores")
    rest = held(spec, tuple(each for each in found if each.role != "table"), where)
    stacks = stack_shapes(spec, shape, where)
    slots, per_row = slots_of(spec.optimizers.sparse)[0], spec.optimizers.sparse.kind == "rowwise_adagrad"
    state = list(rest)
    for table, parameter, stack in zip(
        shape.tables, (each for each in found if each.role == "table"), stacks, strict=True
    ):
        whole = prod(parameter.shape) * FLOAT
        mine = device_bytes(generation, [replace(stack, slots=0)]).tables
        name = f"table {table.name}"
        stored = mine // FLOAT // (width := _up(parameter.shape[-1], ROW_ALIGN))
        lined = width == LANES or in_lines(stored, width, _named(generation, stack, stored))
        copied = per_row and not lined  # a row-wise rule runs on the TensorCore, which wants whole lanes
        state.append(Held(parameter.name, "table", whole, mine, split=True, copied=copied))
        if per_row:
            mine = tiled_bytes((stored, 1))
            state.append(Held(f"slots of {name}", "table optimizer", whole // parameter.shape[-1], mine, split=True))
        elif slots:
            state.append(Held(f"slots of {name}", "table optimizer", whole * slots, mine * slots, split=True))
    taken = device_bytes(generation, stacks)
    flags = spec.embedding.sparsecore
    serial = flags.serialized_tables if flags is not None else 0
    deepest = max((max(_stack(generation, each)) for each in stacks), default=0)
    deep = max(taken.forward, taken.backward) if serial < 2 else deepest
    parts = (
        Part("SparseCore buffers", 2 * taken.inputs, "ids of two batches at the limits of partitions"),
        Part("SparseCore activations", 2 * taken.activations, "of all features, and their gradients"),
        Part("SparseCore stack", deep, "of one table at a time" if serial > 1 else "the compiler's, of all tables"),
    )
    return EngineBytes(
        state=tuple(state),
        words=f"sparsecore: shares of {TPUS[generation].sparse_cores_per_device * where.devices} SparseCores, padded",
        parts=parts,
        refused=_tile(taken, where),
        update=_rows_updated(generation, stacks, [each for each in state if each.role == "table"]) * per_row,
    )


UPDATE_COPIES = 5
"""Of the rows that a row-wise update may be told of, in whole lanes; libtpu took 4.7 of them for v5p, 2 for v7x."""


def _named(generation: Generation, stack: StackShape, rows: int) -> int:
    """Return the rows that a device may be told to update: what each SparseCore may ask of each of its own.

    Args:
        generation: of the TPU.
        stack: its limits, for so many devices.
        rows: stored rows of the device.
    """
    cores = TPUS[generation].sparse_cores_per_device
    return cores * cores * stack.devices * max(1, min(stack.max_unique, rows // cores))


def _rows_updated(generation: Generation, stacks: Sequence[StackShape], tables: Sequence[Held]) -> int:
    """Return the bytes of the rows of one table on their way into it; tables follow one another."""
    found = [
        _named(generation, stack, table.bytes // (_up(stack.width, ROW_ALIGN) * FLOAT))
        * _up(stack.width, LANES)
        * FLOAT
        for stack, table in zip(stacks, tables, strict=True)
        if not table.copied
    ]
    return UPDATE_COPIES * max(found, default=0)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _stack(generation: Generation, stack: StackShape) -> tuple[int, int]:
    taken = device_bytes(generation, [stack])
    return taken.forward, taken.backward


def _tile(taken: DeviceBytes, where: Where) -> tuple[Problem, ...]:
    """Return the problem of a tile that does not hold what one stack asks of it."""
    limit = taken.tile_limit
    if limit is None or taken.tile <= limit:
        return ()
    return (
        Problem(
            "embedding.limits",
            f"one table asks {gib(taken.tile)} of each tile of a SparseCore of {where.name} at its limits, "
            f"which has {gib(limit)}",
            gib(taken.tile),
            f"at most {gib(limit)}: fewer samples a SparseCore, narrower rows, or lower limits",
        ),
    )


def stack_shapes(spec: JobSpec, shape: DataShape, where: Where) -> list[StackShape]:
    """Return each table as a stack of its own: what stacking adds is little, and never less than this."""
    generation: Generation = getattr(spec.accelerator, "generation", "v5p")
    cores = TPUS[generation].sparse_cores_per_device * where.devices
    ids, samples = batch_ids(spec, shape), batch_samples(spec, shape)
    slots = slots_of(spec.optimizers.sparse)[0]
    slots = 1 if spec.optimizers.sparse.kind == "rowwise_adagrad" else slots
    given = _given_limits(spec)
    found = []
    for table in shape.tables:
        per_core = -(-ids[table.name] // cores)
        most, unique = given.get(table.name) or _limits(per_core, table.rows, cores)
        stacked = max(-(-samples[table.name] // cores), 1)
        found.append(
            StackShape(
                rows=table.rows, width=spec.model.embedding_dim, samples_per_core=stacked, max_ids=most,
                max_unique=unique, devices=where.devices, slots=slots,
            )
        )  # fmt: skip
    return found


def _given_limits(spec: JobSpec) -> dict[str, tuple[int, int]]:
    limits = getattr(spec.embedding, "limits", None)
    tables = getattr(limits, "tables", {}) if limits is not None else {}
    return {name: (each.max_ids, each.max_unique) for name, each in tables.items()}


HEADROOM = 1.25  # of limits over what was seen; the spec's own default
SPREAD = 4.0  # standard deviations of a partition's ids over their mean


def _limits(per_core: int, rows: int, cores: int) -> tuple[int, int]:
    """Return limits of a partition that no statistics were taken for: its mean and some spread, with headroom."""
    different = different_rows(per_core, rows, 1.0)

    def limit(mean: float) -> int:
        return max(8, -(-int(HEADROOM * (mean + SPREAD * mean**0.5 + 1)) // 8) * 8)

    return limit(per_core / cores), limit(min(different, per_core) / cores)


ENGINES: dict[str, Callable[[JobSpec, DataShape, tuple[Parameter, ...], Where], EngineBytes]] = {
    "dense": _dense,
    "ring": _ring,
    "sparsecore": _sparsecore,
    "torchrec": _torchrec,
}
"""By `embedding.engine`."""
