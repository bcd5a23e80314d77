"""Whether model, optimizers and surroundings are as they were, told in microseconds: asked at every step.

A CompileKey's fields are texts and shapes that take a millisecond to collect. A Stamp remembers the very objects they
were collected from, so that a step that finds the same objects needs no new key. Where it is in doubt it says so, and
the key decides: an object replaced by an equal one costs a millisecond, no compile.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from twinstep.worker.compile.code import Reach, is_frozen, plain
from twinstep.worker.compile.key import HOOKS, OWN_ATTRIBUTES
from twinstep.worker.compile.state import TrainState

_backward_hooks = operator.attrgetter("_backward_hooks")
_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


class Stamp:
    """Remembers what a key's standing fields were read from; `fresh` says whether all of it is still so."""

    def __init__(self, state: TrainState, model: nn.Module, reach: Reach) -> None:
        self._reach = reach
        modules = list(model.modules())
        self._mutable: list[tuple[Any, str]] = []
        self._attributes = [self._watch(vars(module), OWN_ATTRIBUTES) for module in modules]
        registries = [vars(module)[name] for module in modules for name in ("_parameters", "_buffers", "_modules")]
        self._registries = _Same(registries)
        self._hooks: list[dict[Any, Any]] = [vars(module)[name] for module in modules for name in HOOKS]
        self._hook_ids = list(map(tuple, self._hooks))
        groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
        self._groups = [self._watch(group, frozenset({"params", "lr", "initial_lr"})) for group in groups]
        self._optimizers = list(state.optimizers.values())
        self._group_lists = _SameLists([optimizer.param_groups for optimizer in self._optimizers])
        self._params = _SameLists([group["params"] for group in groups])
        self._entries = [_Same(list(optimizer.state.values())) for optimizer in self._optimizers]
        self._states = [optimizer.state for optimizer in self._optimizers]
        self._parameters = list(model.parameters())
        self._tensors = state.held()
        self._state = state
        self._gradients = None if state.gradients is None else state.gradients.look()
        shapes: Any = [list(each.shape) for each in self._tensors]
        strides: Any = [list(each.stride()) for each in self._tensors]
        make: Any = TensorGuards
        self._tensor_guard = make(*self._tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        self._surroundings = GlobalStateGuard()

    def fresh(self) -> bool:
        """Say whether everything is as it was when the stamp was made."""
        return (
            self._surroundings.check()
            and all(_as_were(*each) for each in self._attributes)
            and self._registries.fresh()
            and list(map(tuple, self._hooks)) == self._hook_ids
            and not any(map(_backward_hooks, self._parameters))
            and not any(map(_accumulate_hooks, self._parameters))
            and self._tensor_guard.check(*self._tensors)
            and (self._state.gradients is None or self._state.gradients.look() == self._gradients)
            and self._group_lists.fresh()
            and all(_as_were(*each) for each in self._groups)
            and self._params.fresh()
            and all(now.state is was for now, was in zip(self._optimizers, self._states, strict=True))
            and all(same.fresh(list(state.values())) for same, state in zip(self._entries, self._states, strict=True))
            and all(repr(plain(value)) == text for value, text in self._mutable)
            and self._reach.unchanged()
        )

    def _watch(self, place: dict[str, Any], skipped: frozenset[str]) -> tuple[Any, ...]:
        names = [name for name in place if name not in skipped]
        values = [place[name] for name in names]
        self._mutable += [(value, repr(plain(value))) for value in values if _may_change(value)]
        getter = operator.itemgetter(*names) if len(names) > 1 else None
        return place, len(place), names, getter, values


class _Same:
    """Whether dicts hold the very values they held."""

    def __init__(self, places: Sequence[dict[Any, Any]]) -> None:
        self._places = places
        self._sizes = list(map(len, places))
        self._values = list(itertools.chain.from_iterable(map(dict.values, places)))

    def fresh(self, places: Sequence[dict[Any, Any]] | None = None) -> bool:
        now = self._places if places is None else places
        return list(map(len, now)) == self._sizes and all(
            map(operator.is_, itertools.chain.from_iterable(map(dict.values, now)), self._values)
        )


class _SameLists:
    """Whether lists hold the very values they held."""

    def __init__(self, places: Sequence[list[Any]]) -> None:
        self._places = places
        self._sizes = list(map(len, places))
        self._values = list(itertools.chain.from_iterable(places))

    def fresh(self) -> bool:
        return list(map(len, self._places)) == self._sizes and all(
            map(operator.is_, itertools.chain.from_iterable(self._places), self._values)
        )


def _as_were(place: dict[str, Any], size: int, names: Sequence[str], getter: Any, values: Iterable[Any]) -> bool:
    if len(place) != size:
        return False
    try:
        now = getter(place) if getter else [place[name] for name in names]
    except KeyError:
        return False
    return all(map(operator.is_, now, values))


def _may_change(value: Any) -> bool:
    """Say whether a value may change and stay itself; what tensors and modules hold is looked after elsewhere."""
    return not isinstance(value, Tensor | nn.Module) and not is_frozen(value)
