"""How embedding tables are kept and worked on: the engine, and what the SparseCore engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import INT32_MAX, MAX_TABLES, Count, FieldName, Number, Spec
from twinstep.spec.devices import accelerator_of, devices_of, named
from twinstep.spec.sparsecore import GENERATIONS, SparseCoreFlags

Limit = Annotated[StrictInt, Field(ge=1, le=INT32_MAX)]


Sharding = Literal["auto", "table_wise", "row_wise", "column_wise", "data_parallel"]
FUSED = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers of divided tables: FBGEMM runs them fused with the backward pass."""
FUSED_ON_GPUS = (*FUSED, "adam")
"""Those that it has for GPUs. Its Adam touches the rows that a batch names; it has not been run here."""


Said = dict[str, Any]
"""Of a fault between fields: what its message and its remedy are made from."""


class TableLimits(Spec):
    """The most that one partition of a table may hold: what one SparseCore asks of another one in a step."""

    max_ids: Limit
    """max_ids_per_partition: (id, sample) pairs, after de-duplication within a sample."""
    max_unique: Limit
    """max_unique_ids_per_partition: different ids."""


class LimitsSpec(Spec):
    """Where the limits of partitions come from."""

    tables: Annotated[dict[FieldName, TableLimits], Field(max_length=MAX_TABLES)] = Field(default_factory=dict)
    """With `source: given`: the limits of every table; tables that share a stack have the sum."""
    source: Annotated[Literal["fdo", "data", "given"], Field(validate_default=True)] = "fdo"
    """`fdo`: from the first batches, then they follow what steps ask for; `data`: from the first batches, and stay;
    `given`: from `tables`."""
    batches: Annotated[StrictInt, Field(ge=1, le=1000)] = 8
    """With `fdo` and `data`: batches of training data that the first limits come from."""
    headroom: Annotated[Number, Field(ge=1, le=1000)] = 1.25
    """With `fdo` and `data`: times what was asked for."""
    quantile: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """With `fdo`: share of the batches that limits hold for; `overflow` says what becomes of the others."""
    every_steps: Count = 100
    """With `fdo`: steps between two looks at the limits."""

    @field_validator("source")
    @classmethod
    def _tables_go_with_given(cls, value: str, info: ValidationInfo) -> str:
        tables = info.data.get("tables")  # not there where they are not valid themselves
        if tables is None or bool(tables) == (value == "given"):
            return value
        if tables:
            problem, said = "looks at no tables", {"allowed": "given, or tables: {}", "nearest": "given"}
        else:
            problem, said = "needs the limits of every table", {"allowed": "fdo, data, or tables", "nearest": "fdo"}
        raise PydanticCustomError("between_fields", problem, said)


