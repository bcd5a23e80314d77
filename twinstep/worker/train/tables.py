"""A spec's embedding tables as SparseCores would hold them: layout, limits that its batches need, balance and waste.

`twinstep tables` calls `look_at_tables`. Features are what the model asks its tables for, seen while batches of the
training data go through it once; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from twinstep.spec.accelerator import TpuSpec
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.spec.sparsecore import GENERATIONS
from twinstep.spec.table_names import table_name
from twinstep.spec.topology import TPUS
from twinstep.worker.embedding.sparsecore.inputs import Ragged
from twinstep.worker.embedding.sparsecore.limits import limits_from_batches, most_of
from twinstep.worker.embedding.sparsecore.preprocess import Preprocessor
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Table
from twinstep.worker.embedding.sparsecore.stacking import FLOAT_BYTES, StackPlan, plan_stacks

if TYPE_CHECKING:
    from torch import nn

ELSEWHERE = Cores(devices=4, per_device=4)
"""Where a spec names no TPU: a host of v5p."""
Lookups = dict[str, list[tuple[Any, Any]]]


def cores_of_spec(spec: JobSpec) -> Cores:
    """Return the SparseCores of a spec's slices, or those of a v5p host where it names no TPU.

    Raises:
        SpecError: chips of that generation have none.
    """
    given = spec.accelerator
    if not isinstance(given, TpuSpec):
        return ELSEWHERE
    chips = int(np.prod([int(each) for each in given.topology.split("x")])) * given.slices
    return _cores(given.generation, chips * TPUS[given.generation].devices_per_chip)


def cores_of_slice(topology: str) -> Cores:
    """Return the SparseCores of a slice by name, `v5p:4x4x8`.

    Raises:
        SpecError: there is no such slice, or its chips have none.
    """
    target = parse_slice(topology)
    return _cores(target.generation, target.devices)


def _cores(generation: str, devices: int) -> Cores:
    tpu = TPUS[generation]
    if not tpu.usable_sparse_cores:
        closed = f"nobody can program the SparseCores of {generation}"
        raise SpecError(
            closed if tpu.sparse_cores else f"{generation} has no SparseCores",
            remedy=f"name one of {', '.join(GENERATIONS)}",
        )
    return Cores(devices=devices, per_device=tpu.sparse_cores_per_device)


def look_at_tables(spec: JobSpec, *, cores: Cores | None = None, batches: int = 4) -> dict[str, Any]:
    """Return what `twinstep tables` prints, as JSON values.

    Args:
        spec: whose model and data are looked at.
        cores: instead of the spec's own.
        batches: of training data that limits and statistics come from.

    Raises:
        TwinstepError: data is missing, or the tables cannot be laid out.
    """
    cores = cores or cores_of_spec(spec)
    import torch

    from twinstep.worker.data.datasets import load_dataset
    from twinstep.worker.data.loader import Loader
    from twinstep.worker.models.registry import build_model

    torch.manual_seed(spec.train.seed)
    dataset = load_dataset(spec.data)
    model = build_model(spec, dataset.schema)
    loader = Loader(dataset, spec.data, seed=spec.train.seed)
    seen: list[Lookups] = []
    for number in range(batches):
        with _watched(model) as lookups, torch.no_grad():
            model(loader.train_batch(number)[0])
        seen.append(lookups)
    return _report(*_as_features(model, seen, cores))


@contextmanager
def _watched(model: nn.Module) -> Iterator[Lookups]:
    """Give what is looked up by feature: (ids, valid) of each call. A table's second call in a batch is `TABLE.2`."""
    from twinstep.worker.embedding.collection import EmbeddingCollection

    found: Lookups = {}

    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        table, ids, valid = (*given, *(named[name] for name in ("table", "ids", "valid")[len(given) :]))
        calls = found.setdefault(table, [])
        calls.append((ids.reshape(-1).cpu().numpy(), valid.expand(ids.shape).reshape(-1).cpu().numpy()))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, EmbeddingCollection)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _as_features(model: nn.Module, seen: list[Lookups], cores: Cores) -> tuple[StackPlan, list[dict[str, Ragged]]]:
    """Return the laid-out tables with limits, and each batch by feature; samples are filled up to the SparseCores."""
    sizes = {
        table_name(name.split(".")[-2]): weight.shape
        for name, weight in model.named_parameters()
        if name.endswith(".weight") and ".embeddings." in f".{name}"
    }
    names = {table: max(len(each.get(table, ())) for each in seen) for table in sizes}
    tables = [
        Table(name=table, rows=int(shape[0]), dim=int(shape[1])) for table, shape in sizes.items() if names[table]
    ]
    features, batches = [], [{} for _ in seen]  # type: list[Feature], list[dict[str, Ragged]]
    for table in tables:
        for call in range(names[table.name]):
            feature = table.name if call == 0 else f"{table.name}.{call + 1}"
            calls = [each.get(table.name, [])[call : call + 1] for each in seen]
            most = max(len(each[0][0]) if each else 0 for each in calls)
            samples = max(-(-most // cores.count), 1) * cores.count
            features.append(Feature(name=feature, table=table.name, samples=samples))
            for batch, each in zip(batches, calls, strict=True):
                ids, valid = each[0] if each else (np.zeros(0, np.int64), np.zeros(0, bool))
                lengths = np.zeros(samples, np.int64)
                lengths[: len(ids)] = valid
                batch[feature] = Ragged(ids[valid], lengths)
    return limits_from_batches(plan_stacks(tables, features, cores), batches), batches


def _report(plan: StackPlan, batches: list[dict[str, Ragged]]) -> dict[str, Any]:
    preprocess = Preprocessor(plan)
    most = [most_of(preprocess(batch).statistics) for batch in batches]
    preprocess.close()
    stacks = [
        {
            "stack": stack.name,
            "tables": [each.table.name for each in stack.placements],
            "rows_per_shard": stack.rows_per_shard,
            "stored_dim": stack.stored_dim,
            "rows_per_stored_row": stack.pack,
            "bytes": stack.stored_bytes,
            "samples_per_core": stack.samples_per_core,
            "max_ids_per_partition": stack.held_to.max_ids,
            "max_unique_ids_per_partition": stack.held_to.max_unique,
            "slots_per_device": stack.buffer,
            "observed_max_ids": [each[stack.name].ids for each in most],
            "observed_max_unique_ids": [each[stack.name].unique for each in most],
        }
        for stack in plan.stacks
    ]
    tables = [_table_row(plan, each.table.name, batches) for stack in plan.stacks for each in stack.placements]
    cores = {"devices": plan.cores.devices, "per_device": plan.cores.per_device, "shards": plan.cores.count}
    return {"cores": cores, "batches": len(batches), "tables": tables, "stacks": stacks}


def _table_row(plan: StackPlan, name: str, batches: list[dict[str, Ragged]]) -> dict[str, Any]:
    stack, placement = plan.of_table(name)
    table = placement.table
    mine = [each.feature.name for each in stack.features if each.feature.table == name]
    ids = np.concatenate([batch[feature].ids for batch in batches for feature in mine])
    return {
        "table": name,
        "rows": table.rows,
        "dim": table.dim,
        "bytes": table.rows * table.dim * FLOAT_BYTES,
        "padded_bytes": stack.table_bytes(placement),
        "waste": round(stack.waste(placement), 4),
        "stack": stack.name,
        "row_offset": placement.row_offset,
        "rotation": placement.rotation,
        "features": len(mine),
        "ids_per_batch": len(ids) // len(batches),
        "unique_ids": len(np.unique(ids)),
        "imbalance": _imbalance(np.bincount(placement.locate(ids)[0], minlength=plan.cores.count)),
    }


def _imbalance(counts: Any) -> float | None:
    """Return the most ids of a shard over their mean: 1 is even. None where there are no ids."""
    total = int(counts.sum())
    return round(float(counts.max()) * len(counts) / total, 3) if total else None


def as_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the tables of a report as rows of text, in the order of `HEADS`."""
    stacks = {each["stack"]: each for each in found["stacks"]}
    return [
        (
            each["table"],
            f"{each['rows']:,}",
            str(each["dim"]),
            f"{each['padded_bytes']:,}",
            f"{each['waste']:.1%}",
            each["stack"],
            str(each["rotation"]),
            str(stacks[each["stack"]]["max_ids_per_partition"]),
            str(stacks[each["stack"]]["max_unique_ids_per_partition"]),
            str(each["ids_per_batch"]),
            str(each["unique_ids"]),
            "–" if each["imbalance"] is None else f"{each['imbalance']:.2f}",
        )
        for each in found["tables"]
    ]


HEADS = (
    "table", "rows", "dim", "padded bytes", "waste", "stack", "rotation", "max ids", "max unique", "ids a batch",
    "different", "imbalance",
)  # fmt: skip
