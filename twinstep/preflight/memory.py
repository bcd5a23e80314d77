"""How much memory a step takes on one device, by category: state exactly, what lives within the step by a model.

The model's factors are fitted to the TPU compiler's own reports, and held to them over a grid: `scripts/bench
preflight` prints the error of each. On GPUs, which nothing here compiles for, the same values are counted as PyTorch's
backward pass keeps them; nobody has measured those.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.preflight.chips import Where
from twinstep.preflight.engines import TABLE_GRADIENTS, engine_bytes
from twinstep.preflight.parameters import Parameter
from twinstep.preflight.report import Part, Problem
from twinstep.preflight.shapes import DataShape
from twinstep.preflight.state import Held, batch_bytes
from twinstep.preflight.tiles import LANES
from twinstep.preflight.tokens import (
    Work,
    attention_is_fused,
    layers_are_fused,
    work_of,
)
from twinstep.spec.job import JobSpec
from twinstep.spec.model import DLRMSpec, DLRMv3Spec
from twinstep.spec.module import ModuleSpec

FLOAT = 4
FEW_DEVICES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """One device's memory."""

    parts: tuple[Part, ...]
    state: tuple[Held, ...]
    refused: tuple[Problem, ...] = ()
    """What the engine of tables cannot do."""
    besides_tables: int = 0
    """Bytes of the parts that are there whatever way tables are held: without their gradients, copies and buffers."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    def of(self, *names: str) -> int:
        """Return the bytes of parts by their names."""
        return sum(part.bytes for part in self.parts if part.name in names)


def memory_of(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...], where: Where) -> Memory:
    """Return the memory of a step of `spec`."""
    engine = engine_bytes(spec, shape, found, where)
    work = work_of(spec, shape, where)

    def of(*roles: str) -> int:
        return sum(each.bytes for each in engine.state if each.role in roles)

    values, scores = _within_budget(spec, _activations(spec, shape, work, where), _attention(spec, work))
    beside, gradients = _gradients(found, engine.parts, values + scores, where)
    _, alone = _gradients(found, (), values + scores, where)
    parts = (
        Part("dense parameters", of("parameter", "buffer"), "every parameter but tables, on each device"),
        Part("dense optimizer", of("optimizer"), _words(spec.optimizers.dense.kind, split=where.devices > 1)),
        Part("tables", of("table"), engine.words),
        Part("table optimizer", of("table optimizer"), spec.optimizers.sparse.kind),
        *beside,
        Part("batch", batch_bytes(spec, shape, where), f"{work.rows} rows of {spec.data.batch_size}"),
        Part("activations", values, "values that the backward pass reads"),
        Part("attention", scores, "scores, where attention is no kernel"),
        Part("gradients", gradients, "and new parameters, as far as activations leave them no room"),
        Part(
            "table copy", _table_copy(spec, engine.state, values + scores, where), "whole rows of lanes, of one table"
        ),
        *_update(engine.update - values - scores),
        Part("program", _program(spec, shape, work, where, spec.embedding.engine), "the program's own code"),
    )
    by_tables = {
        "tables",
        "table optimizer",
        "table copy",
        "rows of an update",
        "gradients",
        "program",
        *(part.name for part in beside),
    }
    others = sum(part.bytes for part in parts if part.name not in by_tables)
    others += alone + _program(spec, shape, work, where, "dense")  # the most that a table's code takes in any engine
    return Memory(parts=parts, state=engine.state, refused=engine.refused, besides_tables=others)


def _update(more: int) -> tuple[Part, ...]:
    """Return the part of rows on their way into a table, where they take more than the activations that they follow."""
    return (Part("rows of an update", more, "of one table, when activations are over"),) if more > 0 else ()


def _within_budget(spec: JobSpec, values: int, scores: int) -> tuple[int, int]:
    """Return activations and scores as `compile.memory_budget_mib` leaves them: others are computed again."""
    if spec.compile.memory_budget_mib is None:
        return values, scores
    budget = spec.compile.memory_budget_mib << 20
    kept = min(values, budget)
    return kept, min(scores, budget - kept)


def _words(kind: str, *, split: bool) -> str:
    return f"{kind}, its larger tensors split over the devices" if split else kind


def _gradients(
    found: tuple[Parameter, ...], parts: tuple[Part, ...], values: int, where: Where
) -> tuple[tuple[Part, ...], int]:
    """Return an engine's parts but for tables' gradients, and the bytes of gradients that live beside activations.

    XLA gives the room of values that nobody reads any more to gradients, and to the parameters that are gathered after
    the update; PyTorch keeps all gradients until the update.
    """
    dense = sum(each.count * FLOAT for each in found if each.role == "parameter")
    tables = sum(part.bytes for part in parts if part.name == TABLE_GRADIENTS)
    beside = tuple(part for part in parts if part.name != TABLE_GRADIENTS)
    if where.kind != "tpu":
        return beside, dense + tables
    return beside, max(0, max(2 * dense, dense + tables) - values)


def _activations(spec: JobSpec, shape: DataShape, work: Work, where: Where) -> int:
    model = spec.model
    lookups = work.looked_up * max(len(shape.item_features), 1) * model.embedding_dim
    if where.kind == "tpu" and spec.embedding.engine == "sparsecore":
        lookups = 0  # SparseCores sum bags themselves, and what they give is a part of its own
    if isinstance(model, DLRMSpec):
        return FLOAT * (lookups + work.rows * _dlrm_values(model, shape))
    if isinstance(model, ModuleSpec):
        return FLOAT * lookups  # what it computes of them, nobody knows before it is compiled
    stream = work.tokens * model.transducer_dim
    layers = model.num_layers * _layer_values(spec, model, work, where)
    ends = work.tokens * 4 * model.hidden_dim + work.candidates * 4 * model.transducer_dim + 3 * stream
    return FLOAT * (lookups + layers + (0 if _ends_are_fused(spec, work, where) else ends))


def _ends_are_fused(spec: JobSpec, work: Work, where: Where) -> bool:
    """Say whether what stands before and after the layers is over, in kernels, when the layers' own values are most.

    Of layers that are one kernel each too little is kept for that. A rule of libtpu's reports, as `_padding` is: a ring
    of more than four devices keeps about as much again.
    """
    few = where.devices <= FEW_DEVICES and spec.embedding.engine == "ring"
    open_layers = where.kind == "tpu" and attention_is_fused(spec) and not layers_are_fused(spec, work)
    return open_layers and (few or spec.embedding.engine == "sparsecore")


def _layer_values(spec: JobSpec, model: DLRMv3Spec, work: Work, where: Where) -> int:
    """Return the numbers of one layer that its backward pass reads."""
    stream = work.tokens * model.transducer_dim
    if where.kind == "tpu" and layers_are_fused(spec, work):
        return stream
    heads = model.num_heads
    wide = 2 * heads * (model.linear_dim + model.attention_dim) + 4 * heads * model.linear_dim
    return 2 * stream + work.tokens * wide + _padding(spec, model, work, where)


def _padding(spec: JobSpec, model: DLRMv3Spec, work: Work, where: Where) -> int:
    """Return the numbers that a step on more than four devices keeps more, for a kernel of attention alone.

    As many as queries, keys, values and what comes of them have of a row's slots in whole blocks of lanes beyond its
    tokens. A rule of libtpu's reports: those of four devices take none of it, those of 8 to 256 about as much.
    """
    few = where.kind != "tpu" or where.devices <= FEW_DEVICES
    if few or not work.aligned or not attention_is_fused(spec):
        return 0
    added = work.rows * (work.slots + -work.slots % LANES) - work.tokens
    return max(0, added) * 2 * model.num_heads * (model.linear_dim + model.attention_dim)


def _dlrm_values(model: DLRMSpec, shape: DataShape) -> int:
    vectors = len(shape.bags) + 1
    crossed = vectors * model.embedding_dim
    hidden = sum(model.bottom_dims) + sum(model.over_dims) + model.embedding_dim
    if model.interaction == "dot":
        return hidden + crossed + vectors * vectors
    return hidden + crossed + model.num_cross_layers * (2 * crossed + model.cross_rank)


def _attention(spec: JobSpec, work: Work) -> int:
    model = spec.model
    if not isinstance(model, DLRMv3Spec) or attention_is_fused(spec):
        return 0
    scores = work.rows * model.num_heads * work.slots**2
    return FLOAT * scores * (model.num_layers + 4)


CODE = 6 << 20
CODE_OF_TABLE, CODE_OF_SPARSE_TABLE = 1400 << 10, 64 << 10
CODE_OF_LAYER, CODE_OF_OPEN_LAYER, CODE_OF_PLAIN_LAYER = 3 << 20, 8 << 20, 25 << 20
"""Bytes of the program, and how many more for each table, of the step's own or on SparseCores, and for each layer: one
kernel, a kernel for attention alone, or none. Fitted; the kept reports of open layers are of 9 to 22 MB in all."""


def _program(spec: JobSpec, shape: DataShape, work: Work, where: Where, engine: str) -> int:
    """Return what a TPU's program takes itself."""
    if where.kind != "tpu":
        return 0
    layers = spec.model.num_layers if isinstance(spec.model, DLRMv3Spec) else 0
    open_layer = CODE_OF_OPEN_LAYER if attention_is_fused(spec) else CODE_OF_PLAIN_LAYER
    layer = CODE_OF_LAYER if layers_are_fused(spec, work) else open_layer
    table = CODE_OF_SPARSE_TABLE if engine == "sparsecore" else CODE_OF_TABLE
    return CODE + table * len(shape.tables) + layer * layers


COPIES_OF_UPDATE = 2.5
"""Whole copies of a small table that a row-wise rule on SparseCores' tables has live, in whole lanes.

The table, its new rows, and rows on their way. Activations are over by then. Held to libtpu's reports of whole steps,
and never under one: tests/unit/preflight/test_sparsecore_reports.py."""


def _table_copy(spec: JobSpec, state: tuple[Held, ...], values: int, where: Where) -> int:
    """Return what copies of the widest table that a TPU's step copies take; others follow one another.

    SparseCores update rows where they lie, and so does the TensorCore, which a row-wise rule runs on, in lines; where a
    step may name more rows than that is worth for, their table is copied into whole lanes, and back
    (`sparsecore_memory.in_lines`; held by tests/unit/embedding/test_sparsecore_tpu.py). Those copies have the room of
    `values`, which only the backward pass reads.
    """
    width = spec.model.embedding_dim
    if where.kind != "tpu":
        return 0
    rows = [each.bytes // (width * FLOAT) for each in state if each.copied]
    copy = max(rows, default=0) * (width + -width % LANES) * FLOAT
    if spec.embedding.engine != "sparsecore":
        return copy
    return max(0, int(COPIES_OF_UPDATE * copy) - values)
