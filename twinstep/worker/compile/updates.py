"""Recognise optimizer updates in a captured graph, to run them as torch's own fused kernels on the live state.

What an update looks like in the graph is not written down here: for each parameter group, a model of one parameter is
captured with an optimizer of the same class and settings, and the graph of the step is held against that, node by
node. What matches in full is that update, and its gradient is the node that stands where the small model's does. All
else (another optimizer, a parameter stepped twice, settings that are tensors, a table with row updates) stays as it
is, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.capture import Captured, Decompositions, capture
from twinstep.worker.compile.dampening import is_dampened
from twinstep.worker.compile.state import TrainState


@dataclass(frozen=True, slots=True)
class Kernel:
    """How an optimizer's class is run by a fused kernel of torch."""

    name: str
    entries: tuple[str, ...]
    """State that the kernel updates, in the order it takes it; `step` counts are added to before."""
    settings: tuple[str, ...]
    """Settings of the parameter group that it takes, under the names it has for them."""


def _adam(settings: Mapping[str, Any]) -> Kernel:
    name = "adamw" if settings.get("decoupled_weight_decay") else "adam"
    largest = ("max_exp_avg_sq",) if settings["amsgrad"] else ()
    return Kernel(
        name,
        ("exp_avg", "exp_avg_sq", *largest, "step"),
        ("betas", "weight_decay", "eps", "amsgrad", "maximize"),
    )


def _sgd(settings: Mapping[str, Any]) -> Kernel:
    entries = ("momentum_buffer",) if settings["momentum"] else ()
    return Kernel("sgd", entries, ("weight_decay", "momentum", "dampening", "nesterov", "maximize"))


def _adagrad(_: Mapping[str, Any]) -> Kernel:
    return Kernel("adagrad", ("sum", "step"), ("lr_decay", "weight_decay", "eps", "maximize"))


KERNELS: dict[type[Optimizer], Callable[[Mapping[str, Any]], Kernel]] = {
    Adam: _adam,
    AdamW: _adam,
    SGD: _sgd,
    Adagrad: _adagrad,
}
"""Optimizers whose update torch has a fused kernel for."""


def has_kernel(name: str, device: str) -> bool:
    """Say whether this torch has the kernel for a kind of device: that of Adagrad is new on CUDA."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_fused_{name}_.tensor_lr", device.upper()))


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that one call of a fused kernel updates."""

    kernel: str
    """adam, adamw, sgd or adagrad."""
    rate: int
    """Which learning rate."""
    settings: dict[str, Any]
    """The kernel's keyword arguments but for the learning rate."""
    parameters: tuple[int, ...]
    """Slots of the state."""
    gradients: tuple[int, ...]
    """Positions among the outputs that `cut_updates` adds."""
    entries: dict[str, tuple[int, ...]]
    """Slots of each entry of the optimizer's state."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A captured step without the updates that run after it."""

    captured: Captured
    """Fused slots come out as they went in; gradients are outputs after the user's."""
    groups: tuple[Group, ...]


def cut_updates(captured: Captured, state: TrainState, decompositions: Decompositions) -> tuple[Cut, dict[str, Any]]:
    """Return the step less the updates that fused kernels can run, and what was found out.

    Args:
        captured: the step.
        state: where the optimizers and their settings are.
        decompositions: what `captured` was captured with.
    """
    placeholders = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    results: Any = captured.graph.graph.output_node().args[0]
    left: dict[str, list[str]] = {}
    gradients: list[fx.Node] = []
    groups: list[Group] = []
    settings = [(key, each) for key, optimizer in state.optimizers.items() for each in optimizer.param_groups]
    for rate, (key, group) in enumerate(settings):
        finder = _Finder(state.optimizers[key], group, decompositions)
        found = []
        for name, entries in _entries(captured, state, key, group):
            if results[entries["parameter"]] is placeholders[entries["parameter"]]:
                continue  # no gradient came to it
            gradient, why = finder.gradient(
                {entry: results[slot] for entry, slot in entries.items()},
                {entry: placeholders[slot] for entry, slot in entries.items()},
                placeholders[captured.num_state + rate],
            )
            if gradient is None:
                left.setdefault(why, []).append(name)
            else:
                found.append(entries)
                gradients.append(gradient)
        if found:
            groups.append(_group(finder.kernel, group, rate, found, len(gradients)))
    fused = {slot for group in groups for slots in (group.parameters, *group.entries.values()) for slot in slots}
    kept = [placeholders[index] if index in fused else result for index, result in enumerate(results)]
    notes = {"fused": [(group.kernel, len(group.parameters)) for group in groups], "left": left}
    return Cut(_with_outputs(captured, [*kept, *gradients]), tuple(groups)), notes


