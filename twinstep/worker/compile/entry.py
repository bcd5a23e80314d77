"""`compile`: one step, compiled now, as a Runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from twinstep.worker.compile.capture import TrainStep
from twinstep.worker.compile.placement import Mesh
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
    cache_dir: Path | None = None,
) -> Runner:
    """Compile the whole training step (forward, backward, update) for batches like `example_batch`.

    `strategies`, `mesh` and `batch_dims` are StepCompiler's.

    Raises:
        CompileError: the step cannot be captured or lowered; model and optimizer are as they were.
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
