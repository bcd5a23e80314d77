"""`parity`: eager PyTorch and compiled backends side by side, from copies of one state, compared after every step.

All in one process and in step: each batch goes to eager, then to each backend, and what they hold is compared and
forgotten, so that memory is that of a few copies of the model whatever the number of steps. A backend compiles twice
where gradients are looked at: once as it would train, which is what outputs and state are read from, and once with the
gradients as outputs; making them outputs keeps them from being fused away, and the program that trains must be the one
that is held to eager.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.key import versions
from twinstep.worker.compile.lifted import BackendName
from twinstep.worker.compile.parity.bisect import find_culprit
from twinstep.worker.compile.parity.compare import TOLERANCES, Tolerances
from twinstep.worker.compile.parity.result import BackendReport, ParityReport
from twinstep.worker.compile.parity.steppers import CompiledStepper, Pair
from twinstep.worker.compile.parity.trial import Between, Eager, Ledger, Settings
from twinstep.worker.compile.parity.watch import Gradients, wanted
from twinstep.worker.compile.state import Optimizers
from twinstep.worker.compile.strategies import MixedPrecision, Strategy, resolve
from twinstep.worker.compile.structure import TrainStep

Say = Callable[[str, int], None]


def parity(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizers,
    batches: Iterable[Any],
    backends: Sequence[BackendName] = ("inductor", "xla"),
    steps: int = 20,
    tolerances: Mapping[tuple[str, torch.dtype], Tolerances] | None = None,
    gradients: Gradients = "all",
    *,
    strategies: Sequence[Strategy | str] | None = None,
    exclude: Mapping[str, str] | None = None,
    between: Between | None = None,
    seed: int = 0,
    bisect: bool = True,
    name: str = "step",
    on_progress: Callable[[str, int], None] | None = None,
) -> ParityReport:
    """Hold compiled backends to eager PyTorch, tensor by tensor, after each of `steps` steps from one state.

    `model` and `optimizer` are copied and stay as they are. Losses are the outputs with `loss` in their path, or a
    sole scalar output; gradients are those `optimizer.step()` reads, after clipping.

    Args:
        batches: as many as there are; they are gone through again where they are fewer than `steps`.
        tolerances: rows that take the place of those of TOLERANCES, by backend and dtype.
        gradients: "all", patterns (fnmatch) of parameters' names, or None for no look at them and half the compiles.
        strategies: as `twinstep.compile` takes them.
        exclude: pattern (fnmatch) of `kind:name` → why tensors of that name are not held to their tolerance.
        between: called as `(step, model, optimizer)` before each step of each copy: a schedule of learning rates.
        seed: torch's generator starts each step from `seed + step`.
        bisect: on a divergence, look for the pass or strategy that brings it.
        on_progress: called with what is done now and the steps that are complete.

    Raises:
        CompileError: no batches, steps or backends, patterns that name no parameter, a backend that cannot compile the
            step, or that draws other random numbers than eager.
    """
    unknown = [each for each in backends if each not in get_args(BackendName)]
    if unknown:
        raise CompileError(f"no backend is called {unknown[0]!r}", remedy=f"use {', '.join(get_args(BackendName))}")
    if isinstance(batches, Mapping | torch.Tensor):
        raise CompileError(
            f"batches is a {type(batches).__name__}, which is one batch", remedy="give a list of batches: [batch]"
        )
    examples = list(itertools.islice(batches, max(steps, 0)))
    if not backends:
        raise CompileError("there is nothing to compare with eager: no backend", remedy="name one: inductor, xla")
    if not examples:
        raise CompileError(
            "there is nothing to compare: no batch, or no step", remedy="give a batch and a step at least"
        )
    _check_patterns(model, gradients)
    asked = resolve(strategies)
    settings = Settings(
        train_step=train_step,
        batches=examples,
        steps=steps,
        table={**TOLERANCES, **(tolerances or {})},
        gradients=None if optimizer is None else gradients,
        strategies=tuple(asked.values()),
        exclude=dict(exclude or {}),
        between=between,
        seed=seed,
        narrow=torch.bfloat16 if MixedPrecision.name in asked else None,
    )
    say = on_progress or (lambda what, step: None)
    reports = _compare(settings, model, optimizer, backends, say)
    if bisect:
        reports = [_with_culprit(settings, model, optimizer, each, say) for each in reports]
    stack = ("torch", "torchax", "jax") if "xla" in backends else ("torch",)
    return ParityReport(
        name=name, steps=steps, backends=tuple(reports), threads=torch.get_num_threads(), versions=dict(versions(stack))
    )


def _check_patterns(model: nn.Module, gradients: Gradients) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in () if gradients is None or isinstance(gradients, str) else gradients:
        if not any(wanted(name, [pattern]) for name in names):
            raise CompileError(
                f"no parameter is called {pattern!r}, whose gradient is to be compared",
                remedy=f"name some of {', '.join(names[:6])}{', …' if len(names) > 6 else ''}, or patterns (*.weight)",
            )
    if isinstance(gradients, str) and gradients != "all":
        raise CompileError(f"gradients is {gradients!r}", remedy='give "all", a list of names or patterns, or None')


def _compare(
    settings: Settings, model: nn.Module, optimizer: Optimizers, backends: Sequence[BackendName], say: Say
) -> list[BackendReport]:
    eager = Eager(settings, model, optimizer)
    sides = [
        Pair(settings, each, model, optimizer, partial(CompiledStepper, backend=each, strategies=settings.strategies))
        for each in backends
    ]
    ledgers = [Ledger(settings, each) for each in backends]
    for step in range(settings.steps):
        say("eager", step)
        want = eager.advance(step)
        for side, ledger in zip(sides, ledgers, strict=True):
            say(side.backend if step else f"{side.backend} (compiling)", step)
            ledger.add(side.advance(step), want, eager.noise)
    say("done", settings.steps)
    return [
        BackendReport(backend=side.backend, tensors=ledger.reports(side.order()), compile_seconds=side.seconds)
        for side, ledger in zip(sides, ledgers, strict=True)
    ]


def _with_culprit(
    settings: Settings, model: nn.Module, optimizer: Optimizers, report: BackendReport, say: Say
) -> BackendReport:
    found = report.first_divergent
    if found is None or report.backend == "eager":
        return report
    say(f"looking for the cause on {report.backend}", settings.steps)
    until = dataclasses.replace(settings, steps=found[0])
    return dataclasses.replace(report, culprit=find_culprit(until, model, optimizer, report.backend))
