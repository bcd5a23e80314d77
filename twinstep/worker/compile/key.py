"""CompileKey: every field that changes the program; two keys that differ say why a step is compiled again."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twinstep.worker.compile.code import plain
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.up_to_date import GETSTATE

Shape = tuple[int, ...]
TensorInfo = tuple[str, Shape, str]


@dataclass(frozen=True, kw_only=True)
class CompileKey:
    """What a compiled step was made for. Field order is the order in which reasons are given."""

    sizes: tuple[tuple[str, int], ...]
    """Named sizes of the batch, as the caller knows them: batch_size, uih_len, uih_budget, num_candidates."""
    devices: int
    """Devices the step is spread over."""
    mesh: tuple[tuple[str, str], ...]
    """Axes of the mesh, and what else decides where tensors live; empty for one device."""
    state: tuple[TensorInfo, ...]
    """Name, shape and dtype of every parameter (tables among them; frozen ones say so), buffer, optimizer tensor."""
    batch: tuple[TensorInfo, ...]
    """Path, shape and dtype of every batch leaf."""
    structure: str
    """The containers that hold the batch's leaves: code may ask whether one is a list or a tuple."""
    hyperparameters: tuple[str, ...]
    """Optimizer settings that are built into the program (betas, eps, …); learning rates are not."""
    modules: tuple[tuple[str, str], ...]
    """Plain attributes of every module, which its forward may read: `training`, a dropout's `p`, a norm's `eps`."""
    ambient: tuple[tuple[str, str], ...]
    """What surrounds the step: autocast, the default dtype, how exact and how repeatable products must be."""
    around: tuple[tuple[str, str], ...]
    """What an embedding engine does beside the captured step: its stacks, their limits, the pipeline."""
    backend: str
    strategies: tuple[str, ...]
    """What the compiler was asked for, settings included."""
    step: str
    """Digest of the code the train step and the model reach, see `code.py`."""
    threads: int
    """CPU threads: Inductor's code is made for a number of them."""
    versions: tuple[tuple[str, str], ...]
    """Of the libraries, the compiler's own source, the C++ compiler and the processor."""

    @functools.cached_property
    def text(self) -> str:
        """The whole key as text, the same in every process: what entries on disk are compared by."""
        return repr(self)

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the key in logs and events."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


FIRST = "first compile"


def reason(before: CompileKey | None, now: CompileKey) -> str:
    """Say in one line why `now` needs a program although there is one for `before`."""
    if before is None:
        return FIRST
    for field in fields(CompileKey):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if old != new:
            return _difference(field.name, old, new)
    return "same key"


TOLD = ("sizes", "devices", "mesh", "around", "backend", "strategies", "threads", "versions")
"""Fields of a key that a checkpoint holds, in their order: few bytes, by which a run that goes on says what changed."""


def told(key: CompileKey) -> dict[str, Any]:
    """Return what `reason_after` needs of a key, as JSON has it."""
    return {name: getattr(key, name) for name in TOLD}


def reason_after(before: Mapping[str, Any], now: CompileKey) -> str:
    """Say why a run that goes on needs `now`, where the program before it was another; `before` is from `told`.

    What a checkpoint of another version lacks is no difference. Like a first compile where nothing differs.
    """
    for name in TOLD:
        old, new = before.get(name), getattr(now, name)
        if isinstance(old, list):
            old = tuple(tuple(each) if isinstance(each, list) else each for each in old)
        if old is not None and type(old) is type(new) and old != new:
            return _difference(name, old, new)
    return FIRST


def changes(before: CompileKey, now: CompileKey) -> tuple[tuple[str, str], ...]:
    """Return what differs as pairs of the first field that does and the names in it."""
    for field in fields(CompileKey):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if old != new:
            if not isinstance(old, tuple) or field.name in ("hyperparameters", "strategies"):
                return ((field.name, field.name),)
            was, is_now = ({each[0]: each[1:] for each in info} for info in (old, new))
            return tuple((field.name, name) for name in {**was, **is_now} if was.get(name) != is_now.get(name))
    return ()