class QuantizeSpec(Spec):
    """Simulated quantization: rows are rounded as they are looked up; what is stored stays float32."""

    low: Number
    """The least value."""
    high: Number
    """The greatest value."""
    num_buckets: Annotated[StrictInt, Field(ge=2, le=65536)] = 256
    """Values from `low` to `high`."""

    @field_validator("high")
    @classmethod
    def _above_low(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low")
        if low is not None and value <= low:
            said = {"allowed": f"more than {low:g}, which is low", "nearest": low + 1}
            raise PydanticCustomError("between_fields", "is not above low", said)
        return value


class EmbeddingSpec(Spec):
    """How tables are kept."""

    engine: Literal["dense", "ring", "sparsecore", "torchrec"] = "dense"
    """`dense`: tables looked up by gather, large ones split by rows; `ring`: every table split by rows, ids and rows
    passed around a ring of devices; `sparsecore`: tables stacked and split by rows, looked up and updated by
    SparseCores, on a CPU by the same algorithm in plain JAX; `torchrec`: tables divided over processes, which share a
    batch's rows out, and updated within the backward pass. Where none is given, a TPU has ring, if the optimizer of
    tables leaves rows that a step does not name alone."""
    init_std: Annotated[Number, Field(gt=0)] = 0.05
    """Standard deviation of the normal that tables start from."""
    pipeline: Literal["off", "full"] = "off"
    """`full`: the lookup of the next batch and the update from the last run beside the dense work of this one, so that
    a lookup lacks one update."""
    limits: LimitsSpec = LimitsSpec()
    """Limits of partitions."""
    overflow: Literal["error", "drop", "minibatch"] = "minibatch"
    """A batch over its limits: end the run; drop what does not fit, counted; or split it, with unchanged results."""
    disable_table_stacking: StrictBool = False
    """Keep every table in a stack of its own."""
    stacks: tuple[tuple[FieldName, ...], ...] | None = None
    """Tables that share a stack, group by group; null: those of equal width, optimizer and combiner, within bounds."""
    id_bound_check: Literal["error", "drop", "wrap"] = "error"
    """Ids that name no row of their table: end the run; leave them out; or take them modulo the rows; counted."""
    quantize: QuantizeSpec | None = None
    """Round rows as they are looked up, as a quantized table would; null: not."""
    sharding: Annotated[dict[FieldName, Sharding], Field(max_length=MAX_TABLES)] = Field(default_factory=dict)
    """How a table is divided over processes, by its name; `auto`, by its size, for those that are not named."""
    overlap: StrictBool = True
    """Send the next batch's ids to where their rows are while a step runs; no result depends on it."""
    sparsecore: SparseCoreFlags | None = None
    """Switches of a TPU's SparseCores, put into the environment of its pods; null: libtpu's own defaults."""

    @field_validator(
        "pipeline", "limits", "overflow", "disable_table_stacking", "stacks", "id_bound_check", "quantize", mode="after"
    )
    @classmethod
    def _engine_looks_at_it(cls, value: Any, info: ValidationInfo) -> Any:
        engine, default = info.data.get("engine"), cls.__pydantic_fields__[info.field_name or ""].default
        if engine is not None and engine != "sparsecore" and value != default:
            nearest = default.model_dump(mode="json") if isinstance(default, Spec) else default
            said = {"engine": engine, "allowed": "the default, or engine: sparsecore", "nearest": nearest}
            raise PydanticCustomError("between_fields", "has no effect with engine: {engine}", said)
        return value

    @field_validator("sharding", "overlap")
    @classmethod
    def _tables_are_divided(cls, value: Any, info: ValidationInfo) -> Any:
        engine = info.data.get("engine")  # not there where it is not valid itself
        default: Any = True if info.field_name == "overlap" else {}
        if engine is not None and engine != "torchrec" and value != default:
            said = {"engine": engine, "allowed": "the default, or engine: torchrec", "nearest": default}
            raise PydanticCustomError("between_fields", "has no effect with engine: {engine}", said)
        return value

    @field_validator("stacks")
    @classmethod
    def _named_once(
        cls, value: tuple[tuple[str, ...], ...] | None, info: ValidationInfo
    ) -> tuple[tuple[str, ...], ...] | None:
        if value is None:
            return value
        if info.data.get("disable_table_stacking"):
            said = {"allowed": "null", "nearest": None}
            raise PydanticCustomError("between_fields", "has no effect with disable_table_stacking: true", said)
        names = [name for group in value for name in group]
        if len(set(names)) < len(names) or not all(value):
            problem = "names a table twice" if all(value) else "holds a group without tables"
            said = {"allowed": "groups of tables, each table once", "nearest": None}
            raise PydanticCustomError("between_fields", problem, said)
        return value


def engine_on_tpu(data: Mapping[str, Any]) -> str:
    """Return the engine of a TPU's spec that names none, from its fields as they were given.

    A ring updates a row where it lies, and only rows that a step names. An optimizer that moves all of them wants
    tables that the devices divide, and so does a step without row updates: those keep dense tables. So does a device
    that is alone: it has nobody to pass rows to.
    """
    sparse, compiler, accelerator = named(data.get("optimizers"), "sparse"), data.get("compile"), accelerator_of(data)
    strategies = named(compiler, "strategies")
    still = not named(sparse, "momentum") and not named(sparse, "weight_decay")
    quiet = named(sparse, "kind") in (None, *FUSED) and still
    by_rows = not isinstance(strategies, list | tuple) or "sparse_embedding" in strategies
    alone = accelerator is not None and devices_of(accelerator) == 1
    return "ring" if quiet and by_rows and not alone and named(compiler, "backend") in (None, "xla") else "dense"


def not_this_engine(problem: str, allowed: str) -> Said:
    """Return what a fault says where an engine cannot run a spec: why, and what else would do beside `dense`."""
    return {"part": "engine", "problem": problem, "allowed": f"dense, or {allowed}", "nearest": "dense"}


def ring_problem(embedding: EmbeddingSpec, compiler: Any, accelerator: Any) -> Said | None:
    """Return why engine ring cannot run a spec of these parts, of which those that are not valid are None."""
    if embedding.engine != "ring" or None in (compiler, accelerator):
        return None
    problem, allowed = "", ""
    if compiler.backend != "xla":
        problem, allowed = f"needs compile.backend: xla, not {compiler.backend}", "compile.backend: xla"
    elif accelerator.kind == "cpu" and accelerator.devices == 1:
        problem, allowed = "needs devices to pass rows to", "accelerator.devices of 2 or more"
    return not_this_engine(problem, allowed) if problem else None


def sparsecore_problem(embedding: EmbeddingSpec, compiler: Any, accelerator: Any, optimizers: Any) -> Said | None:
    """Return why engine sparsecore cannot run a spec of these parts, of which those that are not valid are None."""
    if embedding.engine != "sparsecore" or None in (compiler, accelerator, optimizers):
        return None
    sparse = optimizers.sparse
    problem, allowed = "", ""
    if compiler.backend != "xla":
        problem, allowed = f"does not run on the {compiler.backend} backend", "compile.backend: xla"
    elif sparse.kind == "adamw":
        problem, allowed = "has no adamw for tables", "optimizers.sparse.kind: adam, adagrad, rowwise_adagrad, sgd"
    elif sparse.momentum:
        problem, allowed = "has no momentum of sgd for tables", "optimizers.sparse.momentum: 0"
    elif accelerator.kind == "tpu" and accelerator.generation not in GENERATIONS:
        problem = f"has no SparseCores on a {accelerator.generation}"
        allowed = f"a TPU of generation {', '.join(GENERATIONS)}"
    return not_this_engine(problem, allowed) if problem else None


def divided_problem(embedding: EmbeddingSpec, compiler: Any, accelerator: Any, optimizers: Any) -> Said | None:
    """Return why engine torchrec cannot run a spec of these parts, of which those that are not valid are None."""
    if embedding.engine != "torchrec" or None in (compiler, accelerator, optimizers):
        return None
    sparse = optimizers.sparse
    problem, allowed = "", ""
    if compiler.backend == "xla" or accelerator.kind == "tpu":
        problem, allowed = "does not run on the xla backend", "compile.backend: inductor or eager"
    elif sparse.momentum or sparse.weight_decay:
        problem = "has neither momentum nor weight decay for tables"
        allowed = "optimizers.sparse.momentum: 0 and weight_decay: 0"
    elif sparse.kind == "adamw":
        problem, allowed = "has no adamw for tables", "optimizers.sparse.kind: adagrad, rowwise_adagrad, sgd"
    return not_this_engine(problem, allowed) if problem else None


def rewind_problem(on_nan: str, embedding: EmbeddingSpec | None) -> Said | None:
    """Return why a run with these tables cannot go back before a bad batch; None as tables: they are not valid."""
    if on_nan == "stop" or embedding is None or embedding.pipeline == "off":
        return None
    allowed = "stop, or embedding.pipeline: off"
    return {"part": "on_nan", "problem": "changes what pipeline: full computes", "allowed": allowed, "nearest": "stop"}


def processes_problem(processes: int, embedding: EmbeddingSpec | None, accelerator: Any) -> Said | None:
    """Return why a spec cannot have several processes on one machine; parts that are not valid are None."""
    if processes == 1 or embedding is None or accelerator is None:
        return None
    problem = ""
    if accelerator.kind != "cpu":
        problem = f"a cpu; a {accelerator.kind} has processes of its own"
    elif embedding.engine != "torchrec":
        problem = "embedding.engine: torchrec"
    return {"part": "processes", "problem": problem, "allowed": "1", "nearest": 1} if problem else None
