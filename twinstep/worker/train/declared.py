"""Runs whose processes hold tables apart: their model and optimizers are built without one, and evaluated by rows.

Where a run has several processes and its tables live on devices, a host makes, saves and reads its own rows only; see
`embedding/declared.py`. What needs the whole state on each host (a copy to go back to, a momentum whose first value is
no zero) has it still.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec
from twinstep.worker.compile.state import materialise
from twinstep.worker.data.multi_hot import AnyBatch, AnySchema
from twinstep.worker.embedding.collection import Lookup, tables_of
from twinstep.worker.embedding.declared import Zeros, declare, declared, untouched
from twinstep.worker.embedding.optim import build_optimizer, build_optimizers, split_parameters
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.processes import Together

Ids = npt.NDArray[np.int64]
RowsHere = Callable[[Ids], npt.NDArray[np.float32]]
"""Ids of a table → rows, [n, dim], zeros for those that another process gives."""


def build(spec: JobSpec, schema: AnySchema, together: Together) -> tuple[nn.Module, dict[str, Optimizer]]:
    """Return a run's model and its optimizers, `dense` and `sparse`.

    Raises:
        TrainError: processes of the run made a user's module with other tensors than each other.
        SpecError, TrainError: see `build_model`.
    """
    if not declares(spec, together):
        model = build_model(spec, schema)
        if spec.model.kind == "module":
            _check_alike(model, together)
        return model, build_optimizers(spec.optimizers, model)
    model = build_model(spec, schema, processes=together.process.count)
    dense, tables = split_parameters(model)
    return model, {
        "dense": build_optimizer(spec.optimizers.dense, [each for _, each in dense]),
        "sparse": _over_declared(spec, [each for _, each in tables]),
    }


def declares(spec: JobSpec, together: Together) -> bool:
    """Say whether the processes of a run hold its tables apart."""
    sparse = spec.optimizers.sparse
    return (
        together.several
        and not together.own_rows
        and spec.model.kind != "module"  # which fills its own tables
        and spec.compile.backend == "xla"
        and spec.train.on_nan == "stop"
        and not (sparse.kind == "sgd" and sparse.momentum)
    )


def _check_alike(model: nn.Module, together: Together) -> None:
    """Hold the tensors that each process's factory made to those of the first, in order: all are taken for copies."""
    if not together.several:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    first, *others = together.gather([(name.removeprefix("module."), _sum_of(each)) for name, each in named])
    for rank, made in enumerate(others, 1):
        if made == first:
            continue
        short = min(len(made), len(first))
        at = next((number for number in range(short) if made[number] != first[number]), short)
        here, there = (each[at][0] if at < len(each) else "nothing more" for each in (made, first))
        what = (
            f"makes {here} with other first values, or another shape"
            if here == there
            else f"makes {here} where the first one makes {there}"
        )
        raise TrainError(
            f"process {rank} of the run {what}: model.factory is called in each, and all must make the same",
            remedy="draw first values from torch's own generator, which is seeded, or from one that you seed; make "
            "parts in no order of a set",
        )


def _sum_of(tensor: Tensor) -> int:
    """Return a checksum of a tensor's type, shape and values."""
    kind = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, kind)


def has_declared(model: nn.Module) -> bool:
    """Say whether a model has declared tables."""
    return any(declared(each) is not None for each in model.parameters())


def _over_declared(spec: JobSpec, tables: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of declared tables, whose state is declared too: made on the meta device, and taken over."""
    stand_ins = [nn.Parameter(torch.empty_like(each, device="meta")) for each in tables]
    made = build_optimizer(spec.optimizers.sparse, stand_ins)
    materialise("sparse", made)
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for stand_in, table in zip(stand_ins, tables, strict=True):
        for entry, value in made.state.get(stand_in, {}).items():
            if value.is_meta:
                kept = untouched(*value.shape, dtype=value.dtype)
                declare(kept, Zeros(tuple(value.shape[1:]), value.dtype))
                value = kept
            state[table][entry] = value
    made.state = state
    (group,) = made.param_groups
    group["params"] = tables
    return made


class Reading:
    """Brings rows of declared tables into the live model, as many as a batch reads; all processes ask at once.

    Args:
        rows_here: by table, for those whose rows are on devices of several processes.
    """

    def __init__(self, model: nn.Module, together: Together, rows_here: Mapping[str, RowsHere]) -> None:
        self._model, self._together, self._rows_here = model, together, rows_here
        self._weights = tables_of(model).weights

    def __call__(self, batch: AnyBatch) -> None:
        """Bring what `batch` looks up."""
        lookups: list[Lookup] = self._model.lookups(batch)  # type: ignore[operator]
        wanted: dict[str, Ids] = {}
        for each in lookups:
            ids = each.ids[each.valid].numpy()
            wanted[each.table] = np.union1d(wanted.get(each.table, ids[:0]), ids)
        for table, ids in wanted.items():
            if table not in self._rows_here and (known := declared(self._weights[table])) is not None:
                known.fill_rows(ids)  # nobody has them yet
        everyones = self._together.gather({table: wanted.get(table) for table in self._rows_here})
        for table, here in self._rows_here.items():
            asked = [found for each in everyones if (found := each[table]) is not None]
            ids = np.unique(np.concatenate(asked)) if asked else np.zeros(0, np.int64)
            if len(ids):
                # Not through torch: nobody wrote to the table whom a backend had to follow.
                self._weights[table].detach().numpy()[ids] = self._together.summed(here(ids))
