"""Gradients that add up over calls: `.grad` of optimized parameters as slots of the state.

A step of the usual shape drops old gradients before backward(), and has none of this. Where a step adds to gradients
of the step before it, or leaves some that no update took, capture says so (GradientsMatter), and the state is lifted
again with a slot for each. A gradient that is None goes in as zeros: backward() makes the same of both. Where the step
could tell them apart (an optimizer passes over None, and decays weights at zeros) None is built into the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twinstep.spec.errors import CaptureError

aten = torch.ops.aten

Left = tuple[bool | None, ...]
"""What a step leaves in each gradient's slot: True a tensor, False None, None what was there before."""


class GradientsMatter(CaptureError):
    """The step reads or leaves gradients that the state has no slots for; who can lift it again does so."""

    def __init__(self, exact: frozenset[str] = frozenset(), *, always: bool = True) -> None:
        super().__init__(
            "the step adds to gradients of the step before it, or leaves some for the next",
            remedy="compile it with a StepCompiler, or call optimizer.zero_grad() in the step, before backward()",
        )
        self.exact = exact
        """Parameters for which the step tells a gradient of None from one of zeros."""
        self.always = always
        """Whether so at any start, not just because there are gradients now."""


class LiveGradients:
    """The `.grad` of the live parameters, with zeros in place of None.

    Args:
        parameters: by name, those whose gradients are slots.
        exact: names of those where a program is made for None, or for a tensor.
    """

    def __init__(self, parameters: Mapping[str, Tensor], exact: frozenset[str]) -> None:
        self.parameters = parameters
        self.exact = exact
        self._zeros: dict[str, Tensor] = {}

    def live(self) -> list[Tensor]:
        """Return the gradients, in the order of `parameters`."""
        found = []
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._zeros.pop(name, None)
                found.append(parameter.grad)
            else:
                if name not in self._zeros:
                    self._zeros[name] = torch.zeros_like(parameter, requires_grad=False)
                found.append(self._zeros[name])
        return found

    def absent(self) -> frozenset[str]:
        """Return the names in `exact` whose gradient is None now."""
        return frozenset(name for name in self.exact if self.parameters[name].grad is None)

    def look(self) -> tuple[Any, ...]:
        """Return what of the gradients decides which program is wanted: who is None, and how the others lie."""
        grads = [parameter.grad for parameter in self.parameters.values()]
        return self.absent(), tuple(None if grad is None or grad.is_contiguous() else grad.stride() for grad in grads)

    def leave(self, left: Left) -> None:
        """Set each `.grad` to what a step left; tensors were written in place, or are elsewhere until a pull."""
        for (name, parameter), holds in zip(self.parameters.items(), left, strict=True):
            if holds and parameter.grad is None:
                parameter.grad = self._zeros.pop(name)
            elif holds is False:
                parameter.grad = None


@dataclass(frozen=True, slots=True)
class GradientInTrace:
    """A gradient of the trace: what its slot gave, and what `.grad` started as."""

    parameter: Tensor
    given: Tensor
    start: Tensor | None
    version: int

    @classmethod
    def put(cls, parameter: Tensor, given: Tensor, *, absent: bool) -> GradientInTrace:
        """Let `parameter.grad` start as `given`, or as None."""
        start = None if absent else given.clone()
        parameter.grad = start
        return cls(parameter, given, start, 0 if start is None else start._version)

    def left(self) -> bool | None:
        """Say what the step left, as `Left` does."""
        now = self.parameter.grad
        if now is self.start and (now is None or now._version == self.version):
            return None
        return now is not None

    def value(self, *, zeroed: bool) -> Tensor:
        """Return the slot's new value; `zeroed`: zeros where the step left None, else whatever was there."""
        if self.left() is None:
            return self.given
        if self.parameter.grad is None:
            return torch.zeros_like(self.given) if zeroed else self.given
        return self.parameter.grad.detach()


def put_markers(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, int, int]]:
    """Let each `.grad` start as an empty tensor that `reads_markers` finds; for a state without gradients."""
    markers = []
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
        markers.append((parameter, parameter.grad, parameter.grad._version, parameter._version))
    return markers


def leaves_some(markers: Sequence[tuple[Tensor, Tensor, int, int]]) -> bool:
    """Say whether the step left a gradient of its own and no update: it is meant for a step after it."""
    return any(
        parameter.grad is not None
        and (parameter.grad is not marker or marker._version != version)
        and parameter._version == before
        for parameter, marker, version, before in markers
    )


def reads_markers(graph: fx.GraphModule, *, count: int) -> bool:
    """Say whether the step reads gradients of the step before.

    The `.grad` of each optimized parameter starts as an `empty_like`, the first `count` of them in the graph; a step
    may drop it or overwrite it with zeros, nothing else.
    """
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    markers = [node for node in position if node.target is aten.empty_like.default][:count]
    first_users = [min(node.users, key=position.__getitem__) for node in markers if node.users]
    return any(user.target not in (aten.zero_.default, aten.detach_.default) for user in first_users)


def told_apart(graph: fx.GraphModule, names: Sequence[str], first: int) -> frozenset[str]:
    """Return the parameters for which the step may tell a gradient of None from zeros.

    Not where nothing reads it, or where backward() adds to it before anything else does.

    Args:
        graph: the first trace.
        names: of the parameters whose gradients are slots.
        first: position of the first of those slots among the placeholders.
    """
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    placeholders = [node for node in position if node.op == "placeholder"]
    return frozenset(
        name
        for name, placeholder in zip(names, placeholders[first : first + len(names)], strict=True)
        if any(_tells(start, position) for start in placeholder.users if start.target is aten.clone.default)
    )


def _tells(start: fx.Node, position: Mapping[fx.Node, int]) -> bool:
    for user in sorted(start.users, key=position.__getitem__):
        if user.target in (aten.zero_.default, aten.detach_.default):
            continue
        stage = user.meta.get("custom", {}).get("stage")
        return not (user.target in (aten.add_.Tensor, aten.add.Tensor) and stage == "backward")
    return any(user.target is aten.zero_.default for user in start.users)


def trainable(groups: Iterator[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the trainable parameters of optimizers' groups by name, each once."""
    held = [parameter for group in groups for parameter in group["params"]]
    return {names[id(each)]: each for each in held if each.requires_grad}
