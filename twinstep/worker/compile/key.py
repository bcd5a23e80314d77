"""CompileKey: every field that changes the program; two keys that differ say why a step is compiled again."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.metadata
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from twinstep.worker.compile.state import TrainState

Shape = tuple[int, ...]
TensorInfo = tuple[str, Shape, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileKey:
    """What a compiled step was made for. Field order is the order in which reasons are given."""

    sizes: tuple[tuple[str, int], ...]
    """Named sizes of the batch, as the caller knows them: batch_size, uih_len, uih_budget, num_candidates."""
    devices: int
    """Devices the step is spread over."""
    state: tuple[TensorInfo, ...]
    """Name, shape and dtype of every parameter (tables among them; frozen ones say so), buffer, optimizer tensor."""
    batch: tuple[TensorInfo, ...]
    """Path, shape and dtype of every batch leaf."""
    hyperparameters: tuple[str, ...]
    """Optimizer settings that are built into the program (betas, eps, …); learning rates are not."""
    modules: tuple[tuple[str, str], ...]
    """Plain attributes of every module, which its forward may read: `training`, a dropout's `p`, a norm's `eps`."""
    ambient: tuple[tuple[str, str], ...]
    """What surrounds the step: autocast and the default dtype."""
    backend: str
    strategies: tuple[str, ...]
    """What the compiler was asked for, settings included."""
    step: str
    """Digest of the train step's and the model's code."""
    threads: int
    """CPU threads: Inductor's code is made for a number of them."""
    versions: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the key in logs and events."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def reason(before: CompileKey | None, now: CompileKey) -> str:
    """Say in one line why `now` needs a program although there is one for `before`."""
    if before is None:
        return "first compile"
    for field in fields(CompileKey):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if old != new:
            return _difference(field.name, old, new)
    return "same key"


def _difference(field: str, old: Any, new: Any) -> str:
    if field in ("sizes", "versions", "modules", "ambient"):
        was, is_now = dict(old), dict(new)
        changed = [name for name in {**was, **is_now} if was.get(name) != is_now.get(name)]
        shown = [f"{name} {was.get(name, 'none')} → {is_now.get(name, 'none')}" for name in changed[:3]]
        return ", ".join(shown) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    if field in ("state", "batch"):
        was_info = {name: (shape, dtype) for name, shape, dtype in old}
        now_info = {name: (shape, dtype) for name, shape, dtype in new}
        changed = [name for name in {**was_info, **now_info} if was_info.get(name) != now_info.get(name)]
        first = changed[0] if changed else "order"
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        kind = "tensor" if field == "state" else "batch leaf"
        return f"{kind} {first} {_info(was_info.get(first))} → {_info(now_info.get(first))}{more}"
    if field == "hyperparameters":
        gone, came = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        return f"optimizer {', '.join(gone) or 'setting'} → {', '.join(came) or 'none'}"
    if field == "strategies":
        gone, came = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        return f"strategies {', '.join(gone) or 'none'} → {', '.join(came) or 'none'}"
    if field == "step":
        return "the train step's or the model's code changed"
    return f"{field} {old} → {new}"


def _info(info: tuple[Shape, str] | None) -> str:
    return "none" if info is None else f"{list(info[0])} {info[1]}"


def tensor_info(name: str, tensor: Tensor, *, frozen: bool = False) -> TensorInfo:
    """Return what a key holds of a tensor."""
    dtype = _dtype_name(tensor.dtype)
    return name, tuple(tensor.shape), f"{dtype}, frozen" if frozen else dtype


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_info(state: TrainState) -> tuple[TensorInfo, ...]:
    """Return what a key holds of the state."""
    return tuple(
        tensor_info(slot.path, tensor, frozen=slot.role == "parameter" and not tensor.requires_grad)
        for slot, tensor in zip(state.slots, state.live(), strict=True)
    )


def code_digest(*functions: Any) -> str:
    """Return a digest of functions' code, nested functions included, and of the plain values they close over."""
    found = hashlib.sha256()
    for function in functions:
        while isinstance(function, functools.partial):
            found.update(repr(plain((function.args, function.keywords))).encode())
            function = function.func
        found.update(getattr(function, "__qualname__", type(function).__qualname__).encode())
        if (code := getattr(function, "__code__", None)) is not None:
            _add_code(found, code)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name that has no value yet
                found.update(repr(plain(cell.cell_contents)).encode())
    return found.hexdigest()[:16]


def _add_code(found: hashlib._Hash, code: types.CodeType) -> None:
    found.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(found, constant)
        else:
            found.update(repr(plain(constant)).encode())


def plain(value: Any, depth: int = 3) -> Any:
    """Return a value whose text is the same in every process: plain values, and containers and objects of them.

    Tensors and modules become their type's name (their contents are state), functions their own; objects are looked
    into `depth` levels deep.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | torch.dtype | torch.device):
        return value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor | nn.Module) or depth == 0:
        return type(value).__qualname__
    if isinstance(value, tuple | list | set | frozenset):
        return type(value).__name__, [plain(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return [(plain(name), plain(each, depth - 1)) for name, each in value.items()]
    attributes = getattr(value, "__dict__", {})
    return type(value).__qualname__, [(name, plain(each, depth - 1)) for name, each in attributes.items()]


def module_settings(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return every module's own attributes by path: a change of one may change the program, though no shape."""
    return tuple(
        (f"{path}.{name}" if path else name, str(value) if type(value) in _SIMPLE else repr(plain(value)))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _TORCHS_OWN or (name in _HOOKS and value)
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SIMPLE = (bool, int, float)

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes every module has: registries of parameters, buffers, hooks and children."""


def ambient() -> tuple[tuple[str, str], ...]:
    """Return what surrounds a step and changes its program."""
    return (
        ("autocast", str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"),
        ("default dtype", str(torch.get_default_dtype())),
    )


def versions(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the installed versions of distributions, by name."""
    return tuple((name, importlib.metadata.version(name)) for name in names)


def named_sizes(sizes: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Return sizes as a key holds them."""
    return tuple((sizes or {}).items())


def cpu_threads() -> int:
    """Return the threads torch computes with."""
    return torch.get_num_threads()