def _entries(
    captured: Captured, state: TrainState, key: str, group: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each parameter's name with the slots of itself (`parameter`) and of its optimizer's state."""
    slots = {slot.path: index for index, slot in enumerate(captured.context.slots)}
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for parameter in group["params"]:
        name = names[id(parameter)]
        entries = {entry: f"optimizer:{key}/{entry}/{name}" for entry in state.optimizers[key].state.get(parameter, {})}
        found = {"parameter": f"parameter:{name}", **entries}
        yield name, {entry: slots[path] for entry, path in found.items()}


def _with_outputs(captured: Captured, results: Sequence[fx.Node]) -> Captured:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(captured.graph.graph, new)
    graph.output(tuple(new[result] for result in results))
    graph.eliminate_dead_code()
    return dataclasses.replace(captured, graph=fx.GraphModule(captured.graph, graph))


def _group(
    kernel: Kernel, settings: Mapping[str, Any], rate: int, found: Sequence[Mapping[str, int]], stop: int
) -> Group:
    """Return the group of `found`, whose gradients are those up to `stop`."""
    chosen = {name: settings[name] for name in kernel.settings if name != "betas"}
    if "betas" in kernel.settings:
        chosen["beta1"], chosen["beta2"] = settings["betas"]
    return Group(
        kernel=kernel.name,
        rate=rate,
        settings=chosen,
        parameters=tuple(entries["parameter"] for entries in found),
        gradients=tuple(range(stop - len(found), stop)),
        entries={entry: tuple(entries[entry] for entries in found) for entry in kernel.entries},
    )


class _Finder:
    """Finds one parameter group's updates."""

    def __init__(self, optimizer: Optimizer, settings: Mapping[str, Any], decompositions: Decompositions) -> None:
        self._type, self._settings, self._decompositions = type(optimizer), dict(settings), decompositions
        self._patterns: dict[bool, _Pattern] = {}
        self._refused = _why_not(optimizer, settings)
        self.kernel = Kernel("", (), ()) if self._refused else KERNELS[self._type](settings)

    def gradient(
        self, new: Mapping[str, fx.Node], old: Mapping[str, fx.Node], rate: fx.Node
    ) -> tuple[fx.Node | None, str]:
        """Return the node of the gradient that a parameter is updated with, or None and why it is not fused.

        Args:
            new: results of the graph: `parameter`, and each entry of the optimizer's state.
            old: their placeholders.
            rate: the learning rate's.
        """
        if self._refused:
            return None, self._refused
        if not all(_plain(node.meta["val"]) for node in old.values()):
            return None, "is not contiguous float32"
        device = old["parameter"].meta["val"].device.type
        if not has_kernel(self.kernel.name, device):
            return None, f"has no fused kernel for {device} in this torch"
        if set(new) != {"parameter", *self.kernel.entries}:
            return None, "keeps other state than the fused kernel"
        alone = old["parameter"].meta["val"].dim() == 0  # a 0-d tensor's arithmetic has overloads of its own
        if alone not in self._patterns:
            self._patterns[alone] = _Pattern.of(self._type, self._settings, self._decompositions, alone)
        return self._patterns[alone].match(new, old, rate)


def _plain(value: Tensor) -> bool:
    return value.dtype is torch.float32 and value.is_contiguous()


def _why_not(optimizer: Optimizer, settings: Mapping[str, Any]) -> str:
    if type(optimizer) not in KERNELS:
        return f"{type(optimizer).__name__} has no fused kernel"
    if any(isinstance(value, Tensor) for name, value in settings.items() if name != "lr"):
        return "a setting is a tensor"
    if any(isinstance(each, Tensor) for each in settings.get("betas", ())):
        return "betas are tensors"
    if settings.get("differentiable"):
        return "the update is differentiated"
    if is_dampened(settings):
        return "dampening leaves the first step out"
    return ""


class _One(nn.Module):
    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _given_gradient(model: Any, optimizer: Any, gradient: Tensor) -> None:
    model.weight.grad = gradient
    optimizer.step()


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The update of a model of one parameter."""

    new: Mapping[str, fx.Node]
    old: Mapping[str, fx.Node]
    rate: fx.Node
    given: fx.Node
    """Where the gradient enters."""

    @classmethod
    def of(
        cls, kind: type[Optimizer], settings: dict[str, Any], decompositions: Decompositions, alone: bool
    ) -> _Pattern:
        model = _One(() if alone else (2,))
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        optimizer.param_groups[0].update({name: each for name, each in settings.items() if name != "params"})
        optimizer.param_groups[0]["lr"] = 0.1
        state = TrainState(model, optimizer)
        captured = capture(
            _given_gradient,
            state,
            optimizer,
            torch.zeros_like(model.weight),
            decompositions,
            backend="inductor",
            strategies={},
        )
        nodes = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
        results: Any = captured.graph.graph.output_node().args[0]
        names = ["parameter" if slot.role == "parameter" else slot.name.split("/")[1] for slot in state.slots]
        count = len(names)
        if captured.constants:
            raise CompileError("an update reads a constant", remedy="this is a bug; leave fused_update out")
        return cls(
            new=dict(zip(names, results, strict=False)),
            old=dict(zip(names, nodes, strict=False)),
            rate=nodes[count],
            given=nodes[count + 1],
        )

    def match(
        self, new: Mapping[str, fx.Node], old: Mapping[str, fx.Node], rate: fx.Node
    ) -> tuple[fx.Node | None, str]:
        """Return the gradient in an update that is this one node by node, or None and why it is not."""
        bound: dict[fx.Node, fx.Node] = {self.old[entry]: node for entry, node in old.items()} | {self.rate: rate}
        if not all(self._equal(self.new[entry], node, bound) for entry, node in new.items()):
            return None, "is not updated by one plain step of its optimizer"
        gradient = bound.get(self.given)
        if gradient is None:
            return None, "is updated without its gradient"
        value, wanted = gradient.meta["val"], old["parameter"].meta["val"]
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            return None, "has a gradient of another shape or dtype"
        inside = {node for pattern, node in bound.items() if pattern.op == "call_function"}
        if any(user not in inside and user.op != "output" for node in inside for user in node.users):
            return None, "is read after its update"
        return gradient, ""

    def _equal(self, pattern: Any, node: Any, bound: dict[fx.Node, fx.Node]) -> bool:
        if not isinstance(pattern, fx.Node):
            if isinstance(pattern, list | tuple):
                return (
                    isinstance(node, list | tuple)
                    and len(pattern) == len(node)
                    and all(self._equal(*pair, bound) for pair in zip(pattern, node, strict=True))
                )
            return type(pattern) is type(node) and bool(pattern == node)
        if not isinstance(node, fx.Node):
            return False
        if pattern in bound:
            return bound[pattern] is node
        if pattern is not self.given and (
            pattern.op != "call_function"
            or (pattern.op, pattern.target) != (node.op, node.target)
            or set(pattern.kwargs) != set(node.kwargs)
            or not self._equal(pattern.args, node.args, bound)
            or not all(self._equal(each, node.kwargs[name], bound) for name, each in pattern.kwargs.items())
        ):
            return False
        bound[pattern] = node
        return True
