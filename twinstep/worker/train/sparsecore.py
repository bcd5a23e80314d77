"""The SparseCore engine in training: host preprocessing ahead of the step, limits that follow the batches, one program.

Tables leave the captured module: `AroundStep` looks them up before it and updates them after it, within its program.
Buffers of batch i + 1 are made in the loader's thread while step i runs. Limits are looked at every
`embedding.limits.every_steps` steps; where they change, the step is compiled once more and says why.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.accelerator import TpuSpec
from twinstep.spec.job import JobSpec
from twinstep.worker.checkpoint.content import live_tensors
from twinstep.worker.checkpoint.shares import Held
from twinstep.worker.compile import Runner, StepCompiler
from twinstep.worker.compile.inputs import check_finite
from twinstep.worker.compile.state import materialise
from twinstep.worker.compile.up_to_date import keep_up_to_date
from twinstep.worker.data.batch import BatchStats
from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import AnyBatch, MultiHotDataset
from twinstep.worker.embedding.collection import GivenCollection, Lookup, tables_of, without_tables
from twinstep.worker.embedding.sparsecore import fdo
from twinstep.worker.embedding.sparsecore.inputs import Given, Ragged
from twinstep.worker.embedding.sparsecore.limits import limits_from_batches
from twinstep.worker.embedding.sparsecore.live import LiveTables
from twinstep.worker.embedding.sparsecore.logical import WEIGHT
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.result import Preprocessed
from twinstep.worker.embedding.sparsecore.spec import Cores, Limits
from twinstep.worker.embedding.sparsecore.stacking import StackPlan
from twinstep.worker.train.declared import Reading
from twinstep.worker.train.engines import Parts, Stepper
from twinstep.worker.train.sparsecore_plan import (
    Backend,
    bounded,
    dim_of,
    engine_of,
    feature_names,
    given_dims,
    most_of_processes,
    numbers_of,
    planned,
    ragged,
    samples_of,
)
from twinstep.worker.train.step import Step, make_given_step


class GivenBatch(NamedTuple):
    """What the captured step takes."""

    batch: Any
    activations: list[Tensor]
    """By lookup, [samples, dim]: stand for what the program makes itself."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A batch with its buffers."""

    batch: AnyBatch
    buffers: Preprocessed
    version: int
    """Of the limits that its buffers were made for."""
    following: Prepared | None = None
    """The batch after it, where a pipeline looks ahead."""


