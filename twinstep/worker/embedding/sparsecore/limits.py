"""Limits from data: what batches asked of partitions, through a quantile and headroom, to limits of stacks.

Statistics of a batch are already those of stacked tables after rotation, so a stack's limit is the most of its tables'
sums, never a sum of their most. Pure, except that `limits_from_batches` runs the preprocessing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.inputs import Given
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.result import Statistics
from twinstep.worker.embedding.sparsecore.spec import INT32_MAX, Limits
from twinstep.worker.embedding.sparsecore.stacking import StackPlan
from twinstep.worker.embedding.sparsecore.tables import aligned

STEPS_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """What one stack asked for at most, of any partition and SparseCore, in one batch."""

    ids: int
    unique: int
    required: int
    """Slots of one SparseCore."""

    def joined(self, other: Most) -> Most:
        """Return the larger of each number."""
        return Most(
            ids=max(self.ids, other.ids),
            unique=max(self.unique, other.unique),
            required=max(self.required, other.required),
        )


def most_of(statistics: Statistics) -> dict[str, Most]:
    """Return what each stack of a batch asked for at most."""
    return {
        name: Most(
            ids=int(statistics.max_ids[name].max()),
            unique=int(statistics.max_unique[name].max()),
            required=int(statistics.required[name].max()),
        )
        for name in statistics.max_ids
    }


def ladder(value: float) -> int:
    """Round up to one of four steps per octave, in eights, so that limits take few values and programs few forms."""
    if value <= 8:
        return 8
    octave = 1
    while octave * 2 < value:
        octave *= 2
    step = max(octave // STEPS_PER_OCTAVE, 1)
    return min(aligned(int(-(-value // step)) * step), INT32_MAX)


def observe(
    plan: StackPlan, batches: Iterable[Mapping[str, Given]], *, local_devices: int | None = None
) -> list[dict[str, Most]]:
    """Return what each batch asks for, whatever the plan's limits.

    Raises:
        DataError: a batch does not fit the declarations.
    """
    # No limit, and buffers that hold next to nothing: entries are counted before they drop.
    names = [each.name for each in plan.stacks]
    none = Limits(max_ids=INT32_MAX, max_unique=INT32_MAX)
    wide = plan.with_limits(dict.fromkeys(names, none), dict.fromkeys(names, 8 * plan.cores.per_device))
    with_room = Preprocessor(wide, local_devices=local_devices, policy=Policy(allow_id_dropping=True), quiet=True)
    try:
        return [most_of(with_room(batch).statistics) for batch in batches]
    finally:
        with_room.close()


def limits_from_batches(
    plan: StackPlan,
    batches: Iterable[Mapping[str, Given]],
    *,
    headroom: float = 1.0,
    local_devices: int | None = None,
) -> StackPlan:
    """Return the plan with limits, and buffers, that the batches need, times `headroom`.

    Raises:
        DataError: there is no batch, or one does not fit the declarations.
        SpecError: the headroom is under 1.
    """
    if headroom < 1:
        raise SpecError(f"a headroom of {headroom}", remedy="give 1 or more, 1.2 say")
    found = observe(plan, batches, local_devices=local_devices)
    if not found:
        raise DataError("no batch to compute limits from", remedy="give a few batches of the training data")
    limits, buffers = {}, {}
    for stack in plan.stacks:
        most = found[0][stack.name]
        for each in found[1:]:
            most = most.joined(each[stack.name])
        limits[stack.name] = Limits(
            max_ids=max(1, round(most.ids * headroom)), max_unique=max(1, round(most.unique * headroom))
        )
        slots = min(
            aligned(max(8, round(most.required * headroom))), aligned(limits[stack.name].max_ids) * plan.cores.count
        )
        buffers[stack.name] = slots * plan.cores.per_device  # never more than the limits can need
    return plan.with_limits(limits, buffers)
