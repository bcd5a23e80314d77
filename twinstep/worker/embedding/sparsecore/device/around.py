"""The engine within a captured step's program: what the compiler's `Around` asks of an engine, done by SparseCores.

`off`: lookup, dense work and update of one batch. `full`: one turn of `pipeline.turn`: update from the batch before,
lookup of the next, dense work on this one. A run of batches is filled by a lookup alone and ended by an update alone,
so that after `settle` every batch that was worked on has been updated from, and tables can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from twinstep.spec.errors import TrainError
from twinstep.worker.embedding.sparsecore.device import stored
from twinstep.worker.embedding.sparsecore.device.engine import Engine, Inputs, Tables
from twinstep.worker.embedding.sparsecore.device.entries import Csr, pointers_of
from twinstep.worker.embedding.sparsecore.device.lookup import Checks
from twinstep.worker.embedding.sparsecore.device.pipeline import Given, Made, Pipeline, add, turn
from twinstep.worker.embedding.sparsecore.live import LiveTables
from twinstep.worker.embedding.sparsecore.logical import Chunk, Rows, parts_of
from twinstep.worker.embedding.sparsecore.result import Preprocessed

Dense = Callable[[Sequence[jax.Array]], tuple[list[jax.Array], Any]]


class AroundStep:
    """Tables of a run on the devices, looked up and updated within the program of its step.

    Args:
        engine: plan, mesh and backend.
        features: in the order in which the model asks for them.
        live: the live model's tables: where values come from, and go to.
        pipeline: `off` or `full`.
        nothing: buffers of a batch without ids: what a turn of `full` looks up, or updates from, where there is none.
    """

    def __init__(
        self,
        engine: Engine,
        features: Sequence[str],
        live: LiveTables,
        *,
        pipeline: Pipeline = "off",
        nothing: Preprocessed | None = None,
    ) -> None:
        self._features, self._live, self.pipeline = tuple(features), live, pipeline
        self.given = len(self._features)
        self.state: Any = {}
        """Tables, by stack."""
        self.updates = 0
        """Batches that tables are updated from: the number of the next one, from 0."""
        self._arguments: Any = None
        self._ahead: tuple[Preprocessed, Inputs, dict[str, jax.Array]] | None = None
        self._behind: tuple[Inputs, dict[str, jax.Array]] | None = None
        self._checks: Checks | None = None
        self._current: Inputs | None = None
        self._next: Preprocessed | None = None
        self._take(engine, nothing)

    # What the compiler asks

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """Stacks with their limits, and how many blocks the batch at hand comes in."""
        stacks = self.engine.plan.stacks
        limits = [
            (f"limits of {stack.name}", f"{held.max_ids} ids, {held.max_unique} unique, {stack.buffer or 'all'} slots")
            for stack in stacks
            if (held := stack.limits) is not None
        ]
        blocks = tuple(len(next(iter(each.stacks.values()))) for each in self._all_inputs())
        return (
            ("engine", "sparsecore"),
            ("pipeline", self.pipeline),
            *limits,
            ("blocks of samples", " and ".join(map(str, blocks))),
            ("tables", repr([(stack.placements, stack.features, stack.pack, stack.cores) for stack in stacks])),
            ("checks", f"{self.engine.id_bound_check}, {self.engine.nan_check}, {self.engine.backend}"),
        )

    def _all_inputs(self) -> list[Inputs]:
        if self._arguments is None:
            return []
        return [each for each in jax.tree.leaves(self._arguments, is_leaf=_is_inputs) if _is_inputs(each)]

    @property
    def arguments(self) -> Any:
        """Buffers of the batch at hand and the number of its update; with `full` of its neighbours too."""
        return self._arguments

    @property
    def placing(self) -> Any:
        """As the engine places tables."""
        return self.engine.placing

    def run(self, dense: Dense, state: Tables, arguments: Any) -> tuple[Tables, Made, Any]:
        """Do a step's work around its dense part."""

        def dense_step(_: Any, activations: Any, rest: Any) -> tuple[Any, dict[str, jax.Array], Any]:
            gradients, rest = dense([activations[each] for each in self._features])
            return rest, dict(zip(self._features, gradients, strict=True)), None

        if self.pipeline == "full":
            given, step = arguments
            state, rest, made = turn(self.engine, dense_step, state, None, Given(*given), step)
            return state, made._replace(outputs=None), rest
        inputs, step = arguments
        activations, checks = self.engine.look_up(state, inputs)
        rest, gradients, _ = dense_step(None, activations, None)
        state, wrong = self.engine.update(state, inputs, gradients, step)
        return state, Made(None, None, None, add(checks, wrong)), rest

    def took(self, state: Tables, made: Made) -> None:
        """Take over what a step gave."""
        self.state, self._checks = state, made.checks
        self._live.devices_alone_know()
        self.updates += 1
        if self.pipeline == "full":
            (next_inputs, _, _), _ = self._arguments
            assert made.gradients is not None, "a turn with dense work gives them"  # noqa: S101
            assert self._current is not None, "a batch was prepared"  # noqa: S101
            self._behind = (self._current, dict(made.gradients))
            self._ahead = None if self._next is None else (self._next, next_inputs, dict(made.activations or {}))

    def check(self) -> None:
        """Raise what the step found wrong.

        Raises:
            DataError, TrainError: as `Engine.raise_for`.
        """
        if self._checks is not None and self.engine.backend == "portable":  # SparseCores trust what the host checked
            checks, self._checks = self._checks, None
            self.engine.raise_for(checks)

    # A batch

    def prepare(self, batch: Preprocessed, following: Preprocessed | None, step: int) -> None:
        """Set the batch that the next step is for.

        Args:
            batch: its buffers.
            following: those of the batch after it, where that is known: `full` looks it up beside this one's work.
            step: number of the update, from 0, that schedules count by.
        """
        if self.pipeline == "off":
            self.updates = step
            self._arguments = (self.engine.inputs(batch), jnp.int32(step))
            return
        self.push_written()
        if self._ahead is None or self._ahead[0] is not batch:
            self.settle()
            inputs = self.engine.inputs(batch)
            activations, _ = self._look_up(self.state, inputs)
            self._ahead = (batch, inputs, activations)
        self.updates = step
        _, self._current, activations = self._ahead
        self._next = following
        empty = self._empty()
        behind = self._behind or (empty, {name: jnp.zeros_like(each) for name, each in activations.items()})
        ahead = empty if following is None else self.engine.inputs(following)
        self._arguments = ((ahead, (activations, None), behind), jnp.int32(step - 1))

    def settle(self) -> None:
        """Make the update that is still due, and forget what was looked up ahead."""
        if self._behind is not None:
            inputs, gradients = self._behind
            self._behind = None
            self.state, checks = self._update(self.state, inputs, gradients, jnp.int32(self.updates - 1))
            self._checks = checks
            self.check()
        self._ahead = None

    def _empty(self) -> Inputs:
        assert self._nothing is not None, "a pipelined run has it"  # noqa: S101
        return self.engine.inputs(self._nothing)

    def replan(self, engine: Engine, nothing: Preprocessed | None) -> None:
        """Go on with other limits; where rows lie is the same."""
        self.settle()
        self._take(engine, nothing)

    def _take(self, engine: Engine, nothing: Preprocessed | None) -> None:
        self.engine, self._nothing, self._arguments = engine, nothing, None
        self._look_up = jax.jit(lambda tables, inputs: engine.look_up(tables, inputs))
        self._update = jax.jit(
            lambda tables, inputs, gradients, step: engine.update(tables, inputs, gradients, step),
            donate_argnums=0,
            out_shardings=(engine.placing, None),
        )

    # Values

    def push(self) -> None:
        """Take tables and slots from the live model."""
        self._ahead = self._behind = None
        self.state = self.engine.from_logical(self._live.read)
        self._live.note()

    def rows_here(self, table: str, ids: Any) -> Rows:
        """Return rows of a table as they are, zeros for those that other processes hold."""
        return self.engine.rows_here(self.state, table, ids)

    def push_written(self) -> None:
        """Take them where someone wrote to the live model."""
        if self._live.written():
            self.push()

    def pull(self) -> None:
        """Bring the live model's tables and slots up to date.

        Raises:
            TrainError: a step failed while it ran and took the tables with it.
        """
        self._bring(self._live.write)

    def pull_own(self) -> None:
        """As `pull`, but of declared tables only the rows that this process is to save."""
        self._bring(self._live.write_own)

    def _bring(self, write: Callable[[Chunk], None]) -> None:
        if any(each.is_deleted() for parts in self.state.values() for each in parts):
            raise TrainError(
                "the tables on the device went with a step that failed while it ran", remedy="load a checkpoint"
            )
        self.settle()
        for chunk in self.engine.to_logical(self.state):
            write(chunk)
        self._live.count(self.updates)
        self._live.note()


