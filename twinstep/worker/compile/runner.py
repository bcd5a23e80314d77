"""Stage 6, run and commit: a Runner is one compiled step; a StepCompiler keeps one per CompileKey and says why.

compiler = StepCompiler(train_step, model, optimizers, backend="inductor", on_event=print)
outputs = compiler(batch)      # compiles at a key not seen before, then runs
compiler.pull()                # before reading model.state_dict(): with XLA the state lives on the device
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.utils._pytree as pytree
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.capture import Captured, TrainStep, batch_leaves, capture
from twinstep.worker.compile.key import (
    CompileKey,
    ambient,
    code_digest,
    cpu_threads,
    module_settings,
    named_sizes,
    reason,
    state_info,
    tensor_info,
    versions,
)
from twinstep.worker.compile.state import Optimizers, TrainState
from twinstep.worker.compile.strategies import Strategy, resolve

BackendName = Literal["inductor", "xla", "eager"]
MAX_RUNNERS = 8  # programs kept in memory; an executable and its workspace are tens of MB


class Program(Protocol):
    """What a backend makes of a captured step."""

    from_cache: bool

    def __call__(self, rates: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]: ...


class Backend(Protocol):
    """What lowers captured steps and owns their state between steps."""

    name: str

    def decompositions(self) -> dict[Any, Callable[..., Any]]: ...

    def lower(self, captured: Captured) -> Program: ...

    def pull(self) -> None: ...

    def push(self) -> None: ...

    def go_on_from(self, before: Any) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileEvent:
    """One compile: why, how long, and whether a cache answered."""

    name: Literal["compiled", "recompiled"]
    reason: str
    seconds: float
    capture_seconds: float
    backend: str
    from_cache: bool
    key: str
    nodes: int
    sizes: dict[str, int] = field(default_factory=dict)


class Runner:
    """One compiled step, for batches of one shape.

    Calling it runs forward, backward and update, commits the new state, and returns the step's outputs in the
    structure the user's function returned them in.
    """

    def __init__(
        self,
        program: Program,
        captured: Captured,
        lifted: _Lifted,
        model: nn.Module,
        key: CompileKey,
        batch_spec: pytree.TreeSpec,
    ) -> None:
        self.key = key
        self.captured = captured
        self._program = program
        self._lifted = lifted
        self._model = model
        self._batch_spec = batch_spec
        self._standing = standing(lifted.state, model)

    def __call__(self, batch: Any) -> Any:
        """Run one step on `batch`.

        Raises:
            CompileError: the batch, or the model and optimizer, differ from what this was compiled for; nothing was
                changed.
        """
        now = standing(self._lifted.state, self._model)
        if now != self._standing:
            was = dataclasses.replace(self.key, **self._standing)
            raise CompileError(
                f"compiled for something else: {reason(was, dataclasses.replace(self.key, **now))}",
                remedy="undo the change, compile anew, or use a StepCompiler, which compiles again by itself",
            )
        return self.run(batch)

    def run(self, batch: Any) -> Any:
        """Run one step on `batch`, for a caller that knows that model and optimizer are as they were.

        Raises:
            CompileError: the batch differs from the example in structure, shape or dtype; nothing was changed.
        """
        leaves, paths, spec = batch_leaves(batch)
        if spec != self._batch_spec:
            raise CompileError(
                "the batch's structure differs from the example's", remedy="give the fields the example had"
            )
        for path, leaf, (_, shape, dtype) in zip(paths, leaves, self.key.batch, strict=True):
            if tensor_info(path, leaf)[1:] != (shape, dtype):
                raise CompileError(
                    f"batch leaf {path} is {list(leaf.shape)} {leaf.dtype}, compiled for {list(shape)} {dtype}",
                    remedy="pad to the compiled shape, or call the StepCompiler, which compiles again",
                )
        outputs = self._program(self._lifted.state.learning_rates(), leaves)
        return self.captured.outputs.rebuild(outputs)

    def pull(self) -> None:
        """Bring the live model and optimizers up to date; with backends that work in place, nothing is to do."""
        self._lifted.backend.pull()

    def push(self) -> None:
        """Take the state from the live model and optimizers, whatever was written to them and how (`.data` too)."""
        self._lifted.backend.push()


class StepCompiler:
    """Compiles a train step for each shape it meets; all its programs share one state.

    Args:
        train_step: `(model, optimizer, batch) → outputs`, plain PyTorch: zero_grad, forward, backward, step.
        optimizer: one, several by name, or None for a step that only evaluates (called as `(model, batch)`).
        backend: what lowers the graph; `eager` calls `train_step` as it is.
        strategies: what to ask of the compiler; None: DEFAULT_STRATEGIES.
        cache_dir: directory of the cache on disk; None: no cache.
        in_place: False writes no new state over old inside the program: slower, and without a cache on disk; for
            finding faults.
        on_start: called with the reason before each compile.
        on_event: called with a CompileEvent after each compile.
    """

    def __init__(
        self,
        train_step: TrainStep,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        backend: BackendName = "inductor",
        devices: int = 1,
        strategies: Sequence[Strategy | str] | None = None,
        cache_dir: Path | None = None,
        in_place: bool = True,
        on_start: Callable[[str], None] | None = None,
        on_event: Callable[[CompileEvent], None] | None = None,
        max_runners: int = MAX_RUNNERS,
    ) -> None:
        self._step = train_step
        self._model = model
        self._optimizer = optimizer
        self._devices = devices
        self._strategies = resolve(strategies)
        self._on_start = on_start
        self._on_event = on_event
        self._max_runners = max_runners
        self._cache_dir = cache_dir if in_place else None
        self._in_place = in_place
        self._runners: OrderedDict[CompileKey, Runner] = OrderedDict()
        self._last: CompileKey | None = None
        self.backend_name = backend
        self.compile_seconds = 0.0
        # Eager steps live on the model and the optimizers themselves; nothing is lifted out.
        self._lifted = None if backend == "eager" else self._lift()
        self._code = code_digest(train_step, *(type(module).forward for module in model.modules()))
        self._versions = versions(_STACK[backend])

    def __call__(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Any:
        """Run one step, compiling first at a key not seen before; `sizes` names the batch's sizes for the reason."""
        return self.program(batch, sizes=sizes)(batch)

    def program(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Callable[[Any], Any]:
        """Return what runs a step on batches like `batch`: a Runner, or with the eager backend the step itself."""
        return self._run_eager if self._lifted is None else self.runner(batch, sizes=sizes).run

    def _run_eager(self, batch: Any) -> Any:
        arguments = (self._model, batch) if self._optimizer is None else (self._model, self._optimizer, batch)
        return pytree.tree_map_only(Tensor, Tensor.detach, self._step(*arguments))

    def runner(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Runner:
        """Return the Runner for batches like `batch`, compiled now unless there is one.

        Raises:
            CompileError: the step cannot be captured or lowered; model and optimizer are as they were.
        """
        lifted = self._lift_again_where_outdated()
        key = self.key(batch, sizes=sizes)
        if key in self._runners:
            self._runners.move_to_end(key)
            self._last = key
            return self._runners[key]
        why = reason(self._last, key)
        if self._on_start:
            self._on_start(why)
        started = time.perf_counter()
        captured = capture(
            self._step,
            lifted.state,
            self._optimizer,
            batch,
            lifted.backend.decompositions(),
            backend=lifted.backend.name,
            strategies=self._strategies,
        )
        capture_seconds = time.perf_counter() - started
        program = lifted.backend.lower(captured)
        seconds = time.perf_counter() - started
        runner = Runner(program, captured, lifted, self._model, key, batch_leaves(batch)[2])
        event = CompileEvent(
            name="compiled" if self._last is None else "recompiled",
            reason=why,
            seconds=seconds,
            capture_seconds=capture_seconds,
            backend=lifted.backend.name,
            from_cache=program.from_cache,
            key=key.digest,
            nodes=len(captured.graph.graph.nodes),
            sizes=dict(key.sizes),
        )
        self._remember(key, runner)
        self.compile_seconds += seconds
        if self._on_event:
            self._on_event(event)
        return runner

    def key(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> CompileKey:
        """Return the CompileKey of a step on `batch` as model and optimizers stand now."""
        state = self._need_lifted().state
        leaves, paths, _ = batch_leaves(batch)
        return CompileKey(
            sizes=named_sizes(sizes),
            devices=self._devices,
            **standing(state, self._model),
            batch=tuple(tensor_info(path, leaf) for path, leaf in zip(paths, leaves, strict=True)),
            backend=self.backend_name,
            strategies=tuple(sorted(repr(each) for each in self._strategies.values())),
            step=self._code,
            threads=cpu_threads(),
            versions=self._versions,
        )

    def pull(self) -> None:
        """Bring the live model and optimizers up to date; with backends that work in place, nothing is to do."""
        if self._lifted is not None:
            self._lifted.backend.pull()

    def push(self) -> None:
        """Take the state from the live model and optimizers, whatever was written to them and how (`.data` too)."""
        if self._lifted is not None:
            self._lifted.backend.push()

    def _lift_again_where_outdated(self) -> _Lifted:
        """Return the lifted state, found anew after a parameter was frozen or a parameter group added.

        Programs made for the old slots go.
        """
        lifted = self._need_lifted()
        if lifted.state.outdated():
            lifted.backend.pull()
            self._runners.clear()
            before, lifted = lifted, self._lift()
            lifted.backend.go_on_from(before.backend)
            self._lifted = lifted
        return lifted

    def _lift(self) -> _Lifted:
        return _Lifted.of(
            self._model, self._optimizer, self.backend_name, cache_dir=self._cache_dir, in_place=self._in_place
        )

    @property
    def state(self) -> TrainState:
        """The state that was lifted out of model and optimizers."""
        return self._need_lifted().state

    def _need_lifted(self) -> _Lifted:
        if self._lifted is None:
            raise CompileError("the eager backend compiles nothing", remedy="call the StepCompiler itself")
        return self._lifted

    def _remember(self, key: CompileKey, runner: Runner) -> None:
        self._runners[key] = runner
        self._last = key
        while len(self._runners) > self._max_runners:
            self._runners.popitem(last=False)


def compile(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizers,
    example_batch: Any,
    *,
    target: Literal["inductor", "xla"] = "inductor",
    strategies: Sequence[Strategy | str] | None = None,
    cache_dir: Path | None = None,
) -> Runner:
    """Compile the whole training step (forward, backward, update) for batches like `example_batch`.

    Raises:
        CompileError: the step cannot be captured or lowered; model and optimizer are as they were.
    """
    compiler = StepCompiler(train_step, model, optimizer, backend=target, strategies=strategies, cache_dir=cache_dir)
    return compiler.runner(example_batch)


def standing(state: TrainState, model: nn.Module) -> dict[str, Any]:
    """Return the fields of a key that model, optimizers and surroundings decide, as they stand now."""
    return {
        "state": state_info(state),
        "hyperparameters": state.hyperparameters(),
        "modules": module_settings(model),
        "ambient": ambient(),
    }


_STACK = {"inductor": ("torch",), "xla": ("torch", "torchax", "jax", "jaxlib"), "eager": ("torch",)}


@dataclass(frozen=True, slots=True)
class _Lifted:
    """The state that was lifted out of model and optimizers, and the backend that holds it between steps."""

    state: TrainState
    backend: Backend

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: Optimizers, name: BackendName, *, cache_dir: Path | None, in_place: bool
    ) -> _Lifted:
        state = TrainState(model, optimizer)
        # Each backend's stack takes seconds to import, so only the one asked for is.
        if name == "inductor":
            from twinstep.worker.compile.lower.inductor import InductorBackend

            return cls(state, InductorBackend(state, cache_dir=cache_dir and cache_dir / "inductor", in_place=in_place))
        from twinstep.worker.compile.lower.xla import XlaBackend

        return cls(state, XlaBackend(state, cache_dir=cache_dir and cache_dir / "xla", in_place=in_place))
