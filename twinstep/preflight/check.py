"""The door: will a spec fit on the devices it asks for, how fast could it be, and what would make it fit.

Every change that is offered was put into the spec and tried by the same model; what does not fit is not offered.
"""

from __future__ import annotations

from twinstep.preflight.changes import Budget, changes_for
from twinstep.preflight.chips import where
from twinstep.preflight.model import Modelled, modelled
from twinstep.preflight.parameters import TABLES
from twinstep.preflight.report import Change, Preflight, Problem
from twinstep.preflight.roofline import copied_bytes, step_time
from twinstep.preflight.shapes import rows_field
from twinstep.preflight.tiles import LANES
from twinstep.preflight.words import gib
from twinstep.spec.accelerator import GpuSpec
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.module import ModuleSpec
from twinstep.spec.table_names import table_name
from twinstep.spec.topology import GIB, GPUS

MAX_CHANGES = 6
MAX_TOLD = 8  # tables that are too large, of which each is a fault of its own
MAX_TRIED = 120  # specs that are put together to find changes
SECONDS_OF_A_SUBMIT = 0.04  # of processor time for that, which a control plane has for others too
COPIES_TOLD = 256 << 20  # bytes that copies of tables move in a step, from which it is worth a word


def preflight(spec: JobSpec, *, seconds: float | None = None) -> Preflight:
    """Return what a spec would take of each device, whether it fits, and the least time of a step.

    Args:
        seconds: of processor time, after which no further change is tried; None: all are.
    """
    return _answer(spec, modelled(spec), seconds)


def _answer(spec: JobSpec, found: Modelled, seconds: float | None) -> Preflight:
    problems, warnings = judged(spec, found)
    changes: tuple[Change, ...] = ()
    if problems or warnings:
        budget = Budget(tried, calls=MAX_TRIED, seconds=seconds)
        changes = changes_for(spec, budget, activations=found.memory.of("activations", "attention"))
    return Preflight(
        fits=not problems,
        accelerator=found.where.name,
        devices=found.where.devices,
        engine=spec.embedding.engine,
        parameters=sum(each.count for each in found.parameters if each.role != "buffer"),
        table_rows=sum(table.rows for table in found.shape.tables),
        parts=found.memory.parts,
        hbm=found.memory.total,
        limit=found.where.memory,
        step=step_time(spec, found.shape, found.memory, found.where),
        problems=problems,
        warnings=warnings,
        changes=changes[:MAX_CHANGES],
        notes=_notes(spec, found),
    )


def tried(spec: JobSpec) -> int | None:
    """Return the bytes of one device where a spec fits; None where something speaks against it."""
    found = modelled(spec)
    return None if any(judged(spec, found)) else found.memory.total


def check_fits(spec: JobSpec) -> tuple[Problem, ...]:
    """Raise unless a spec fits, or its user wants to be warned only (`debug.preflight: warn`); return the warnings.

    Raises:
        SpecError: it does not; the faults have the numbers that broke, the remedy the nearest change that fits.
    """
    if where(spec).facts is None:
        return ()
    known = modelled(spec)
    problems, warnings = judged(spec, known)
    if not problems or spec.debug.preflight == "warn":
        return (*problems, *warnings)
    found = _answer(spec, known, SECONDS_OF_A_SUBMIT)
    remedy = found.changes[0].text if found.changes else "no single change makes it fit: twinstep preflight SPEC"
    raise SpecError(
        f"the job cannot run on {found.accelerator}: {found.problems[0].problem}",
        remedy=remedy,
        faults=tuple(
            Fault(
                field=each.field,
                problem=each.problem,
                given=each.given,
                allowed=each.allowed,
                remedy="; or ".join(change.text for change in _of(each, found.changes)) or remedy,
            )
            for each in found.problems
        ),
    )


