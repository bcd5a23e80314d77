"""What a step stands on, read off the live objects: what model and optimizers decide of its key, and its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from twinstep.worker.compile.code import Reach
from twinstep.worker.compile.key import HOOKS, OWN_ATTRIBUTES, ambient, module_settings, state_info
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.structure import TrainStep


def batch_info(leaves: Sequence[Any]) -> tuple[tuple[Any, Any], ...]:
    """Return shape and dtype of each leaf; one that is no tensor has neither."""
    try:
        return tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)
    except RuntimeError:  # a nested tensor has no shape, and is refused where it is named
        return ((None, None),)


def reach(train_step: TrainStep, model: nn.Module, state: TrainState) -> Reach:
    """Return what code a step can reach: its own, the classes' along the tree of modules, the optimizers'."""
    roots: dict[str, Any] = {"step": train_step}
    for path, module in model.named_modules():
        roots[f"{path}:"] = module
        for name, value in vars(module).items():
            if name not in OWN_ATTRIBUTES or (name in HOOKS and value):
                roots[f"{path}:{name}"] = value
    for name, optimizer in state.optimizers.items():
        roots[f"optimizer {name}"] = optimizer
    return Reach(roots, own=model)


def standing(state: TrainState, model: nn.Module) -> dict[str, Any]:
    """Return the fields of a key that model, optimizers and surroundings decide, as they stand now."""
    return {
        "state": state_info(state),
        "hyperparameters": state.hyperparameters(),
        "modules": module_settings(model),
        "ambient": ambient(),
    }