def _is_inputs(value: Any) -> bool:
    return isinstance(value, Inputs)


class AheadStep(AroundStep):
    """The same over shapes, for a program that is compiled where its devices are not."""

    def __init__(self, engine: Engine, features: Sequence[str], *, pipeline: Pipeline = "off") -> None:
        self._features, self.pipeline, self.given = tuple(features), pipeline, len(features)
        self._take(engine, None)
        inputs, step = self._buffers(), jax.ShapeDtypeStruct((), jnp.int32, sharding=self._over(P()))
        activations = {
            place.feature.name: self._shape(
                (place.feature.samples, engine.plan.of_table(place.feature.table)[1].table.dim), jnp.float32
            )
            for stack in engine.plan.stacks
            for place in stack.features
        }
        turn_of = (inputs, (activations, None), (inputs, activations))
        self._arguments = (turn_of if pipeline == "full" else inputs, step)
        self.state = {
            stack.name: tuple(
                jax.ShapeDtypeStruct(
                    stored.stored_shape(stack, per_row), jnp.float32, sharding=engine.placing_of(per_row)
                )
                for _, per_row, _ in parts_of(stack)
            )
            for stack in engine.plan.stacks
        }

    def push(self) -> None:
        """Nothing has values."""

    def _over(self, spec: P) -> NamedSharding:
        return NamedSharding(self.engine.mesh, spec)

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._over(P(self.engine.axis)))

    def _buffers(self) -> Inputs:
        stacks: dict[str, tuple[Csr, ...]] = {}
        for stack in self.engine.plan.stacks:
            cores, held = stack.cores, stack.held_to
            slots = stack.buffer or -(-held.max_ids // 8) * 8 * cores.count * cores.per_device
            ids = self._shape((cores.devices * slots,), jnp.int32)
            pointers = self._shape((cores.devices * pointers_of(stack),), jnp.int32)
            stacks[stack.name] = (Csr(pointers, ids, ids, self._shape((cores.devices * slots,), jnp.float32)),)
        return Inputs(stacks)


def device_mesh(devices: int, axis: str = "data") -> jax.sharding.Mesh:
    """Return a mesh of one axis over the first devices."""
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), (axis,))