def _of(problem: Problem, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return changes of the very field, or of one that it is a part of, where there are any, else all."""
    mine = tuple(each for each in changes if any(f"{problem.field}.".startswith(f"{name}.") for name in each.fields))
    return (mine or changes)[:3]


def judged(spec: JobSpec, found: Modelled) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Return what speaks against a spec, the first cause first, and what may: of that too little was measured."""
    certain = _engine(spec)
    memory = _memory(spec, found)
    if _is_sure(spec, found):
        return (*certain, *memory), ()
    return tuple(certain), (*memory, *_hosts(spec, found))


def _is_sure(spec: JobSpec, found: Modelled) -> bool:
    """Return whether a step takes too much of a TPU even where the model is as wrong as it may be."""
    limit, margin = found.where.memory, MARGINS.get(spec.embedding.engine)
    if found.where.kind != "tpu" or limit is None or margin is None:
        return False
    return found.memory.of(*STATE) > limit or found.memory.total > limit * margin


MARGINS = {"dense": 1.0, "ring": 1.5}
"""Engines whose memory on TPUs was held to the compiler's reports, and how many times a device's memory a step has to
take for a refusal. Rings were held to no report since their rows lie in lines: their margin is meant to be more than
the model's error."""
STATE = ("dense parameters", "dense optimizer", "tables", "table optimizer")
"""Parts that follow from the spec exactly."""


def _engine(spec: JobSpec) -> list[Problem]:
    """Return the problem of GPUs without the one engine that a worker runs on them."""
    engine = spec.embedding.engine
    if spec.accelerator.kind != "gpu" or engine == "torchrec":
        return []
    return [Problem("embedding.engine", f"the engine {engine} does not run on GPUs", engine, "torchrec")]


def _memory(spec: JobSpec, found: Modelled) -> list[Problem]:
    limit = found.where.memory
    if limit is None:
        return []
    problems = _too_large(spec, found, limit)
    if not problems and found.memory.total > limit:
        problems.append(_over(spec, found, limit))
    return [*problems, *found.memory.refused]


def _too_large(spec: JobSpec, found: Modelled, limit: int) -> list[Problem]:
    """Return a problem for each table that all devices together could not hold, the largest few of them."""
    whole = _whole(found)
    room, place = limit * found.where.devices, found.where
    tables = [table for table in found.shape.tables if whole[table.name] > room]
    return [
        Problem(
            rows_field(spec.data, table.name),
            f"the table {table.name} of {table.rows:,} rows takes {gib(whole[table.name])}, and all "
            f"{place.devices:,} devices of {place.name} together have {gib(room)}",
            f"{table.rows}",
            f"at most {room // max(whole[table.name] // max(table.rows, 1), 1):,} rows, less what else there is",
        )
        for table in sorted(tables, key=lambda table: -table.rows)[:MAX_TOLD]
    ]


def _whole(found: Modelled) -> dict[str, int]:
    """Return the bytes of each whole table, by its name."""
    return {
        table_name(each.name.removeprefix(TABLES).removesuffix(".weight")): each.whole
        for each in found.memory.state
        if each.role == "table"
    }


def _over(spec: JobSpec, found: Modelled, limit: int) -> Problem:
    largest = max(found.memory.parts, key=lambda part: part.bytes)
    rows = largest.name == "tables"
    return Problem(
        _rows_of_largest(spec, found) if rows else FIELDS[largest.name],
        f"a step takes {gib(found.memory.total)} of each device of {found.where.name}, which has {gib(limit)}; "
        f"most of it: {largest.name}, {gib(largest.bytes)}",
        gib(found.memory.total),
        f"at most {gib(limit)}",
    )


def _rows_of_largest(spec: JobSpec, found: Modelled) -> str:
    return rows_field(spec.data, max(found.shape.tables, key=lambda table: table.rows).name)


def _hosts(spec: JobSpec, found: Modelled) -> list[Problem]:
    """Return the problem of hosts whose processes keep whole tables, which engine torchrec's do on GPUs."""
    asked = spec.accelerator
    if not isinstance(asked, GpuSpec) or spec.embedding.engine != "torchrec":
        return []
    machine = GPUS[asked.model].machine
    processes, room = min(asked.count, machine.accelerators), machine.memory_gib * GIB
    taken = sum(_whole(found).values()) * processes
    if taken <= room:
        return []
    return [
        Problem(
            _rows_of_largest(spec, found),
            f"each of {processes} processes of a host keeps whole tables in its memory: {gib(taken)}, and "
            f"{machine.name} has {gib(room)}",
            gib(taken),
            f"at most {gib(room)}",
        )
    ]


FIELDS = {
    "dense parameters": "model",
    "dense optimizer": "optimizers.dense.kind",
    "tables": "data.rows",
    "table optimizer": "optimizers.sparse.kind",
    "ring buffers": "data.batch_size",
    "SparseCore buffers": "embedding.limits",
    "SparseCore activations": "data.batch_size",
    "SparseCore stack": "embedding.limits",
    "batch": "data.batch_size",
    "activations": "data.batch_size",
    "attention": "data.batch_size",
    "gradients": "model",
    "table copy": "model.embedding_dim",
    "program": "model",
}
"""The field of a spec that most decides a category; of tables, where `rows_field` does not say more."""


def _notes(spec: JobSpec, found: Modelled) -> tuple[str, ...]:
    notes = [] if not isinstance(spec.model, ModuleSpec) else [_of_module(spec.model)]
    if unknown := found.shape.unknown:
        notes.append(
            f"rows of {', '.join(unknown)} are not known before the data is read, and count as none: "
            f"data.rows.{unknown[0]} says how many"
        )
    guessed = [table.name for table in found.shape.tables if table.rows and not table.exact]
    if guessed:
        notes.append(f"rows of {', '.join(guessed)} are the most there can be; the data decides")
    if (copied := copied_bytes(spec, found.memory, found.where)) >= COPIES_TOLD:
        notes.append(
            f"rows of {spec.model.embedding_dim} floats are no whole lanes of {LANES}: a step copies its tables, "
            f"{gib(copied)} moved a device; a model.embedding_dim of {-(-spec.model.embedding_dim // LANES) * LANES} "
            "spares that"
        )
    if found.where.kind == "tpu" and spec.embedding.engine == "sparsecore":
        notes.append("memory of the SparseCore engine was held to the compiler's word on few specs; --aot asks it")
    if found.where.kind == "gpu":
        notes.append("memory on GPUs is counted, and was held to no measurement")
    return tuple(notes)


def _of_module(model: ModuleSpec) -> str:
    """Return what of a user's own module is counted, and what is not."""
    counted = "no other parameter (model.dense_parameters says how many)"
    if model.dense_parameters is not None:
        counted = f"{model.dense_parameters:,} parameters outside them, as model.dense_parameters says"
    return (
        f"of {model.factory} are counted: a table for each that the data needs, looked-up rows, {counted}; "
        "neither its activations nor its products are: --aot compiles the very step"
    )
