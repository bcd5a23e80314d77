"""Stage 1, prepare: find everything a training step reads and writes, and lift it out of the module and the optimizers.

Parameters (tied ones once), buffers and optimizer tensors become graph inputs and outputs; learning rates become
0-d inputs, so that a schedule changes a number and not the program. Other hyperparameters are part of the program:
`TrainState.hyperparameters` is what a CompileKey needs to know of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer

from twinstep.spec.errors import CaptureError, CompileError
from twinstep.worker.compile.accumulation import GradientInTrace, LiveGradients, trainable
from twinstep.worker.compile.dampening import NOT_STEPPED, first_steps_followed
from twinstep.worker.embedding.declared import declared

Optimizers = Optimizer | Mapping[str, Optimizer] | None


@dataclass(frozen=True)
class Slot:
    """One tensor of the state."""

    role: Literal["parameter", "buffer", "optimizer", "gradient"]
    name: str
    """`layers.0.weight`; `dense/exp_avg/layers.0.weight` of an optimizer; `gradient/layers.0.weight` of a `.grad`."""

    @functools.cached_property
    def path(self) -> str:
        """The name with its role before it: unique among all slots."""
        return f"{self.role}:{self.name}"


def as_mapping(optimizer: Optimizers) -> dict[str, Optimizer]:
    """Return one optimizer, several by name, or none, as a mapping by name."""
    if optimizer is None:
        return {}
    return {"optimizer": optimizer} if isinstance(optimizer, Optimizer) else dict(optimizer)


class TrainState:
    """The tensors behind a model and its optimizers, in one fixed order of slots.

    Creating one fills in state that optimizers make lazily at their first step (momentum buffers, step counts);
    values are those that eager PyTorch would start its first step from.

    Args:
        model: the module.
        optimizer: one, several by name, or None.
        gradients: whether `.grad` of optimized parameters is part of the state, None: it is not; else names of those
            where a program is made for a gradient of None, or for a tensor.

    Raises:
        CompileError: an optimizer holds a parameter that is not the model's, or state that is not a tensor.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, gradients: frozenset[str] | None = None) -> None:
        self.model = model
        self.optimizers = as_mapping(optimizer)
        self._parameters = dict(model.named_parameters())
        self._check_hooks()
        self._buffers = dict(model.named_buffers())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        for key, each in self.optimizers.items():
            self._check_owned(key, each)
            materialise(key, each)
        self._optimized = trainable(self._groups(), self._names)
        self.gradients = None if gradients is None else LiveGradients(self._optimized, gradients)
        self.slots = tuple(self._find_slots())
        self._check_apart()
        self._structure = self._find_structure()
        self._made_for = self.hyperparameters()

    def _groups(self) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(each.param_groups for each in self.optimizers.values())

    def holds_gradients(self) -> bool:
        """Say whether an optimized parameter's `.grad` is a tensor now."""
        return any(parameter.grad is not None for parameter in self._optimized.values())

    def _check_owned(self, key: str, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise CompileError(
                        f"optimizer {key!r} holds a parameter of shape {list(parameter.shape)} that is not the model's",
                        remedy="build the optimizer from model.parameters() of the very model that is compiled",
                    )

    def _check_hooks(self) -> None:
        for name, parameter in self._parameters.items():
            if _has_hooks(parameter):
                raise CompileError(
                    f"{name} has gradient hooks, which are the live tensor's and not the graph's",
                    remedy="change gradients in the step, between backward() and optimizer.step()",
                )

    def _check_apart(self) -> None:
        """Refuse two slots that share memory: each would be given its own, and writes to one would miss the other."""
        for slot, tensor in zip(self.slots, self.live(), strict=True):
            if _overlaps_itself(tensor):
                raise CompileError(
                    f"elements of {slot.name} share memory (stride {list(tensor.stride())})",
                    remedy="make it a tensor of its own: tensor.expand(…).clone()",
                )
        ranges = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), slot.name)
            for slot, tensor in zip(self.slots, self.live(), strict=True)
            if tensor.numel() and not tensor.is_meta
        )
        for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
            if start < end:
                raise CompileError(
                    f"{name} and {other} share memory",
                    remedy="tie whole parameters (one Parameter under two names), or clone one of the two",
                )

    def _find_structure(self) -> tuple[Any, ...]:
        parameters = tuple((id(each), each.requires_grad, _has_hooks(each)) for each in self.model.parameters())
        buffers = tuple(name for name, _ in self.model.named_buffers())
        entries = tuple((key, id(parameter), entry) for key, parameter, entry in self._optimizer_entries())
        groups = tuple(
            (key, id(parameter))
            for key, optimizer in self.optimizers.items()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return parameters, buffers, entries, groups

    def outdated(self) -> bool:
        """Say whether model or optimizers hold other tensors than when the slots were found.

        So after a parameter was frozen or replaced, a parameter group added, or an optimizer's state cleared.
        """
        return self._find_structure() != self._structure

    def settings_changed(self) -> bool:
        """Say whether hyperparameters are others than when state was last made for them."""
        return self.hyperparameters() != self._made_for

    def make_missing(self) -> None:
        """Make state that a changed setting wants and there was none of (momentum); `outdated` then says so.

        Raises:
            CompileError: as when the state was found first.
        """
        for key, each in self.optimizers.items():
            materialise(key, each)
        self._made_for = self.hyperparameters()

    def _find_slots(self) -> Iterator[Slot]:
        for name in self._parameters:
            yield Slot("parameter", name)
        for name in self._buffers:
            yield Slot("buffer", name)
        for key, parameter, entry in self._optimizer_entries():
            yield Slot("optimizer", f"{key}/{entry}/{self._names[id(parameter)]}")
        if self.gradients is not None:
            for name in self.gradients.parameters:
                yield Slot("gradient", f"gradient/{name}")

    def _optimizer_entries(self) -> Iterator[tuple[str, nn.Parameter, str]]:
        for key, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for entry in sorted(optimizer.state.get(parameter, {})):
                        yield key, parameter, entry

    def live(self) -> list[Tensor]:
        """Return the very tensors that model and optimizers hold now, in the order of `slots`."""
        return [*self.held(), *self._live_gradients()]

    def _live_gradients(self) -> list[Tensor]:
        return [] if self.gradients is None else self.gradients.live()

    def held(self) -> list[Tensor]:
        """Return `live` without gradients, which come and go."""
        found: list[Tensor] = [*self._parameters.values(), *self.model.buffers()]
        for key, parameter, entry in self._optimizer_entries():
            found.append(self.optimizers[key].state[parameter][entry])
        return found

    def live_by_path(self) -> dict[str, Tensor]:
        """Return the tensors that model and optimizers hold now by the path their slot has, or would have."""
        paths = [slot.path for slot in self._find_slots()]
        parameters = dict(self.model.named_parameters())
        found: list[Tensor] = [*parameters.values(), *self.model.buffers()]
        found += [self.optimizers[key].state[parameter][entry] for key, parameter, entry in self._optimizer_entries()]
        found += self._live_gradients()
        return dict(zip(paths, found, strict=True)) if len(paths) == len(found) else {}

    def tensors(self) -> list[Tensor]:
        """Return aliases of the live tensors, without gradient, in the order of `slots`."""
        return [tensor.detach() for tensor in self.live()]

    def load(self, values: Sequence[Tensor]) -> None:
        """Copy `values`, in the order of `slots`, into the live tensors."""
        with torch.no_grad():
            for live, value in zip(self.tensors(), values, strict=True):
                live.copy_(value)

    def num_optimized(self) -> int:
        """Return how many trainable parameters the optimizers hold."""
        held = [p for each in self.optimizers.values() for group in each.param_groups for p in group["params"]]
        return sum(parameter.requires_grad for parameter in held)

    def num_rates(self) -> int:
        """Return how many parameter groups there are, each with its learning rate."""
        return sum(len(optimizer.param_groups) for optimizer in self.optimizers.values())

    def learning_rates(self) -> list[Tensor]:
        """Return each parameter group's learning rate now, as a 0-d float32 tensor.

        Raises:
            CompileError: one is no finite number. (Infinity or NaN times a zero gradient is NaN; a table's rows that no
                id names would not get it.)
        """
        return [
            _rate(key, index, group["lr"])
            for key, optimizer in self.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
        ]

    def hyperparameters(self) -> tuple[str, ...]:
        """Return what is built into the program of each parameter group: all but parameters and learning rate."""
        found = []
        for key, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for entry, value in sorted(group.items()):
                    if entry not in ("params", "lr", "initial_lr"):
                        found.append(f"{key}[{index}].{entry}={value}")
            found.append(f"{key}={type(optimizer).__name__}")
        return tuple(found)

    @contextlib.contextmanager
    def swapped(self, tensors: Sequence[Tensor], learning_rates: Sequence[Tensor]) -> Iterator[SwappedState]:
        """Let the model and its optimizers hold other tensors, in the order of `slots`, for the length of a block."""
        count = len(self._parameters)
        leaves = [
            tensor.detach().clone().requires_grad_(live.requires_grad)
            for tensor, live in zip(tensors, self._parameters.values(), strict=False)
        ]
        named = dict(zip(self._parameters, leaves, strict=True))
        buffers = [tensor.clone() for tensor in tensors[count : count + len(self._buffers)]]
        named.update(zip(self._buffers, buffers, strict=True))
        rest = iter(tensors[count + len(self._buffers) :])
        rates = iter(learning_rates)
        with contextlib.ExitStack() as stack:
            # stack_weights: put back in reverse order, or a module under two names would keep what it was lent.
            stack.enter_context(_reparametrize_module(self.model, named, tie_weights=True, stack_weights=True))
            stack.enter_context(first_steps_followed())
            entries: list[tuple[Optimizer, Tensor, str]] = []
            for optimizer in self.optimizers.values():
                entries += stack.enter_context(_swapped_optimizer(optimizer, self._names, named, rest, rates))
            swapped = SwappedState(
                self.model, leaves, tuple(self._buffers), tuple(self.optimizers.values()), entries, []
            )
            if self.gradients is not None:
                absent = self.gradients.absent()
                for name, given in zip(self.gradients.parameters, rest, strict=True):
                    swapped.gradients.append(GradientInTrace.put(named[name], given, absent=name in absent))
            groups = self._group_settings()
            yield swapped
            self._check_groups(groups)

    def _group_settings(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (f"{key}.param_groups[{index}]", {name: _setting(each) for name, each in group.items() if name != "params"})
            for key, optimizer in self.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
        ]

    def _check_groups(self, before: list[tuple[str, dict[str, Any]]]) -> None:
        """Refuse a step that changes an optimizer's settings: the change would happen once, while tracing."""
        after = self._group_settings()
        if len(before) != len(after):
            raise CaptureError(
                f"the step changes the number of parameter groups from {len(before)} to {len(after)}",
                remedy="call optimizer.add_param_group outside the step, between two steps",
            )
        for (place, was), (_, now) in zip(before, after, strict=True):
            for name in {**was, **now}:
                if was.get(name) != now.get(name):
                    raise CaptureError(
                        f"the step changes {place}[{name!r}], which would happen once and never again",
                        remedy="call scheduler.step() and set learning rates outside the step, between two steps",
                    )


@dataclass(frozen=True, slots=True)
class SwappedState:
    """Tensors in place of the live ones; `values` reads what a step made of them."""

    model: nn.Module
    parameters: list[Tensor]
    buffer_names: tuple[str, ...]
    optimizers: tuple[Optimizer, ...]
    entries: list[tuple[Optimizer, Tensor, str]]
    gradients: list[GradientInTrace]

    def optimized(self) -> list[Tensor]:
        """Return the trainable parameters that an optimizer holds."""
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def values(self, *, zeroed: bool) -> list[Tensor]:
        """Return the tensors in the order of the state's slots, as they are now.

        Args:
            zeroed: zeros for gradients that are None now; else these slots keep what they had.
        """
        found = [parameter.detach() for parameter in self.parameters]
        found += [self.model.get_buffer(name).detach() for name in self.buffer_names]
        found += [optimizer.state[parameter][entry] for optimizer, parameter, entry in self.entries]
        found += [gradient.value(zeroed=zeroed) for gradient in self.gradients]
        return found


@contextlib.contextmanager
def _swapped_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    replacements: Mapping[str, Tensor],
    state_values: Iterator[Tensor],
    rates: Iterator[Tensor],
) -> Iterator[list[tuple[Optimizer, Tensor, str]]]:
    """Swap one optimizer's parameters, state and learning rates; set the switches that let a step be captured."""
    groups, state = [dict(group) for group in optimizer.param_groups], optimizer.state
    held = list(optimizer.param_groups)
    entries: list[tuple[Optimizer, Tensor, str]] = []
    swapped: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for group in optimizer.param_groups:
        parameters = [(live, replacements[names[id(live)]]) for live in group["params"]]
        for live, leaf in parameters:
            for entry in sorted(state.get(live, {})):
                swapped[leaf][entry] = next(state_values).clone()
                entries.append((optimizer, leaf, entry))
        group["params"] = [leaf for _, leaf in parameters]
        group["lr"] = next(rates)
        # One tensor at a time: the list ops of foreach and the fused kernels have no place in an ATen graph.
        # Capturable: the step count is read as a tensor, never as a Python number.
        for switch, value in (("foreach", False), ("fused", False), ("capturable", True)):
            if switch in group:
                group[switch] = value
    optimizer.state = swapped
    try:
        yield entries
    finally:
        optimizer.state = state
        optimizer.param_groups[:] = held
        for group, before in zip(held, groups, strict=True):
            group.clear()
            group.update(before)


