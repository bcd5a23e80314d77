"""Run optimizer updates as torch's fused kernels, in place on the live state; `updates.py` says which ones may.

`Updates` is called after everything that can fail has run: nothing of the state was changed by it before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinstep.worker.compile.updates import Group

Kernel = Callable[..., None]


def _adam(kernel: Kernel) -> Kernel:
    def run(
        parameters: list[Tensor], gradients: list[Tensor], entries: Mapping[str, list[Tensor]], **settings: Any
    ) -> None:
        largest = entries.get("max_exp_avg_sq", [])
        kernel(parameters, gradients, entries["exp_avg"], entries["exp_avg_sq"], largest, entries["step"], **settings)

    return run


def _sgd(
    parameters: list[Tensor], gradients: list[Tensor], entries: Mapping[str, list[Tensor]], **settings: Any
) -> None:
    # State starts from zeros, from which a first step is like any other.
    torch._fused_sgd_(parameters, gradients, entries.get("momentum_buffer", []), is_first_step=False, **settings)


def _adagrad(
    parameters: list[Tensor], gradients: list[Tensor], entries: Mapping[str, list[Tensor]], **settings: Any
) -> None:
    torch._fused_adagrad_(parameters, gradients, entries["sum"], entries["step"], **settings)


RUN: dict[str, Kernel] = {
    "adam": _adam(torch._fused_adam_),
    "adamw": _adam(torch._fused_adamw_),
    "sgd": _sgd,
    "adagrad": _adagrad,
}
"""By the name a Group has for its kernel."""


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates that follow a compiled graph."""

    groups: tuple[Group, ...] = ()

    @property
    def num_gradients(self) -> int:
        """Outputs of the graph that are gradients."""
        return sum(len(group.gradients) for group in self.groups)

    def __call__(self, state: Sequence[Tensor], rates: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update `state`, all of it, by slot, with the gradients that the graph gave."""
        for group in self.groups:
            parameters = [state[slot] for slot in group.parameters]
            given = [
                _as_laid_out(gradients[at], parameter)
                for at, parameter in zip(group.gradients, parameters, strict=True)
            ]
            entries = {entry: [state[slot] for slot in slots] for entry, slots in group.entries.items()}
            if "step" in entries:
                torch._foreach_add_(entries["step"], 1)
                entries["step"] = _beside(parameters[0], entries["step"])
            RUN[group.kernel](parameters, given, entries, lr=rates[group.rate], **group.settings)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the groups as JSON values."""
        return [dataclasses.asdict(group) for group in self.groups]

    @classmethod
    def from_json(cls, found: Sequence[Mapping[str, Any]]) -> Updates:
        """Return what `as_json` wrote."""
        return cls(
            tuple(
                Group(
                    kernel=each["kernel"],
                    rate=each["rate"],
                    settings=dict(each["settings"]),
                    parameters=tuple(each["parameters"]),
                    gradients=tuple(each["gradients"]),
                    entries={entry: tuple(slots) for entry, slots in each["entries"].items()},
                )
                for each in found
            )
        )


def _as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the parameter's layout: the kernels walk both by address."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _beside(parameter: Tensor, steps: list[Tensor]) -> list[Tensor]:
    """Return step counts where a kernel on the parameter's device reads them; `torch.optim` keeps them on the host.

    A kernel for CUDA is given their addresses, and would read the host's memory. They go over in one copy.
    """
    if all(each.device == parameter.device for each in steps):
        return steps
    return list(torch.stack([each.cpu() for each in steps]).to(parameter.device).unbind())
