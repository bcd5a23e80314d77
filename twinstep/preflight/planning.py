"""From a spec to its plan of tables: what they are asked for, and the room that the rest of the step leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinstep.preflight.chips import where
from twinstep.preflight.frequency import fitted_exponent
from twinstep.preflight.model import modelled
from twinstep.preflight.roofline import zipf_of
from twinstep.preflight.sharding import Room, TablePlan, TableUse, Way, plan_tables
from twinstep.preflight.state import is_quiet, slots_of
from twinstep.preflight.tokens import batch_ids
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.sparsecore import GENERATIONS
from twinstep.spec.topology import TPUS

WAYS: Mapping[str, tuple[Way, ...]] = {
    "tpu": ("replicated", "row", "sparsecore"),
    "gpu": ("replicated", "row", "column"),
}
"""Ways that the engines of a kind of accelerator have."""


def plan_spec(spec: JobSpec, *, seen: Mapping[str, Any] | None = None) -> TablePlan:
    """Return how the tables of a spec are best held.

    Args:
        seen: what `twinstep tables --json` found in batches of the data: how often ids come then follows from those.

    Raises:
        SpecError: the spec is for host processors, or `seen` is not such a report.
    """
    place = where(spec)
    if place.facts is None:
        raise SpecError(
            "tables are planned for TPUs and GPUs; the spec asks for cpu, where each is on the one host",
            remedy="set accelerator: {kind: tpu, generation: v5p, topology: 2x2x1}, say",
        )
    found = modelled(spec)
    room = Room(
        devices=place.devices,
        facts=place.facts,
        budget=max((place.memory or 0) - found.memory.besides_tables, 0),
        sparse_cores=_sparse_cores(spec),
    )
    return plan_tables(table_uses(spec, seen), room, ways=WAYS[place.kind])


def _sparse_cores(spec: JobSpec) -> int:
    generation = getattr(spec.accelerator, "generation", None)
    return TPUS[generation].sparse_cores_per_device if generation in GENERATIONS else 0


def table_uses(spec: JobSpec, seen: Mapping[str, Any] | None = None) -> list[TableUse]:
    """Return what a step of a spec asks of each of its tables.

    Raises:
        SpecError: `seen` is no report of `twinstep tables`, or of tables that the spec has not.
    """
    found = modelled(spec)
    ids, quiet, asked = batch_ids(spec, found.shape), is_quiet(spec), spec.optimizers.sparse
    width = spec.model.embedding_dim
    slots = 1 / width if asked.kind == "rowwise_adagrad" else float(slots_of(asked)[0])
    zipf = {table.name: zipf_of(spec) for table in found.shape.tables}
    fitted = {} if seen is None else _fitted(seen)
    if unknown := sorted(fitted.keys() - zipf.keys()):
        raise SpecError(
            f"the statistics are of tables that the spec has not: {', '.join(unknown[:5])}",
            remedy=f"twinstep tables SPEC --json > seen.json, of this spec; its tables: {', '.join(sorted(zipf)[:20])}",
        )
    zipf |= fitted
    return [
        TableUse(
            name=table.name, rows=table.rows, width=width, ids=ids[table.name], slots=slots, quiet=quiet,
            zipf=zipf[table.name],
        )
        for table in found.shape.tables
    ]  # fmt: skip


def _fitted(seen: Mapping[str, Any]) -> dict[str, float]:
    """Return the exponent of each table's popularity that gives as many different rows as were seen."""
    try:
        report = seen.get("tables", seen)
        batches, rows = int(report["batches"]), report["tables"]
        if not isinstance(rows, Sequence):
            raise TypeError
        return {
            str(each["table"]): fitted_exponent(
                int(each["ids_per_batch"]) * batches, int(each["rows"]), int(each["unique_ids"])
            )
            for each in rows
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # the last: Infinity, 1e999
        raise SpecError(
            "the statistics are not a report of `twinstep tables --json`",
            remedy="twinstep tables SPEC --json > seen.json; twinstep plan SPEC --stats seen.json",
        ) from None
