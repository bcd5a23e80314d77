"""What a spec asks of the compiler: strategies, the mesh, sizes by name, programs that were compiled ahead."""

from __future__ import annotations

import glob
from collections.abc import Callable
from typing import Any

from torch import nn

from twinstep.spec.accelerator import TpuSpec
from twinstep.spec.job import CompileSpec, DataSpec, JobSpec
from twinstep.spec.placement import Mesh
from twinstep.spec.slices import Slice
from twinstep.worker.compile.shipped import Shipped
from twinstep.worker.compile.strategies import (
    DEFAULT_STRATEGIES,
    Rematerialise,
    RingEmbedding,
    SparseEmbedding,
    Strategy,
)
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.train.environment import cache_path, mesh_axes

MIB = 1 << 20


def strategies_of(
    spec: CompileSpec, engine: str = "dense", model: nn.Module | None = None
) -> tuple[Strategy | str, ...] | None:
    """Return the strategies of a spec with an engine of its tables; None: the defaults.

    Args:
        model: whose tables the engine `ring` is for; other engines need none.
    """
    if spec.strategies is None and spec.memory_budget_mib is None and engine != "ring":
        return None
    names: tuple[Strategy | str, ...] = DEFAULT_STRATEGIES if spec.strategies is None else spec.strategies
    if engine == "ring":
        # Without row updates no table could be updated around a ring.
        rows = (
            ()
            if SparseEmbedding.name in {each if isinstance(each, str) else each.name for each in names}
            else (SparseEmbedding(),)
        )
        assert model is not None, "a ring names its tables"  # noqa: S101
        names = (*names, *rows, ring_of(model))
    if spec.memory_budget_mib is None:
        return names
    return (*names, Rematerialise(budget_bytes=spec.memory_budget_mib * MIB))


def ring_of(model: nn.Module) -> RingEmbedding:
    """Return the strategy that passes a model's own tables around, if it has any, whatever else is called alike."""
    collections = [each for each in model.modules() if isinstance(each, EmbeddingCollection)]
    tables = {id(weight) for each in collections for weight in each.weights.values()}
    named = model.named_parameters()
    return RingEmbedding(parameters=tuple(glob.escape(name) for name, each in named if id(each) in tables))


def sizes_of(spec: JobSpec) -> dict[str, int]:
    """Return the named sizes of a spec's batches, as a CompileKey holds them."""
    data = spec.data
    return {
        "batch_size": data.batch_size,
        "uih_len": data.uih_len,
        "uih_budget": data.uih_budget or data.uih_len,
        "num_candidates": data.num_candidates,
    }


def tell_of_loading(asked: DataSpec, taken: DataSpec, tell: Callable[[str, str, dict[str, Any]], None]) -> None:
    """Say by the event `loader_workers_unused` where a run packs batches otherwise than its spec asks."""
    if asked.loader_workers != taken.loader_workers:
        tell(
            "loader_workers_unused",
            f"data.loader_workers: {asked.loader_workers} is for a run of one process; each of this run's packs in a "
            "thread of its own",
            {"loader_workers": taken.loader_workers},
        )


def mesh_for(spec: JobSpec) -> Mesh | None:
    """Return the mesh that a spec's step is spread over: all devices of its slice, or of the host; None: one device."""
    if isinstance(spec.accelerator, TpuSpec):
        return Mesh.of_slice(_slice(spec.accelerator).devices)
    axes = mesh_axes(spec)
    return None if axes is None else Mesh.of(axes)


def shipped_for(spec: JobSpec) -> Shipped | None:
    """Return the programs that preflight compiled for a spec's slice; None where it asks for none, or has no cache."""
    directory = cache_path(spec)
    if not isinstance(spec.accelerator, TpuSpec) or directory is None:
        return None
    return Shipped(directory, _slice(spec.accelerator).name)


def _slice(asked: TpuSpec) -> Slice:
    return Slice(asked.generation, asked.topology, asked.slices)
