"""`compile`: one step, compiled now, as a Runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from twinstep.spec.placement import Mesh
from twinstep.worker.compile.runner import Runner
from twinstep.worker.compile.state import Optimizers, as_mapping
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.compile.strategies import Strategy
from twinstep.worker.compile.structure import TrainStep


def compile(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizers,
    example_batch: Any,
    *,
    target: Literal["inductor", "xla"] = "inductor",
    strategies: Sequence[Strategy | str] | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    batch_dims: Mapping[str, int] | None = None,
    cache_dir: str | Path | None = None,
    check_finite: bool = False,
) -> Runner:
    """Compile the whole training step (forward, backward, update) for batches like `example_batch`.

    Args:
        train_step: `(model, optimizer, batch) → outputs`, plain PyTorch: zero_grad, forward, backward, step.
        model: any module; parameters, buffers and what the optimizers keep become the program's state.
        optimizer: one, several by name, or None for a step that only evaluates (called as `(model, batch)`).
        example_batch: any nesting of tensors; shapes, dtypes and structure count, and later batches must have them.
        target: `inductor` (CPU, GPU) or `xla` (CPU, TPU).
        strategies: what to ask of the compiler, by value or by name; None: `twinstep.strategies.DEFAULT_STRATEGIES`.
        mesh: devices to spread the step over, `{"data": 8}`; with xla.
        batch_dims: position of the batch dimension by batch leaf; None: found.
        cache_dir: directory of the cache on disk; None: no cache.
        check_finite: have the Runner refuse a batch that holds NaN or an infinity, at the cost of reading all its
            numbers before each step.

    Raises:
        CompileError: the step cannot be captured or lowered; model and optimizer are as they were. A CaptureError, its
            subclass, names the line of the step.
        DataError: the batch holds what the backend cannot, integers beyond 32 bits on xla for one.
    """
    with _unless_refused(optimizer):
        compiler = StepCompiler(
            train_step,
            model,
            optimizer,
            backend=target,
            strategies=strategies,
            mesh=mesh,
            batch_dims=batch_dims,
            cache_dir=cache_dir,
            check_finite=check_finite,
        )
        return compiler.runner(example_batch)


@contextmanager
def _unless_refused(optimizer: Optimizers) -> Iterator[None]:
    """Keep the state that optimizers are given within, unless an exception leaves: then they have what they had."""
    optimizers = list(as_mapping(optimizer).values())
    had = [{parameter: set(entries) for parameter, entries in each.state.items()} for each in optimizers]
    try:
        yield
    except BaseException:
        for each, before in zip(optimizers, had, strict=True):
            for parameter in list(each.state):
                for entry in set(each.state[parameter]) - before.get(parameter, set()):
                    del each.state[parameter][entry]
                if parameter not in before:
                    del each.state[parameter]
        raise