class SparseCoreStepper(Stepper):
    """Steps of a run whose tables SparseCores hold, or whose CPU stands for them."""

    def __init__(self, parts: Parts) -> None:
        self._spec, self._loader, self._tell = parts.spec, parts.loader, parts.tell
        self._together, process = parts.together, parts.together.process
        self._share = (process.rank, process.count)
        self._model, self._optimizers, wanted = parts.model, parts.optimizers, parts.spec.embedding
        first = parts.loader.train_batch(0)[0]
        self._features = feature_names(self._model.lookups(first))  # type: ignore[operator]
        self._plan = self._with_limits(planned(parts.spec, self._model, first))
        self._pipelined = wanted.pipeline == "full"
        self._lock, self._version = threading.Lock(), 0
        self._preprocessor = self._make_preprocessor()
        self._record = fdo.Record(fdo.topology_of(self._plan))
        self._counted: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        collection = tables_of(self._model)
        for name, optimizer in parts.optimizers.items():
            materialise(name, optimizer)
        from twinstep.worker.embedding.sparsecore.device.around import AroundStep

        read = {place.table.name for stack in self._plan.stacks for place in stack.placements}
        self._tables = LiveTables(
            collection,
            parts.optimizers["sparse"],
            parts.spec.optimizers.sparse.kind,
            share=self._share,
            unread=set(collection.weights) - read,
        )
        self._around = AroundStep(
            self._engine(),
            self._features,
            self._tables,
            pipeline=wanted.pipeline,
            nothing=self._nothing(),
        )
        view, given = without_tables(self._model)
        super().__init__(self._make_compiler(parts, view, given))
        self._check = parts.checks_finite
        self._activations = [
            torch.zeros(()).expand(samples_of(each), dim_of(self._plan, each.table))
            for each in self._model.lookups(first)  # type: ignore[operator]
        ]
        keep_up_to_date(collection, [parts.optimizers["sparse"]], self)

    def _make_compiler(self, parts: Parts, view: nn.Module, given: GivenCollection) -> StepCompiler:
        return StepCompiler(
            make_given_step(given, clip_norm=parts.spec.train.clip_norm),
            view,
            {"dense": parts.optimizers["dense"]},
            batch_dims=given_dims(len(self._features)),
            around=self._around,
            **parts.options,
        )

    def _engine(self) -> Any:
        from twinstep.worker.embedding.sparsecore.device.around import device_mesh

        backend: Backend = "tpu" if isinstance(self._spec.accelerator, TpuSpec) else "portable"
        return engine_of(self._spec, self._plan, device_mesh(self._plan.cores.devices), backend)

    def _make_preprocessor(self) -> Preprocessor:
        wanted = self._spec.embedding
        policy = Policy(
            id_bound_check=wanted.id_bound_check,
            split="samples" if wanted.overflow == "minibatch" else "none",
            allow_id_dropping=wanted.overflow == "drop",
        )
        local = self._plan.cores.devices // self._share[1]
        return Preprocessor(
            self._plan, local_devices=local, policy=policy, threads=self._spec.runtime.threads, quiet=True
        )

    def _nothing(self) -> Preprocessed | None:
        """Return buffers of a batch without ids, for a pipeline."""
        return self._preprocessor(self._no_ids()) if self._pipelined else None

    def _no_ids(self) -> dict[str, Given]:
        none = np.zeros(0, np.int64)
        return {
            place.feature.name: Ragged(none, np.zeros(place.feature.samples // self._share[1], np.int64))
            for stack in self._plan.stacks
            for place in stack.features
        }

    # Live values

    def pull(self) -> None:
        """Bring the live model and optimizers up to date."""
        self._tables.fill()
        super().pull()

    def pull_own(self) -> Held:
        """Bring up to date at least what this process is to save; return who has which rows of what none has whole."""
        self._tables.fill()
        paths = {id(tensor): path for path, tensor in live_tensors(self._model, self._optimizers).items()}
        held = super().pull_own()
        if not self._tables.started:
            return held
        return {**held, **{paths[id(self._tables.held(*each))]: rows for each, rows in self._tables.own().items()}}

    def pull_to_read(self) -> Callable[[AnyBatch], None]:
        """Bring the live model up to date for an evaluation; of declared tables rows are brought for each batch."""
        own = self._tables.own()
        if not own:
            return super().pull_to_read()
        self._compiler.pull_rest()
        there = bool(self._around.state)  # before the first step too, where the run goes on from a checkpoint
        if there and not self._tables.started:
            self._around.push_written()
        known = {table for table, part in own if part == WEIGHT} if there else ()
        asked = {table: functools.partial(self._around.rows_here, table) for table in sorted(known)}
        return Reading(self._model, self._together, asked)

    # Limits

    def _with_limits(self, plan: StackPlan) -> StackPlan:
        wanted = self._spec.embedding.limits
        if wanted.source == "given":
            return plan
        batches = (self._given(self._loader.train_batch(number)[0]) for number in range(wanted.batches))
        local = plan.cores.devices // self._share[1]
        own = limits_from_batches(plan, batches, headroom=wanted.headroom, local_devices=local)
        return bounded(most_of_processes(own, self._together.gather(numbers_of(own))), self._spec.embedding.overflow)

    def _given(self, batch: AnyBatch) -> dict[str, Given]:
        lookups: list[Lookup] = self._model.lookups(batch)  # type: ignore[operator]
        return {name: ragged(each, *self._share) for name, each in zip(self._features, lookups, strict=True)}

    def _follow(self, step: int) -> None:
        """Look at the limits before a step, where that is due."""
        wanted = self._spec.embedding.limits
        if wanted.source != "fdo" or not step or step % wanted.every_steps:
            return
        policy = fdo.FdoPolicy(
            quantile=wanted.quantile, headroom=wanted.headroom, least_batches=min(8, wanted.every_steps)
        )
        plan, changes = fdo.decide(self._plan, self._of_all(), policy)
        for change in changes:
            before, after = change.before, change.after
            assert before is not None, "a run's stacks have limits"  # noqa: S101
            self._tell(
                "limits_changed",
                f"limits of {change.stack}: {before.max_ids} → {after.max_ids} ids, {before.max_unique} → "
                f"{after.max_unique} unique ids of a partition: {change.reason}",
                {"stack": change.stack, "max_ids": after.max_ids, "max_unique": after.max_unique},
            )
        if changes:
            self._take_limits(bounded(plan, self._spec.embedding.overflow))

    def _of_all(self) -> fdo.Record:
        """Return the statistics of all processes; asked by all of them."""
        record = fdo.Record(self._record.topology)
        for each in self._together.gather(self._record.to_json()):
            record = record.merged(fdo.Record.from_json(each))
        return record

    def _take_limits(self, plan: StackPlan) -> None:
        with self._lock:
            self._preprocessor.close()
            self._plan = plan
            self._preprocessor = self._make_preprocessor()
            self._version += 1
            nothing = self._nothing()
        self._around.replan(self._engine(), nothing)

    # What the loop asks

    def prepared(self, batches: Iterator[tuple[AnyBatch, BatchStats]]) -> Iterator[tuple[Prepared, BatchStats]]:
        """Give each batch with its buffers; a pipeline's with the one after it."""
        if not self._pipelined:
            yield from super().prepared(batches)
            return
        held: tuple[Prepared, BatchStats] | None = None
        for batch, stats in batches:
            now = self.prepare(batch), stats
            if held is not None:
                held[0].following = now[0]
                yield held
            held = now
        if held is not None:
            yield held

    def prepare(self, batch: AnyBatch) -> Prepared:
        """Return a batch with its buffers.

        Raises:
            DataError: ids name no row, or the batch is over its limits, and the spec wants neither passed over.
        """
        with self._lock:
            return Prepared(batch, self._preprocessor(self._given(batch)), self._version)

    def program(self, batch: Prepared, *, sizes: Mapping[str, int], step: int) -> Callable[[], Any]:
        """Return what runs the step; its buffers are made again where limits changed since."""
        self._follow(step)
        if self._check:
            check_finite(batch.batch)
        self._settle_on(batch)
        following = batch.following if step + 1 < self._spec.train.steps else None
        if following is not None:
            self._settle_on(following)
        self._around.prepare(batch.buffers, None if following is None else following.buffers, step)
        given = GivenBatch(batch.batch, self._activations)
        program = self._compiler.program(given, sizes=sizes)

        def run() -> Any:
            output, _ = program(given)
            self._note(batch.buffers)
            return output

        return run

    def _settle_on(self, batch: Prepared) -> None:
        """Make a batch's buffers again where limits changed since; in as many blocks as any process has."""
        if batch.version != self._version:
            again = self.prepare(batch.batch)
            batch.buffers, batch.version = again.buffers, again.version
        if not self._together.several or self._spec.embedding.overflow != "minibatch":
            return
        blocks = batch.buffers.blocks
        short = max(self._together.gather(len(blocks))) - len(blocks)
        if short:
            with self._lock:
                empty = self._preprocessor(self._no_ids()).buffers
            batch.buffers = dataclasses.replace(batch.buffers, blocks=(*blocks, *[empty] * short))

    def _note(self, buffers: Preprocessed) -> None:
        statistics = buffers.statistics
        self._record.add(statistics)
        self._last = {
            "ids_dropped": float(sum(statistics.dropped.values())),
            "ids_out_of_range": float(sum(statistics.outside.values())),
            "sample_blocks": float(len(buffers.blocks)),
        }

    def batch_of(self, batch: Prepared) -> AnyBatch:
        """Return the batch that was prepared."""
        return batch.batch

    def runner(self, batch: Prepared, *, sizes: Mapping[str, int]) -> Runner:
        """Return the compiled step for a batch that `program` was asked for."""
        return self._compiler.runner(GivenBatch(batch.batch, self._activations), sizes=sizes)

    def numbers(self) -> dict[str, float]:
        """Ids that the last batch lost, and blocks it was split into."""
        return self._last

    def state(self) -> dict[str, Any]:
        """Return limits and all processes' statistics, so that a run that goes on compiles nothing twice."""
        limits = {
            stack.name: [stack.held_to.max_ids, stack.held_to.max_unique, stack.buffer] for stack in self._plan.stacks
        }
        return {"sparsecore": {"topology": self._record.topology, "limits": limits, "record": self._of_all().to_json()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with limits and statistics of the same stacks on as many devices; others are found anew."""
        found = state.get("sparsecore")
        if not found or found["topology"] != self._record.topology or self._spec.embedding.limits.source != "fdo":
            return
        if self._together.first:  # they are of all processes, and counted once
            self._record = fdo.Record.from_json(found["record"])
        limits = {name: Limits(max_ids=ids, max_unique=unique) for name, (ids, unique, _) in found["limits"].items()}
        buffers = {name: slots for name, (_, _, slots) in found["limits"].items() if slots is not None}
        self._take_limits(bounded(self._plan.with_limits(limits, buffers), self._spec.embedding.overflow))

    def close(self) -> None:
        """End the threads of preprocessing."""
        with self._lock:
            self._preprocessor.close()


def stepper(parts: Parts) -> Stepper:
    """Return the Stepper of a run."""
    return SparseCoreStepper(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadParts:
    """What `compile_ahead` takes for a step whose tables SparseCores hold."""

    train_step: Step
    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    batch: GivenBatch
    batch_dims: dict[str, int]
    around: Callable[[Any], Any]


def ahead_parts(
    spec: JobSpec,
    dataset: Dataset | MultiHotDataset,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    batch: AnyBatch,
    cores: Cores,
    *,
    backend: Backend = "tpu",
) -> AheadParts:
    """Return a step for a slice with these SparseCores, as a run on it makes it; model and batch may be on `meta`.

    Raises:
        SpecError: tables cannot be laid out, or the batch does not divide by the SparseCores.
        DataError: there is no batch that limits could come from.
    """
    from twinstep.worker.embedding.sparsecore.device.around import AheadStep

    lookups: list[Lookup] = model.lookups(batch)  # type: ignore[operator]
    names, wanted = feature_names(lookups), spec.embedding
    plan = planned(spec, model, batch, cores)
    if wanted.limits.source != "given":
        loader = Loader(dataset, spec.data, seed=spec.train.seed)
        real = (model.lookups(loader.train_batch(number)[0]) for number in range(wanted.limits.batches))  # type: ignore[operator]
        batches = ({name: ragged(each) for name, each in zip(names, found, strict=True)} for found in real)
        plan = bounded(limits_from_batches(plan, batches, headroom=wanted.limits.headroom), wanted.overflow)
    view, given = without_tables(model)
    activations = [torch.empty(samples_of(each), dim_of(plan, each.table), device="meta") for each in lookups]

    def around(mesh: Any) -> Any:
        return AheadStep(engine_of(spec, plan, mesh, backend), names, pipeline=wanted.pipeline)

    return AheadParts(
        train_step=make_given_step(given, clip_norm=spec.train.clip_norm),
        model=view,
        optimizers={"dense": optimizers["dense"]},
        batch=GivenBatch(batch, activations),
        batch_dims=given_dims(len(activations)),
        around=around,
    )
