"""A spec's tables and features as SparseCores hold them: which plan, which limits, and what a lookup is to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from twinstep.spec.accelerator import TpuSpec
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.worker.data.batch import BATCH_DIMS
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, AnyBatch
from twinstep.worker.embedding.collection import Lookup, tables_of
from twinstep.worker.embedding.sparsecore.inputs import Ragged
from twinstep.worker.embedding.sparsecore.live import row_optimizer
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Quantization, Table
from twinstep.worker.embedding.sparsecore.stacking import Stacking, StackPlan, plan_stacks
from twinstep.worker.train.environment import mesh_axes
from twinstep.worker.train.tables import cores_of_spec

Backend = Literal["portable", "tpu"]


def engine_of(spec: JobSpec, plan: StackPlan, mesh: Any, backend: Backend) -> Any:
    """Return a spec's engine over a plan's devices."""
    from twinstep.worker.embedding.sparsecore.device.engine import Engine

    return Engine(
        plan=plan,
        mesh=mesh,
        backend=backend,
        id_bound_check="error" if spec.embedding.id_bound_check == "error" else "drop",
        nan_check=spec.debug.stop_on_nonfinite and spec.train.on_nan == "stop",
    )


def given_dims(lookups: int) -> dict[str, int]:
    """Return the position of the batch dimension by leaf of a GivenBatch."""
    return {f"batch.{name}": at for name, at in (BATCH_DIMS | MULTI_HOT_DIMS).items()} | {
        f"activations[{number}]": 0 for number in range(lookups)
    }


def feature_names(lookups: Sequence[Lookup]) -> list[str]:
    """Return a name for each lookup: its table's; of a table's second lookup `TABLE.2`."""
    calls: Counter[str] = Counter()
    names = []
    for each in lookups:
        calls[each.table] += 1
        names.append(each.table if calls[each.table] == 1 else f"{each.table}.{calls[each.table]}")
    return names


def ragged(lookup: Lookup, part: int = 0, parts: int = 1) -> Ragged:
    """Return one of equal parts of a lookup's samples as preprocessing takes it: only ids that are there."""
    size = len(lookup.ids) // parts
    ids, valid = (each.numpy()[part * size : (part + 1) * size] for each in (lookup.ids, lookup.valid))
    lengths = valid.reshape(len(valid), -1).sum(axis=1)
    return Ragged(ids[valid], lengths)


def planned(spec: JobSpec, model: nn.Module, batch: AnyBatch, cores: Cores | None = None) -> StackPlan:
    """Return a spec's tables as SparseCores hold them, without limits unless it gives them.

    Args:
        spec: which optimizer, stacks and quantization.
        model: which tables.
        batch: any of the run's: how many samples each lookup has.
        cores: None: those of the spec's slices, or one for each device of its CPU.

    Raises:
        SpecError: limits or stacks name no table, or samples do not divide by the SparseCores.
    """
    wanted = spec.embedding
    lookups: list[Lookup] = model.lookups(batch)  # type: ignore[operator]
    optimizer = row_optimizer(spec.optimizers.sparse, steps=spec.train.steps, final=spec.train.lr_final)
    collection, read = tables_of(model), {each.table for each in lookups}
    rounded = None if wanted.quantize is None else Quantization(**wanted.quantize.model_dump())
    unknown = sorted(set(wanted.limits.tables) - read)
    if unknown:
        raise SpecError(
            f"embedding.limits.tables names {unknown[0]!r}, which is no table of the model",
            remedy=f"tables: {', '.join(sorted(read))}",
        )
    tables = [
        Table(
            name=name,
            rows=weight.shape[0],
            dim=weight.shape[1],
            optimizer=optimizer,
            quantization=rounded,
            limits=_limits_of(spec, name),
        )
        for name, weight in collection.weights.items()
        if name in read
    ]
    features = [
        Feature(name=name, table=each.table, samples=samples_of(each))
        for name, each in zip(feature_names(lookups), lookups, strict=True)
    ]
    how = Stacking(disable_table_stacking=wanted.disable_table_stacking, groups=wanted.stacks)
    return plan_stacks(tables, features, cores or _cores_of(spec), how)


def bounded(plan: StackPlan, overflow: str) -> StackPlan:
    """Return a plan whose buffers hold all that limits allow, where batches are split: no block is too large then."""
    if overflow != "minibatch":
        return plan
    slots = {
        each.name: -(-each.held_to.max_ids // 8) * 8 * plan.cores.count * plan.cores.per_device for each in plan.stacks
    }
    return plan.with_limits({}, slots)


def numbers_of(plan: StackPlan) -> dict[str, tuple[int, int, int]]:
    return {each.name: (each.held_to.max_ids, each.held_to.max_unique, each.buffer or 0) for each in plan.stacks}


def most_of_processes(plan: StackPlan, found: Sequence[Mapping[str, tuple[int, int, int]]]) -> StackPlan:
    """Return a plan with the most of several processes' limits."""
    most = {name: tuple(map(max, zip(*(each[name] for each in found), strict=True))) for name in found[0]}
    limits = {name: Limits(max_ids=ids, max_unique=unique) for name, (ids, unique, _) in most.items()}
    return plan.with_limits(limits, {name: slots for name, (_, _, slots) in most.items() if slots})


def _limits_of(spec: JobSpec, table: str) -> Limits | None:
    wanted = spec.embedding.limits
    if wanted.source != "given":
        return None
    if table not in wanted.tables:
        raise SpecError(
            f"embedding.limits.tables has no limits of {table!r}",
            remedy=f"embedding.limits.tables: {{{table}: {{max_ids: 256, max_unique: 256}}}}, or source: fdo",
        )
    given = wanted.tables[table]
    return Limits(max_ids=given.max_ids, max_unique=given.max_unique)


def _cores_of(spec: JobSpec) -> Cores:
    if isinstance(spec.accelerator, TpuSpec):
        return cores_of_spec(spec)
    return Cores(devices=(mesh_axes(spec) or {"data": 1})["data"], per_device=1)


def samples_of(lookup: Lookup) -> int:
    return int(lookup.ids.shape[0])


def dim_of(plan: StackPlan, table: str) -> int:
    return plan.of_table(table)[1].table.dim
