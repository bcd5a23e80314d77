"""A step that also returns its gradients. They are no outputs of a compiled step; for parity they are made so.

The gradients are those that `optimizer.step()` reads: after clipping and whatever else the step does to `.grad`
between `backward()` and `step()`. Eager and compiled steps are wrapped alike, so one definition holds for both.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.worker.compile.state import as_mapping

Gradients = Literal["all"] | Sequence[str] | None
"""Which gradients to look at: all, those of parameters whose names match one of these patterns (fnmatch), or none."""


def wanted(name: str, gradients: Gradients) -> bool:
    """Say whether the gradient of the parameter `name` is asked for."""
    if gradients is None:
        return False
    return gradients == "all" or any(fnmatch.fnmatchcase(name, pattern) for pattern in gradients)


def watching(train_step: Callable[..., Any], gradients: Gradients) -> Callable[..., tuple[Any, dict[str, Tensor]]]:
    """Return a step whose result is `(result, {parameter's name: gradient})`."""

    def watched(model: nn.Module, *rest: Any) -> tuple[Any, dict[str, Tensor]]:
        optimizer = rest[0] if len(rest) > 1 else None  # a step without optimizer is called as (model, batch)
        with _recorded(model, as_mapping(optimizer), gradients) as found:
            result = train_step(model, *rest)
        return result, found

    return watched


@contextlib.contextmanager
def _recorded(
    model: nn.Module, optimizers: Mapping[str, Optimizer], gradients: Gradients
) -> Iterator[dict[str, Tensor]]:
    """Fill a mapping with the gradients of a block, each as its optimizer's step() meets it."""
    found: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def record(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None and parameter.grad is not None and wanted(name, gradients):
                    gradient = parameter.grad.detach()
                    found[name] = gradient.to_dense() if gradient.is_sparse else gradient.clone()

    handles = [optimizer.register_step_pre_hook(record) for optimizer in optimizers.values()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
