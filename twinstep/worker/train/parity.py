"""Parity of a job spec: its model, data and optimizers, a few steps of each backend beside eager PyTorch.

`twinstep parity` calls `parity_spec`; the comparison itself is `worker/compile/parity/`. Reports to nobody but the
caller: no run is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.worker.train.environment import prepare_environment, usable_processors

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from twinstep.worker.compile import ParityReport


def parity_spec(
    spec: JobSpec,
    *,
    backends: Sequence[Literal["inductor", "xla"]] = ("inductor", "xla"),
    steps: int = 20,
    gradients: bool = True,
    bisect: bool = True,
    console: Console | None = None,
) -> ParityReport:
    """Compare the step that `spec` trains on each of `backends` with eager PyTorch, in this process.

    All backends start from the spec's own first parameters and see its first `steps` batches. No compile cache is
    read or written: what is compared is compiled now.

    Args:
        gradients: look at gradients too; each backend then compiles twice.
        bisect: on a divergence, look for the pass or strategy that brings it.
        console: where progress is drawn; None draws nothing.

    Raises:
        TwinstepError: the spec asks for what is not here, data is missing, or the step cannot be compiled.
    """
    if "xla" in backends and spec.model.draws:
        drawn = {name: getattr(spec.model, name, 0) for name in ("dropout", "input_dropout", "attention_dropout")}
        said = ", ".join(f"model.{name} is {value:g}" for name, value in drawn.items() if value)
        raise SpecError(
            f"{said}: XLA draws other masks than PyTorch, so steps cannot be compared",
            remedy="set every dropout of the model to 0, or --backend inductor, which draws PyTorch's own",
        )
    for backend in backends:
        uncached = spec.compile.model_copy(update={"backend": backend, "cache": False})
        prepare_environment(spec.model_copy(update={"compile": uncached}))
    import torch

    from twinstep.worker.compile import parity
    from twinstep.worker.data.datasets import load_dataset
    from twinstep.worker.data.loader import Loader
    from twinstep.worker.embedding.optim import build_optimizers
    from twinstep.worker.models.registry import build_model
    from twinstep.worker.train.asked import strategies_of
    from twinstep.worker.train.step import make_train_step

    torch.set_num_threads(spec.runtime.threads or usable_processors())
    dataset = load_dataset(spec.data)
    loader = Loader(dataset, spec.data, seed=spec.train.seed)
    model = build_model(spec, dataset.schema)
    if "xla" in backends:
        _refuse_dropout(model)
    with _progress(console, steps) as say:
        return parity(
            make_train_step(clip_norm=spec.train.clip_norm),
            model,
            build_optimizers(spec.optimizers, model),
            (loader.train_batch(step)[0] for step in range(steps)),
            backends=backends,
            steps=steps,
            strategies=strategies_of(spec.compile),
            gradients="all" if gradients else None,
            seed=spec.train.seed,
            bisect=bisect,
            name=spec.name,
            on_progress=say,
        )


def _refuse_dropout(model: nn.Module) -> None:
    """Raise where a user's module drops values by a layer; built-in models say so in their spec.

    That is a layer of dropout, or one that has a number `dropout`, as attention and LSTMs of torch's have.
    """
    from torch.nn.modules.dropout import _DropoutNd

    for name, module in model.named_modules():
        field = "p" if isinstance(module, _DropoutNd) else "dropout"
        share = getattr(module, field, None)
        if isinstance(share, int | float) and not isinstance(share, bool) and share > 0:
            raise SpecError(
                f"{name.removeprefix('module.')} drops values ({field} {share:g}): XLA draws other masks than PyTorch, "
                "so steps cannot be compared",
                remedy=f"set its {field} to 0, by model.arguments say; or --backend inductor, which draws PyTorch's",
            )


@contextlib.contextmanager
def _progress(console: Console | None, steps: int) -> Iterator[Callable[[str, int], None]]:
    """Yield what draws progress: a bar in a terminal, else a line whenever something slow begins."""
    if console is None:
        yield lambda what, step: None
        return
    if not console.is_terminal:
        yield lambda what, step: console.print(what) if "(" in what or " " in what else None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=steps)
        yield lambda what, step: bar.update(task, description=what, completed=step)
