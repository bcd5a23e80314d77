"""What a spec asks of the compiler, as strategies, and the sizes of its batches by name."""

from __future__ import annotations

from twinstep.spec.job import CompileSpec, JobSpec
from twinstep.worker.compile.strategies import (
    DEFAULT_STRATEGIES,
    Rematerialise,
    RingEmbedding,
    SparseEmbedding,
    Strategy,
)

MIB = 1 << 20


RING = RingEmbedding(parameters=("_embedding_collection.*",))


def strategies_of(spec: CompileSpec, engine: str = "dense") -> tuple[Strategy | str, ...] | None:
    """Return the strategies of a spec with an engine of its tables; None: the defaults."""
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
        names = (*names, *rows, RING)
    if spec.memory_budget_mib is None:
        return names
    return (*names, Rematerialise(budget_bytes=spec.memory_budget_mib * MIB))


def sizes_of(spec: JobSpec) -> dict[str, int]:
    """Return the named sizes of a spec's batches, as a CompileKey holds them."""
    data = spec.data
    return {
        "batch_size": data.batch_size,
        "uih_len": data.uih_len,
        "uih_budget": data.uih_budget or data.uih_len,
        "num_candidates": data.num_candidates,
    }
