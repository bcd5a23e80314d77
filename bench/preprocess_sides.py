"""What lives in a process of `preprocess`: one workload, and ours or jax-tpu-embedding's preprocessing of it."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.preprocess import pin, timed
from twinstep.worker.embedding.sparsecore.inputs import Dense, Given, Ragged
from twinstep.worker.embedding.sparsecore.limits import limits_from_batches
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.result import Buffers, Preprocessed
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import Stacking, StackPlan, plan_stacks

PER_DEVICE = 4
# Rows of the 26 categorical features of Criteo 1TB as MLPerf's DLRMv2 has them, at most 40 million, and its hotness.
ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
        11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)  # fmt: skip
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
Ids = npt.NDArray[Any]


def declared(workload: str) -> tuple[list[tuple[int, int]], Stacking]:
    """Return (rows, hotness) of each table, and how they are stacked."""
    alone = Stacking(disable_table_stacking=True)
    if workload in ("one-hot", "split"):
        return [(rows, 1) for rows in ROWS], alone
    if workload == "multi-hot":
        return list(zip(ROWS, HOTNESS, strict=True)), alone
    if workload == "ragged":
        return [(1_000_000, 20)] * 8, alone
    if workload == "stacked":
        return [(100_000, 4)] * 8, Stacking(activation_limit=2**40)
    return [(131_262, 50), (10_000, 50), (100, 50)], alone  # sequence: ids, categories and actions of a long history


def make(workload: str, samples: int) -> tuple[list[Table], dict[str, Given], Stacking]:
    """Return tables, a batch of `samples` per feature, and the stacking."""
    shapes, how = declared(workload)
    rng = np.random.default_rng(7)
    tables: list[Table] = []
    batch: dict[str, Given] = {}
    if workload == "sequence":
        samples //= 8  # long histories come in small batches
    for number, (rows, hotness) in enumerate(shapes):
        name = f"t{number:02}"
        tables.append(Table(name=name, rows=rows, dim=16, combiner="mean" if workload == "ragged" else "sum"))
        if workload in ("ragged", "sequence"):
            lengths = rng.integers(0, 2 * hotness + 1, samples)
            ids = (rng.pareto(1.1, int(lengths.sum())) * 50).astype(np.int64) % rows
            batch[name] = Ragged(ids.astype(np.int32), lengths)
        else:
            batch[name] = Dense(rng.integers(0, rows, (samples, hotness)).astype(np.int32), padding=None)
    return tables, batch, how


class Side:
    """One side's subject.

    Args:
        side: `ours` or `theirs`.
        workload, samples: of `make`; samples are those of this host.
        devices, local: chips of the job, and of this host.
        threads: processors that it may use.
    """

    def __init__(self, *, side: str, workload: str, samples: int, devices: int, local: int, threads: int) -> None:
        pin(threads)
        tables, batch, how = make(workload, samples)
        counts = {name: _samples(given) * devices // local for name, given in batch.items()}
        features = [Feature(name=name, table=name, samples=count) for name, count in counts.items()]
        plan = plan_stacks(tables, features, Cores(devices=devices, per_device=PER_DEVICE), how)
        plan = limits_from_batches(plan, [batch], headroom=1.25, local_devices=local)
        self._split = workload == "split"
        if self._split:
            plan = _halved(plan)
        self._ids = sum(np.size(given.ids) for given in batch.values() if not isinstance(given, int))
        self._plan, self._local = plan, local
        make_call = self._ours if side == "ours" else self._theirs
        self._call = make_call(tables, features, batch, how, threads)
        self._before = _peak_mb()
        self._found = self._call()
        self._kept = self._found

    def _ours(
        self, tables: list[Table], features: list[Feature], batch: dict[str, Given], how: Stacking, threads: int
    ) -> Callable[[], Any]:
        policy = Policy(split="vocabulary", allow_id_dropping=True) if self._split else Policy()
        make = Preprocessor(
            self._plan, local_devices=self._local, policy=policy, threads=threads, agree=lambda _, bits: bits
        )
        make(batch)  # compiles, or loads
        return lambda: make(batch)

    def _theirs(
        self, tables: list[Table], features: list[Feature], batch: dict[str, Given], how: Stacking, threads: int
    ) -> Callable[[], Any]:
        from bench import sparsecore_oracle as oracle

        specs = oracle.declare(tables, features)
        oracle.stack(specs, self._plan.cores, how)
        oracle.set_limits(specs, self._plan)
        options: dict[str, Any] = {"local_devices": self._local}
        if self._split:
            options.update(enable_minibatching=True, allow_id_dropping=True)
        given = [batch[each.name] for each in features]
        ragged = [(each.ids, each.lengths) for each in given if isinstance(each, Ragged)]
        if ragged:
            return oracle.coordinate_caller(specs, ragged, self._plan.cores, **options)
        return oracle.caller(specs, [each.ids for each in given], None, self._plan.cores, **options)

    def run(self, calls: int) -> float:
        """Return the seconds of one call."""
        self._kept = None
        return timed(self._call, calls)

    def ids(self) -> int:
        """Return the ids of the batch."""
        return self._ids

    def peak(self) -> float:
        """Return the megabytes that this process grew by at most, since its batch was made."""
        return _peak_mb() - self._before

    def digest(self) -> dict[str, Any]:
        """Return what it came to: minibatches, and a digest of all buffers as far as they are defined."""
        found = self._found
        if isinstance(found, Preprocessed):
            buffers = {
                name: (b.row_pointers, b.embedding_ids, b.sample_ids, b.gains) for name, b in found.buffers.items()
            }
            minibatches = found.minibatches
        else:
            buffers = {name: tuple(np.asarray(part[name]) for part in found[:4]) for name in found[0]}  # type: ignore[misc]
            minibatches = int(found[4])
        digest = hashlib.sha256()
        for name in sorted(buffers):
            for part in self._defined(Buffers(*(each.reshape(self._local, -1) for each in buffers[name])), minibatches):
                digest.update(np.ascontiguousarray(part).tobytes())
        self._found = None
        return {"minibatches": minibatches, "digest": digest.hexdigest()}

    def _defined(self, mine: Buffers, minibatches: int) -> list[Ids]:
        """Return what a side must have written: pointers in use, and slots up to the last partition of each core."""
        shards = self._plan.cores.count
        wide, slots = max(shards, 8), mine.embedding_ids.shape[1]
        pointers = mine.row_pointers[:, : PER_DEVICE * minibatches * wide]
        parts: list[Ids] = [pointers]
        last = pointers.reshape(self._local, PER_DEVICE, -1)[:, :, shards - wide - 1]
        for device in range(self._local):
            for core in range(PER_DEVICE):
                begin = 0 if self._split else core * slots // PER_DEVICE
                end = begin + -(-int(last[device, core]) // 8) * 8
                if self._split and core < PER_DEVICE - 1:
                    continue
                for values in (mine.embedding_ids, mine.sample_ids, np.nan_to_num(mine.gains, nan=-1.0)):
                    parts.append(values[device, begin:end])
        return parts


def _samples(given: Given) -> int:
    return len(given.lengths) if isinstance(given, Ragged) else len(given.ids)


def _halved(plan: StackPlan) -> StackPlan:
    """Return limits that a batch is twice over, and buffers for a few minibatches."""
    limits = {
        each.name: Limits(max_ids=max(8, each.held_to.max_ids // 2), max_unique=max(8, each.held_to.max_unique // 2))
        for each in plan.stacks
    }
    buffers = {each.name: 8 * (each.buffer or 0) for each in plan.stacks}
    return plan.with_limits(limits, buffers)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
