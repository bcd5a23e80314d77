"""The door: will a spec fit on the devices it asks for, how fast could it be, and what would make it fit.

Every change that is offered was put into the spec and tried by the same model; what does not fit is not offered.
"""

from __future__ import annotations

from twinstep.preflight.changes import changes_for
from twinstep.preflight.chips import where
from twinstep.preflight.model import Modelled, modelled
from twinstep.preflight.parameters import TABLES
from twinstep.preflight.report import Change, Preflight, Problem
from twinstep.preflight.roofline import copied_bytes, step_time
from twinstep.preflight.tiles import LANES
from twinstep.preflight.words import gib
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec

MAX_CHANGES = 6
COPIES_TOLD = 256 << 20  # bytes that copies of tables move in a step, from which it is worth a word


def preflight(spec: JobSpec) -> Preflight:
    """Return what a spec would take of each device, whether it fits, and the least time of a step."""
    found = modelled(spec)
    problems = problems_of(spec, found)
    changes = changes_for(spec, tried) if problems else ()
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
        changes=changes[:MAX_CHANGES],
        notes=_notes(spec, found),
    )


def tried(spec: JobSpec) -> int | None:
    """Return the bytes of one device where a spec fits; None where something speaks against it."""
    found = modelled(spec)
    return None if problems_of(spec, found) else found.memory.total


def check_fits(spec: JobSpec) -> None:
    """Raise unless a spec fits, or its user wants to be warned only (`debug.preflight: warn`).

    Raises:
        SpecError: it does not; the faults have the numbers that broke, the remedy the nearest change that fits.
    """
    if where(spec).facts is None or spec.debug.preflight == "warn":
        return
    found = preflight(spec)
    if found.fits:
        return
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
    """Return changes of the very field, where there are any, else all."""
    mine = tuple(each for each in changes if problem.field in each.fields)
    return (mine or changes)[:3]


def problems_of(spec: JobSpec, found: Modelled) -> tuple[Problem, ...]:
    """Return what speaks against a spec, the first cause first."""
    place, size = found.where, spec.data.batch_size
    problems = []
    if spec.compile.backend == "xla" and size % place.devices:
        below, above = size // place.devices * place.devices, -(-size // place.devices) * place.devices
        problems.append(
            Problem(
                "data.batch_size",
                f"a batch of {size:,} does not divide over the {place.devices:,} devices of {place.name}",
                str(size),
                f"a multiple of {place.devices}: {f'{below} or ' if below else ''}{above}",
            )
        )
    limit = place.memory
    if limit is None:
        return tuple(problems)
    problems += list(_too_large(found, limit))
    if not any(each.field.startswith("data.rows") for each in problems) and found.memory.total > limit:
        problems.append(_over(found, limit))
    return (*problems, *found.memory.refused)


def _too_large(found: Modelled, limit: int) -> list[Problem]:
    """Return a problem for each table that all devices together could not hold."""
    whole = {
        each.name.removeprefix(TABLES).removesuffix(".weight"): each.whole
        for each in found.memory.state
        if each.role == "table"
    }
    room, place = limit * found.where.devices, found.where
    return [
        Problem(
            f"data.rows.{table.name}",
            f"the table {table.name} of {table.rows:,} rows takes {gib(whole[table.name])}, and all "
            f"{place.devices:,} devices of {place.name} together have {gib(room)}",
            f"{table.rows}",
            f"at most {room // max(whole[table.name] // max(table.rows, 1), 1):,} rows, less what else there is",
        )
        for table in found.shape.tables
        if whole[table.name] > room
    ]


def _over(found: Modelled, limit: int) -> Problem:
    largest = max(found.memory.parts, key=lambda part: part.bytes)
    return Problem(
        FIELDS.get(largest.name, "model"),
        f"a step takes {gib(found.memory.total)} of each device of {found.where.name}, which has {gib(limit)}; "
        f"most of it: {largest.name}, {gib(largest.bytes)}",
        gib(found.memory.total),
        f"at most {gib(limit)}",
    )


FIELDS = {
    "tables": "data.rows",
    "table optimizer": "optimizers.sparse.kind",
    "gradients": "model",
    "batch": "data.batch_size",
    "activations": "data.batch_size",
    "attention": "data.batch_size",
    "table copy": "model.embedding_dim",
    "dense optimizer": "optimizers.dense.kind",
}
"""The field of a spec that most decides a category."""


def _notes(spec: JobSpec, found: Modelled) -> tuple[str, ...]:
    notes = []
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
        notes.append("memory of the SparseCore engine was held to one report alone; --aot asks the compiler")
    if found.where.kind == "gpu":
        notes.append("memory on GPUs is counted, and was held to no measurement")
    return tuple(notes)