def _difference(field: str, old: Any, new: Any) -> str:
    if field in ("sizes", "mesh", "versions", "modules", "ambient", "around"):
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
    if field == "structure":
        return "the batch's containers changed"
    if field == "step":
        return "the train step's or the model's code changed"
    return f"{field} {old} → {new}"


def _info(info: tuple[Shape, str] | None) -> str:
    return "none" if info is None else f"{list(info[0])} {info[1]}"


def tensor_info(name: str, tensor: Tensor, *, frozen: bool = False) -> TensorInfo:
    """Return what a key holds of a tensor."""
    kind = _dtype_name(tensor.dtype)
    if tensor.device.type != "cpu":
        kind += f" on {tensor.device}"
    return name, tuple(tensor.shape), f"{kind}, frozen" if frozen else kind


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_info(state: TrainState) -> tuple[TensorInfo, ...]:
    """Return what a key holds of the state."""
    found = []
    absent = {f"gradient/{name}" for name in state.gradients.absent()} if state.gradients is not None else set()
    for slot, tensor in zip(state.slots, state.live(), strict=True):
        name, shape, kind = tensor_info(slot.path, tensor, frozen=slot.role == "parameter" and not tensor.requires_grad)
        if slot.role == "gradient" and slot.name in absent:
            kind += ", none"
        # Programs are made for one layout of memory.
        found.append((name, shape, kind if tensor.is_contiguous() else f"{kind}, strides {tensor.stride()}"))
    return tuple(found)


def module_settings(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return every module's own attributes by path: a change of one may change the program, though no shape."""
    return tuple(
        (f"{path}.{name}" if path else name, str(value) if type(value) in _SIMPLE else repr(plain(value)))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OWN_ATTRIBUTES or (name in HOOKS and value)
    )


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SIMPLE = (bool, int, float)

OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"} | {"_flat_weights", "_flat_weight_refs", GETSTATE}
"""Attributes every module has: registries of parameters, buffers, hooks and children; and the second list that
recurrent modules keep of their parameters; and what we hang on a module, see `up_to_date.py`."""


def ambient() -> tuple[tuple[str, str], ...]:
    """Return what surrounds a step and changes its program."""
    return (
        ("autocast", str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"),
        ("default dtype", str(torch.get_default_dtype())),
        ("matmul precision", torch.get_float32_matmul_precision()),
        ("deterministic", str(torch.are_deterministic_algorithms_enabled())),
    )


def versions(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return what a program is built with and for, by name: distributions, our own source, compiler, processor.

    A distribution that is not installed is `none`.
    """
    return (
        *((name, _version(name)) for name in names),
        ("twinstep compiler", _own_source()),
        ("C++", _cxx()),
        ("processor", _processor()),
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


_WORKER = Path(__file__).parents[1]
TRACED = tuple(_WORKER / each for each in ("compile", "ops", "embedding/ring", "embedding/sparsecore"))
"""Folders whose code decides what a step becomes: the compiler's, the operators', and the engines' around the step."""


@functools.cache
def _own_source() -> str:
    """Return a digest of the source in `TRACED`."""
    found = hashlib.sha256()
    for folder in TRACED:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                found.update(f"{path.relative_to(_WORKER)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


@functools.cache
def _cxx() -> str:
    """Return the first line that the C++ compiler says of itself."""
    command = [*shlex.split(os.environ.get("CXX") or "g++"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return (said.stdout.splitlines() or ["none"])[0]


@functools.cache
def _processor() -> str:
    """Return the kind of processor and a digest of what it can do: code is made for its very instructions."""
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def named_sizes(sizes: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Return sizes as a key holds them."""
    return tuple((sizes or {}).items())


def cpu_threads() -> int:
    """Return the threads torch computes with."""
    return torch.get_num_threads()
