"""The pipelined step: SparseCores look up batch k and update from batch k-2 while the TensorCore works on batch k-1.

Within one turn the update comes first, so the lookup of batch k reads tables that hold updates up to batch k-2: a
batch's activations lack exactly one update, that of the batch before it. Dense parameters are never stale. n batches
take n + 2 turns; the first has no dense work, the last two no lookup of a batch. docs/howto/use-sparsecores.md has the
table; with `off`, lookup, dense work and update of one batch follow each other, and nothing is stale.

What a turn does is decided on the host, by what it is given: a condition inside the program would keep the two from
overlapping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from twinstep.spec.errors import SpecError, TwinstepError
from twinstep.worker.embedding.sparsecore.device.engine import Engine, Inputs, Tables
from twinstep.worker.embedding.sparsecore.device.lookup import Checks

Activations = dict[str, jax.Array]
DenseStep = Callable[[Any, Activations, Any], tuple[Any, Mapping[str, jax.Array], Any]]
"""(dense state, activations, rest of the batch) → new dense state, gradients of activations, outputs."""

Pipeline = Literal["off", "full"]
PIPELINES: tuple[Pipeline, ...] = ("off", "full")


class Made(NamedTuple):
    """What one turn's program gives back beside the state; None for what it did not do."""

    activations: Activations | None
    gradients: Mapping[str, jax.Array] | None
    outputs: Any
    checks: Checks


class Result(NamedTuple):
    """What the dense work of one batch gave, with the checks of the SparseCore work beside it."""

    batch: int
    outputs: Any
    checks: Checks


class Given(NamedTuple):
    """What a turn works on; None for what it does not do. Inputs are held twice, activations and gradients once."""

    look_up: Inputs | None = None
    """Of batch k."""
    dense: tuple[Activations, Any] | None = None
    """Activations and rest of batch k-1."""
    update: tuple[Inputs, Mapping[str, jax.Array]] | None = None
    """Inputs and gradients of batch k-2."""


def turn(
    engine: Engine, dense_step: DenseStep, tables: Tables, dense: Any, given: Given, step: jax.Array
) -> tuple[Tables, Any, Made]:
    """Do one turn; to be jitted with the first two arguments bound and the next two donated.

    Args:
        engine: lookup and update.
        dense_step: the work on dense parameters.
        tables: tables and slots.
        dense: dense parameters and whatever else the dense step keeps.
        given: what to work on; which parts are None is static.
        step: 0-d int32: k - 2, the step whose update this is.

    Returns:
        tables, dense state, and what was made.
    """
    checks = Checks(jnp.int32(0), jnp.int32(0), jnp.int32(0))
    activations, gradients, outputs = None, None, None
    if given.update is not None:
        tables, wrong = engine.update(tables, *given.update, step)
        checks = add(checks, wrong)
    if given.look_up is not None:
        activations, wrong = engine.look_up(tables, given.look_up)
        checks = add(checks, wrong)
    if given.dense is not None:
        dense, gradients, outputs = dense_step(dense, *given.dense)
    return tables, dense, Made(activations, gradients, outputs, checks)


class Trainer:
    """Runs batches through an engine and a dense step, pipelined or not, and owns the state.

    `tables` and `dense` are up to date when no run is under way; within a pipelined run two updates are.
    """

    def __init__(
        self, engine: Engine, dense_step: DenseStep, tables: Tables, dense: Any, *, pipeline: Pipeline = "off"
    ) -> None:
        """Take the state at step 0; its arrays are donated to the first turn.

        Raises:
            SpecError: there is no such pipeline.
        """
        if pipeline not in PIPELINES:
            raise SpecError(f"pipeline is {pipeline!r}", remedy=f"allowed: {', '.join(PIPELINES)}")
        self.engine, self.tables, self.dense, self.pipeline = engine, tables, dense, pipeline
        self.step = 0
        """Updates made."""
        self._program = jax.jit(
            functools.partial(turn, engine, dense_step),
            donate_argnums=(0, 1),
            out_shardings=(engine.placing, None, None),
        )
        self._ahead: tuple[Inputs, Activations, Any] | None = None
        self._behind: tuple[Inputs, Mapping[str, jax.Array]] | None = None

    def run(self, batches: Iterable[tuple[Inputs, Any]]) -> Iterator[Result]:
        """Train on batches and give the result of each, in order; every batch that is taken is also updated from.

        A pipelined run that is closed early finishes the batches it has taken.

        Args:
            batches: (buffers, whatever else the dense step takes) each.

        Raises:
            DataError, TrainError: as `Engine.raise_for`; no update is made from that batch or a later one.
        """
        each: Callable[[tuple[Inputs, Any]], Iterator[Result]]
        each = self._overlapped if self.pipeline == "full" else self._one_by_one
        number = 0
        try:
            for batch in batches:
                for result in each(batch):
                    yield result._replace(batch=number)
                    number += 1
        except GeneratorExit:
            list(self._drain())
            raise
        for result in self._drain():
            yield result._replace(batch=number)
            number += 1

    def _one_by_one(self, batch: tuple[Inputs, Any]) -> Iterator[Result]:
        inputs, rest = batch
        looked = self._turn(Given(look_up=inputs))
        worked = self._turn(Given(dense=(looked.activations or {}, rest)))
        updated = self._turn(Given(update=(inputs, worked.gradients or {})))
        yield Result(0, worked.outputs, add(looked.checks, updated.checks))

    def _overlapped(self, batch: tuple[Inputs, Any] | None) -> Iterator[Result]:
        inputs, rest = batch or (None, None)
        ahead, behind = self._ahead, self._behind
        made = self._turn(Given(inputs, None if ahead is None else (ahead[1], ahead[2]), behind))
        self._ahead = None if inputs is None else (inputs, made.activations or {}, rest)
        self._behind = None if ahead is None else (ahead[0], made.gradients or {})
        if ahead is not None:
            yield Result(0, made.outputs, made.checks)

    def _drain(self) -> Iterator[Result]:
        while self._ahead is not None or self._behind is not None:
            yield from self._overlapped(None)

    def _turn(self, given: Given) -> Made:
        self.tables, self.dense, made = self._program(self.tables, self.dense, given, jnp.int32(self.step))
        if self.engine.backend == "portable":  # SparseCores trust what the host checked
            try:
                self.engine.raise_for(made.checks)
            except TwinstepError:
                self._ahead = self._behind = None  # nothing is made from what is under way
                raise
        self.step += given.update is not None
        return made


def add(one: Checks, other: Checks) -> Checks:
    """Return the sums."""
    return Checks(*(a + b for a, b in zip(one, other, strict=True)))
