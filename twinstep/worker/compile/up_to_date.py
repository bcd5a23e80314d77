"""`state_dict()` of a live model and its optimizers is right at any moment, wherever a backend holds the state.

Both have hooks that run before their state is read; ours brings the state back first, if steps have run since. A model
has one holder at a time: where another compiler takes it up, or runs a step, the one before brings back what it has.
"""

from __future__ import annotations

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


def let_go(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Bring back what another holder of this model's state has, and forget it."""
    for hooks in _hooks(model, optimizers):
        for key in [key for key, hook in hooks.items() if isinstance(hook, BringBack)]:
            hooks.pop(key).let_go()


def keep_up_to_date(model: nn.Module, optimizers: Iterable[Optimizer], backend: Any) -> None:
    """Let `backend.pull()` run before `state_dict()` of the model, of any part of it, and of its optimizers."""
    hook = BringBack(backend)
    for module in model.modules():
        module.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(hook)


def _hooks(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Any]:
    return [
        *(module._state_dict_pre_hooks for module in model.modules()),
        *(optimizer._optimizer_state_dict_pre_hooks for optimizer in optimizers),
    ]
