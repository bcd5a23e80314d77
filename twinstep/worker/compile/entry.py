"""`compile`: one step, compiled now, as a Runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from twinstep.spec.placement import Mesh
from twinstep.worker.compile.capture import TrainStep
from twinstep.worker.compile.runner import Runner
from twinstep.worker.compile.state import Optimizers
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.compile.strategies import Strategy


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

    Raises:
        CompileError: the step cannot be captured or lowered; model and optimizer are as they were. A CaptureError, its
            subclass, names the line of the step.
        DataError: the batch holds what the backend cannot, integers beyond 32 bits on xla for one.
    """
    compiler = StepCompiler(
        train_step,
        model,
        optimizer,
        backend=target,
        strategies=strategies,
        mesh=mesh,
        batch_dims=batch_dims,
        cache_dir=cache_dir,
    )
    return compiler.runner(example_batch)
