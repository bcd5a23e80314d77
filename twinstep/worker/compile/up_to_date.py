"""`state_dict()`, `deepcopy` and `pickle` of a live model and its optimizers are right at any moment.

A backend may hold the state elsewhere. Models and optimizers have hooks that run before `state_dict()`; copies and
pickles ask for `__getstate__`. Both bring the state back first, if steps have run since. A model has one holder at a
time: where another compiler takes it up, or runs a step, the one before brings back what it has.

A class with a `__deepcopy__` or `__reduce__` of its own is asked that instead, and a tensor that is copied by itself
has nothing to ask: then `pull()` comes first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class BringBack:
    """The hook. A copy of the model, by `deepcopy` or `pickle`, has none: its tensors are its own."""

    __slots__ = ("_backend",)

    def __init__(self, backend: Any = None) -> None:
        self._backend = backend

    def __call__(self, *_: Any) -> None:
        if self._backend is not None:
            self._backend.pull()

    def let_go(self) -> None:
        """Bring the state back, for another to hold."""
        self()
        if self._backend is not None:
            self._backend.holds = False

    def __deepcopy__(self, _: Any) -> BringBack:
        return BringBack()

    def __reduce__(self) -> tuple[Any, ...]:
        return BringBack, ()


class StateOf:
    """`__getstate__` of one model or optimizer: its class's, after the state was brought back.

    It stands on the object itself, which is where `copy` and `pickle` look first; a copy has none.
    """

    __slots__ = ("_hook", "_owner")

    def __init__(self, owner: Any, hook: BringBack) -> None:
        self._owner = weakref.ref(owner)  # or a dropped model would wait for the garbage collector
        self._hook = hook

    def __call__(self) -> Any:
        self._hook()
        owner = self._owner()
        kind: Any = type(owner)
        state = kind.__getstate__(owner)
        if isinstance(state, tuple):  # of a class with slots: attributes, and what is in the slots
            return (_without_own(state[0]), *state[1:])
        return _without_own(state)


GETSTATE = "__getstate__"


def _without_own(attributes: Any) -> Any:
    if not isinstance(attributes, dict):
        return attributes
    return {name: value for name, value in attributes.items() if not isinstance(value, StateOf)}


def let_go(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Bring back what another holder of this model's state has, and forget it."""
    optimizers = list(optimizers)
    for hooks in _hooks(model, optimizers):
        for key in [key for key, hook in hooks.items() if isinstance(hook, BringBack)]:
            hooks.pop(key).let_go()
    for each in (*model.modules(), *optimizers):
        if isinstance(vars(each).get(GETSTATE), StateOf):
            del vars(each)[GETSTATE]


def keep_up_to_date(model: nn.Module, optimizers: Iterable[Optimizer], backend: Any) -> None:
    """Let `backend.pull()` run before `state_dict()` or a copy of the model, of any part of it, and its optimizers."""
    hook = BringBack(backend)
    for module in model.modules():
        module.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        vars(module)[GETSTATE] = StateOf(module, hook)
    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(hook)
        vars(optimizer)[GETSTATE] = StateOf(optimizer, hook)


def _hooks(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Any]:
    return [
        *(module._state_dict_pre_hooks for module in model.modules()),
        *(optimizer._optimizer_state_dict_pre_hooks for optimizer in optimizers),
    ]
