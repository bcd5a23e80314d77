"""Engines of embedding tables by name: how a run's step meets its tables. The loop knows a Stepper, never an engine.

A row of ENGINES makes the Stepper of a run. An engine whose tables are parameters like any other (`dense`) is the
compiler alone; one that works within the compiled step gives the compiler an `Around`; one that steps by itself
answers all of a Stepper's methods itself. Whatever it is, the live model and optimizers hold every value by its usual
name after `pull`, and are read by `push`: so checkpoints, evaluation and moves between engines need no word of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.job import JobSpec
from twinstep.worker.checkpoint.shares import Held
from twinstep.worker.compile import CompileEvent, CompileWarning, Runner, StepCompiler
from twinstep.worker.compile.state import Slot
from twinstep.worker.data.batch import BATCH_DIMS, BatchStats
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, AnyBatch
from twinstep.worker.embedding.collection import tables_of
from twinstep.worker.models.module import GIVEN_ROWS, check_lookups
from twinstep.worker.train.asked import mesh_for, shipped_for, strategies_of
from twinstep.worker.train.declared import Reading, has_declared
from twinstep.worker.train.environment import cache_directory
from twinstep.worker.train.processes import Together
from twinstep.worker.train.step import make_train_step

Prepared = Any
"""A batch as an engine wants it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a Stepper is made from."""

    spec: JobSpec
    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    """`dense` and `sparse`; of a user's module only one where it has no parameters for the other."""
    loader: Loader
    on_start: Callable[[str], None]
    """Called with the reason before each compile."""
    on_event: Callable[[CompileEvent], None]
    on_warning: Callable[[CompileWarning], None]
    tell: Callable[[str, str, dict[str, Any]], None]
    """Reports an event and shows it."""
    together: Together
    """The run's processes."""

    @property
    def options(self) -> dict[str, Any]:
        """What every engine's compiler is told alike."""
        spec = self.spec
        return {
            "backend": spec.compile.backend,
            "mesh": mesh_for(spec),
            "shipped": shipped_for(spec),
            "strategies": strategies_of(spec.compile, spec.embedding.engine, self.model),
            "cache_dir": cache_directory(spec),
            "on_start": self.on_start,
            "on_event": self.on_event,
            "on_warning": self.on_warning,
        }

    @property
    def checks_finite(self) -> bool:
        """Whether a batch that holds NaN or an infinity is to be refused before its step."""
        return self.spec.debug.stop_on_nonfinite and self.spec.train.on_nan == "stop"


