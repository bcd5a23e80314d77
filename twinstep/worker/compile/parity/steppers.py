"""What takes one step on a copy of model and optimizers: a backend's program, or a captured graph run as it is.

A `Pair` of them is a candidate for comparison: one that trains, and one that shows its gradients as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.parity.trial import (
    Name,
    Settings,
    Snapshot,
    named_outputs,
    state_of,
)
from twinstep.worker.compile.parity.watch import watching
from twinstep.worker.compile.state import Optimizers, TrainState
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.compile.strategies import Strategy
from twinstep.worker.compile.structure import TrainStep, batch_leaves


class Stepper(Protocol):
    """A step over its own model and optimizer, which are up to date after each call."""

    model: nn.Module
    optimizer: Optimizers
    captured: Captured | None

    @property
    def seconds(self) -> float: ...

    def __call__(self, batch: Any) -> Any: ...


Make = Callable[[TrainStep, nn.Module, Optimizers], Stepper]


class CompiledStepper:
    """What a backend makes of the step."""

    def __init__(
        self,
        train_step: TrainStep,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        backend: str,
        strategies: Sequence[Strategy],
        in_place: bool = True,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.captured: Captured | None = None
        self._compiler = StepCompiler(
            train_step,
            model,
            optimizer,
            backend=backend,  # type: ignore[arg-type]  # run.py refuses unknown names
            strategies=strategies,
            in_place=in_place,
        )
        self._eager = backend == "eager"

    @property
    def seconds(self) -> float:
        """Seconds that compiling took."""
        return self._compiler.compile_seconds

    def __call__(self, batch: Any) -> Any:
        """Take one step.

        Raises:
            CompileError: the step draws random numbers, and the backend's are not eager's.
        """
        if self.captured is None and not self._eager:
            self.captured = self._compiler.runner(batch).captured
            _refuse_foreign_numbers(self.captured)
        result = self._compiler(batch)
        self._compiler.pull()
        return result


def _refuse_foreign_numbers(captured: Captured) -> None:
    if captured.context.backend != "xla":
        return
    for node in captured.graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CompileError(
                f"the step draws random numbers ({node.target}), and those of XLA are not eager's",
                remedy="compare without dropout (model.dropout: 0, or model.eval()), or with backend inductor alone",
            )


class GraphStepper:
    """The captured and transformed graph itself, run op by op in PyTorch: what is wrong there, no lowering did.

    Args:
        without: names of passes that are left out.
    """

    def __init__(
        self,
        train_step: TrainStep,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        backend: str,
        strategies: Sequence[Strategy],
        without: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.captured: Captured | None = None
        self.seconds = 0.0  # nothing is lowered
        self._train_step, self._backend, self._strategies, self._without = train_step, backend, strategies, without
        self._state = TrainState(model, optimizer)

    def __call__(self, batch: Any) -> Any:
        """Take one step."""
        state, leaves = self._state, batch_leaves(batch)[0]
        if self.captured is None:
            self.captured = capture(
                self._train_step,
                state,
                self.optimizer,
                batch,
                decompositions(self._backend, state),
                backend=self._backend,
                strategies={each.name: each for each in self._strategies},
                without=self._without,
            )
        captured = self.captured
        with torch.no_grad():
            flat = captured.graph(*state.tensors(), *state.learning_rates(), *leaves, *captured.constants)
        results = [each.clone() for each in flat]
        state.load(results[: captured.num_state])
        return captured.outputs.rebuild(results[captured.num_state :])


def decompositions(backend: str, state: TrainState) -> Mapping[Any, Callable[..., Any]]:
    """Return the table that a backend wants its graphs decomposed with."""
    if backend == "inductor":
        from twinstep.worker.compile.lower.inductor import InductorBackend

        return InductorBackend(state, cache_dir=None).decompositions()
    from twinstep.worker.compile.lower.xla import XlaBackend

    return XlaBackend(state, cache_dir=None).decompositions()


class Pair:
    """A candidate: a stepper that trains and, where gradients are looked at, one that shows them too."""

    def __init__(self, settings: Settings, backend: str, model: nn.Module, optimizer: Optimizers, make: Make) -> None:
        self.backend = backend
        self._settings = settings
        self._trained = make(settings.train_step, *copy.deepcopy((model, optimizer)))
        self._shown: Stepper | None = None
        if settings.gradients is not None:
            shown = watching(settings.train_step, settings.gradients)
            self._shown = make(shown, *copy.deepcopy((model, optimizer)))

    @property
    def seconds(self) -> float:
        """Seconds that compiling took."""
        return self._trained.seconds + (self._shown.seconds if self._shown else 0.0)

    def advance(self, step: int) -> Snapshot:
        """Take step number `step`, from 0."""
        result = self._take(self._trained, step)
        gradients = {} if self._shown is None else self._take(self._shown, step)[1]
        return Snapshot(named_outputs(result), gradients, state_of(self._trained.model, self._trained.optimizer))

    def _take(self, stepper: Stepper, step: int) -> Any:
        self._settings.begin(step, stepper.model, stepper.optimizer)
        return stepper(self._settings.batch(step))

    def order(self) -> dict[Name, int]:
        """Return where in its graph each tensor is computed; the graph with gradients knows all of them."""
        captured = (self._shown or self._trained).captured
        if captured is None:
            return {}
        position = {node: index for index, node in enumerate(captured.graph.graph.nodes)}
        results: Any = captured.graph.graph.output_node().args[0]
        at = [position[node] for node in results]
        found: dict[Name, int] = {}
        for slot, index in zip(captured.context.slots, at, strict=False):
            found[slot.role, slot.name] = index
        tree = captured.outputs.rebuild(at[captured.num_state :])  # type: ignore[arg-type]
        result, gradients = (tree, {}) if self._shown is None else tree
        outputs = named_outputs(result)
        for path, index in outputs.items():
            for kind in ("loss", "output"):
                found[kind, path] = index
        found.update({("gradient", name): index for name, index in gradients.items()})
        return found