STARTS_FROM_ZERO: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
    }
)
"""Optimizers that make their state at the first step, all of it zeros; tests hold each against eager."""


def materialise(key: str, optimizer: Optimizer) -> None:
    """Make state that the optimizer would only create at its first step, without moving anything.

    One step on zero gradients creates it; parameters and state that was there are then put back, and new state is
    zeroed, which is what the first step of the optimizers in STARTS_FROM_ZERO starts from. An optimizer that makes
    its state when it is built (Adagrad, RowWiseAdagrad), or has taken a step already, needs none of it; nor does one of
    declared tables, whose state was made with it.

    Raises:
        CompileError: state is not a tensor, or would not start from zero; or the optimizer cannot take a step.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    made = (optimizer.state.get(each) or not each.requires_grad or declared(each) is not None for each in parameters)
    if all(made):
        _check_state(key, optimizer)
        return
    if type(optimizer) not in STARTS_FROM_ZERO:
        raise CompileError(
            f"optimizer {key!r} ({type(optimizer).__name__}) starts from state that is not known to be zero",
            remedy="use SGD, Adam, AdamW, Adagrad, RMSprop or RowWiseAdagrad, or take its first step eagerly",
        )
    zero = NOT_STEPPED if type(optimizer) is torch.optim.SGD else 0.0
    before = [parameter.detach().clone() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    known = {
        (id(parameter), entry): value.clone()
        for parameter in parameters
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    stateless = [parameter for parameter in parameters if parameter not in optimizer.state]
    # The method itself: what is wrapped around it imports torch._dynamo, in two seconds, only to be passed over by it.
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad():
            step(optimizer)
    except Exception as error:  # whatever a setting that is missing or of another type makes of it
        for parameter in stateless:
            optimizer.state.pop(parameter, None)
        raise CompileError(
            f"optimizer {key!r} ({type(optimizer).__name__}) cannot take a step: {type(error).__name__}: {error}",
            remedy="look at its param_groups: a setting is missing, or is of another type than its class takes",
        ) from error
    finally:
        with torch.no_grad():
            for parameter, value, gradient in zip(parameters, before, gradients, strict=True):
                parameter.copy_(value)
                parameter.grad = gradient
                for entry, tensor in optimizer.state.get(parameter, {}).items():
                    if (id(parameter), entry) in known:
                        tensor.copy_(known[id(parameter), entry])
                    elif isinstance(tensor, Tensor):
                        tensor.fill_(zero)
    _check_state(key, optimizer)


def _check_state(key: str, optimizer: Optimizer) -> None:
    for entries in optimizer.state.values():
        for entry in [name for name, value in entries.items() if value is None]:
            del entries[entry]  # SGD without momentum keeps a momentum_buffer of None
        for entry, value in entries.items():
            if not isinstance(value, Tensor):
                raise CompileError(
                    f"optimizer {key!r} ({type(optimizer).__name__}) keeps {entry!r} as {_type(value)}, no tensor",
                    remedy="use SGD, Adam, AdamW, Adagrad, RMSprop or RowWiseAdagrad",
                )


def _type(value: Any) -> str:
    return f"{type(value).__name__} ({value!r})" if isinstance(value, int | float) else type(value).__name__


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _setting(value: Any) -> Any:
    """Return what tells whether a setting changed; of a tensor (a learning rate), whether it was written to."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _rate(key: str, index: int, value: Any) -> Tensor:
    number = isinstance(value, int | float) and math.isfinite(value)
    if not number and not (isinstance(value, Tensor) and value.numel() == 1 and bool(torch.isfinite(value))):
        raise CompileError(
            f"the learning rate of {key}.param_groups[{index}] is {value!r}",
            remedy="set a finite number, or a tensor of one element that holds it; nothing was changed",
        )
    return torch.as_tensor(value, dtype=torch.float32)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Say whether two elements are surely one in memory, as after `expand`."""
    return tensor.numel() > 0 and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