class Stepper:
    """Runs steps, and brings the live model up to date: that of `dense`, and the base of others."""

    def __init__(self, compiler: StepCompiler) -> None:
        self._compiler = compiler

    def prepared(self, batches: Iterator[tuple[AnyBatch, BatchStats]]) -> Iterator[tuple[Prepared, BatchStats]]:
        """Give each batch as `program` takes it; runs ahead of the step, in a thread of its own."""
        for batch, stats in batches:
            yield self.prepare(batch), stats

    def drawn(self, batches: Iterator[tuple[Prepared, BatchStats]]) -> Iterator[tuple[Prepared, BatchStats]]:
        """Give each of `prepared` when its step is to run, in the loop's own thread."""
        return batches

    def prepare(self, batch: AnyBatch) -> Prepared:
        """Return one batch as `program` takes it."""
        return batch

    def program(self, batch: Prepared, *, sizes: Mapping[str, int], step: int) -> Callable[[], Any]:
        """Return what runs the step of a batch and returns its outputs; compiles first where it must.

        Args:
            batch: as `prepare` or `prepared` gave it.
            sizes: names the batch's sizes for the reason of a compile.
            step: number of the step, from 0.
        """
        program = self._compiler.program(batch, sizes=sizes)
        return lambda: program(batch)

    def batch_of(self, batch: Prepared) -> AnyBatch:
        """Return the batch that was prepared."""
        found: AnyBatch = batch
        return found

    def runner(self, batch: Prepared, *, sizes: Mapping[str, int]) -> Runner:
        """Return the compiled step for batches like this one."""
        return self._compiler.runner(batch, sizes=sizes)

    @property
    def compile_seconds(self) -> float:
        """Seconds of all compiles so far."""
        return self._compiler.compile_seconds

    def numbers(self) -> dict[str, float]:
        """Return what the engine has to say of the last step, for its metrics."""
        return {}

    def pull(self) -> None:
        """Bring the live model and optimizers up to date."""
        self._compiler.pull()

    def pull_own(self) -> Held:
        """Bring up to date at least what this process is to save; return who has which rows of what none has whole.

        What is not named is up to date in every process, as after `pull`; the rest is so only after `pull`.
        """
        return self._compiler.pull_own()

    def pull_to_read(self) -> Callable[[AnyBatch], None]:
        """Bring the live model up to date for an evaluation.

        Returns:
            What is called with each batch before it is scored, by all processes at once.
        """
        self.pull()
        return lambda batch: None

    def push(self) -> None:
        """Take the state from the live model and optimizers."""
        self._compiler.push()

    def random_state(self) -> Tensor:
        """Return where random numbers stand, for a checkpoint."""
        return self._compiler.random_state()

    def set_random_state(self, state: Tensor) -> None:
        """Go on from what `random_state` gave."""
        self._compiler.set_random_state(state)

    def compiled_for(self) -> dict[str, Any]:
        """Return what the newest program was made for, for a checkpoint, as JSON values."""
        return self._compiler.compiled_for()

    def go_on_after(self, before: Mapping[str, Any]) -> None:
        """Say of the first compile why it is needed, by what `compiled_for` gave before the run was stopped."""
        self._compiler.go_on_after(before)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold of the engine beside tensors, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, of this engine or another."""

    def close(self) -> None:
        """End threads."""


class DeclaredStepper(Stepper):
    """Steps of a run whose processes have declared tables: whole on no host, rows of each on its devices."""

    def __init__(self, compiler: StepCompiler, parts: Parts) -> None:
        super().__init__(compiler)
        self._model, self._together = parts.model, parts.together
        names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
        weights = tables_of(parts.model).weights
        self._paths = {name: Slot("parameter", names[id(weight)]).path for name, weight in weights.items()}

    def pull_to_read(self) -> Callable[[AnyBatch], None]:
        """Bring the live model up to date for an evaluation; of split tables rows are brought for each batch."""
        apart = self._compiler.pull_rest()
        asked = {
            name: functools.partial(self._compiler.rows_here, path)
            for name, path in self._paths.items()
            if path in apart
        }
        return Reading(self._model, self._together, asked)


def _dense(parts: Parts) -> Stepper:
    compiler = StepCompiler(
        make_train_step(clip_norm=parts.spec.train.clip_norm),
        parts.model,
        parts.optimizers,
        batch_dims=BATCH_DIMS | MULTI_HOT_DIMS,
        check_finite=parts.checks_finite,
        **parts.options,
    )
    return DeclaredStepper(compiler, parts) if has_declared(parts.model) else Stepper(compiler)


def _in(module: str) -> Callable[[Parts], Stepper]:
    """Return what makes a Stepper, of a module that is imported for a run that asks for it."""
    return lambda parts: importlib.import_module(f"twinstep.worker.train.{module}").stepper(parts)


ENGINES: dict[str, Callable[[Parts], Stepper]] = {
    "dense": _dense,
    "ring": _dense,  # a strategy of the compiler: `asked.py`
    "sparsecore": _in("sparsecore"),
    "torchrec": _in("hybrid"),
}
"""By `embedding.engine`."""


def make_stepper(parts: Parts) -> Stepper:
    """Return the Stepper of a run, of the engine that its spec names."""
    if parts.spec.embedding.engine in GIVEN_ROWS:
        check_lookups(parts.model, parts.loader.train_batch(0)[0])
    return ENGINES[parts.spec.embedding.engine](parts)
