"""What code a train step runs: a digest of all that can be reached from it, and the tensors that are found on the way.

A program read from disk stands for a trace that is not made, so whatever the trace would have read must be known
before: functions and the functions they name, their defaults, closures and globals, classes with their methods, and
plain values. Packages whose versions a CompileKey holds (FRAMEWORKS) and the standard library count by name. What
cannot be reached by name, a function looked up by a computed string, say, is not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import hashlib
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.worker.compile.up_to_date import GETSTATE

FRAMEWORKS = frozenset({"torch", "numpy", "jax", "jaxlib", "torchax", "triton", "sympy"})
"""Packages that count by name and version."""

_SKIPPED = frozenset(
    {"__repr__", "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEPTH = 6  # of containers and objects within each other


class Reach:
    """All that can be reached from some roots.

    Args:
        roots: functions, classes and values by the name they are to be known by.
        own: modules whose parameters, buffers and settings are looked after elsewhere.
    """

    def __init__(self, roots: Mapping[str, Any], *, own: nn.Module | None = None) -> None:
        self._own = frozenset(map(id, own.modules())) if own is not None else frozenset()
        self._sum = hashlib.sha256()
        self._seen: dict[int, Any] = {}
        """What was visited by its id; kept, so that an id stays its own."""
        self._globals: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._cells: list[tuple[types.CellType, Any]] = []
        self._mutable: list[tuple[Any, str]] = []
        self.tensors: dict[str, Tensor] = {}
        """Tensors by the path on which they were found: what a step may read beside its state and its batch."""
        for name, root in roots.items():
            self._visit(root, name, _DEPTH)
        self._watched = [
            (place, operator.itemgetter(*held) if len(held) > 1 else None, tuple(held), tuple(held.values()))
            for place, held in self._globals.values()
            if held
        ]
        self.digest = self._sum.hexdigest()[:16]

    def unchanged(self) -> bool:
        """Say whether the globals and closures that were read hold what they held. Cheap: meant for every step."""
        try:
            for place, getter, names, values in self._watched:
                now = getter(place) if getter else (place[names[0]],)
                if not all(map(operator.is_, now, values)):
                    return False
            return all(cell.cell_contents is value for cell, value in self._cells) and all(
                repr(plain(value)) == text for value, text in self._mutable
            )
        except (KeyError, ValueError):  # a global or a closed-over name that is gone
            return False

    def _add(self, *texts: str) -> None:
        for text in texts:
            self._sum.update(text.encode())
            self._sum.update(b"\0")

    def _visit(self, value: Any, path: str, depth: int) -> None:
        if value is None or isinstance(value, _PLAIN):
            self._add(repr(value))
        elif isinstance(value, enum.Enum):
            self._add(str(value))
        elif isinstance(value, Tensor):
            self.tensors[path] = value
            self._add("tensor", str(value.dtype), str(tuple(value.shape)), str(value.stride()), str(value.device))
        elif id(value) in self._seen or depth == 0:
            self._add("again", type(value).__qualname__, getattr(value, "__qualname__", ""))
        else:
            self._seen[id(value)] = value
            self._look_into(value, path, depth)

    def _look_into(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__, path, depth)
            self._visit(value.__self__, f"{path}.__self__", depth)
        elif isinstance(value, functools.partial):
            for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._visit(part, f"{path}.{name}", depth)
        elif isinstance(value, staticmethod | classmethod):
            self._visit(value.__func__, path, depth)
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset):
                self._visit(accessor, path, depth)
        elif isinstance(value, functools.cached_property):
            self._visit(value.func, path, depth)
        elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self._add(value.__name__, getattr(value, "__module__", None) or "")
        elif isinstance(value, nn.Module):
            self._module(value, path, depth)
        elif isinstance(value, Optimizer):
            self._visit(type(value), path, depth)
        else:
            self._value(value, path, depth)

    def _value(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, tuple | list):
            self._add(type(value).__qualname__, str(len(value)))
            for index, each in enumerate(value):
                self._visit(each, f"{path}[{index}]", depth - 1)
        elif isinstance(value, Mapping):
            self._add(type(value).__qualname__, str(len(value)))
            for name, each in value.items():
                self._add(repr(plain(name)))
                self._visit(each, f"{path}[{name!r}]", depth - 1)
        elif isinstance(value, set | frozenset):
            self._add(repr(plain(value)))
        elif isinstance(value, np.ndarray):
            self._add(str(value.dtype), str(value.shape), hashlib.sha256(value.tobytes()).hexdigest())
        elif hasattr(value, "__wrapped__"):  # functools.cache and the like
            self._visit(value.__wrapped__, path, depth)
        else:
            kind = type(value)
            self._add(kind.__module__, kind.__qualname__)
            if _by_name(kind.__module__):
                self._add(_said(value))
            else:
                self._visit(kind, kind.__qualname__, depth)
            for name, each in attributes(value):
                self._add(name)
                self._visit(each, f"{path}.{name}", depth - 1)

    def _function(self, function: types.FunctionType, path: str) -> None:
        self._add(function.__module__ or "", function.__qualname__)
        if _by_name(function.__module__):
            return
        self._code(function.__code__)
        for index, default in enumerate(function.__defaults__ or ()):
            self._visit(default, f"{path}.default{index}", _DEPTH)
        for key, default in (function.__kwdefaults__ or {}).items():
            self._visit(default, f"{path}.{key}", _DEPTH)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # a name that has no value yet
                continue
            if name == "__class__":  # what super() reads: the class, which is visited anyway
                continue
            self._cells.append((cell, value))
            self._watch(value)
            self._visit(value, f"{path}.{name}", _DEPTH)
        names = set(_names(function.__code__))
        self._names(function.__globals__, names, function.__module__ or "")
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self._visit(wrapped, path, _DEPTH)

    def _names(self, place: dict[str, Any], names: set[str], path: str) -> None:
        """Visit what `names` stand for in a namespace; for a module found there they may be attributes."""
        for name in sorted(names & place.keys()):
            value = place[name]
            held = self._globals.setdefault(id(place), (place, {}))[1]
            if name in held:
                continue
            held[name] = value
            self._watch(value)
            self._add(name)
            if isinstance(value, types.ModuleType) and not _by_name(value.__name__):
                self._names(vars(value), names, value.__name__)
            else:
                self._visit(value, f"{path}.{name}", _DEPTH)

    def _watch(self, value: Any) -> None:
        """Remember what a value holds where it can change and stay itself."""
        fixed = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, Tensor, nn.Module, Optimizer)
        if value is None or isinstance(value, (*_PLAIN, *fixed, enum.Enum)):
            return
        if isinstance(value, list | dict | set | types.SimpleNamespace | argparse.Namespace) or not _by_name(
            type(value).__module__
        ):
            self._mutable.append((value, repr(plain(value))))

    def _class(self, kind: type, path: str) -> None:
        self._add(kind.__module__, kind.__qualname__)
        if _by_name(kind.__module__):
            return
        for base in kind.__mro__[1:]:
            self._visit(base, base.__qualname__, _DEPTH)
        held = self._globals.setdefault(id(kind), (vars(kind), {}))[1]
        for name, value in vars(kind).items():
            if name not in _SKIPPED and not name.startswith(("_abc_", "__dataclass", "__match", "__slots", "__param")):
                held[name] = value
                self._add(name)
                self._visit(value, f"{path}.{name}", _DEPTH)

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        """A module that is not the model's: its parameters and buffers are constants of the step."""
        self._visit(type(module), type(module).__qualname__, depth)
        if id(module) in self._own:
            return
        for name, value in vars(module).items():
            if name != GETSTATE:  # of another compiled model: no part of what it computes
                self._add(name)
                self._visit(value, f"{path}.{name}", depth - 1)

    def _code(self, code: types.CodeType) -> None:
        self._sum.update(code.co_code)
        self._add(repr(code.co_names), repr(code.co_varnames), repr(code.co_freevars))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self._add(repr(plain(constant)))


def code_digest(*roots: Any) -> str:
    """Return a digest of the code that can be reached from functions and classes, and of the values it names."""
    return Reach({str(index): root for index, root in enumerate(roots)}).digest


def plain(value: Any, depth: int = 3) -> Any:
    """Return a value whose text is the same in every process: plain values, and containers and objects of them.

    Tensors and modules become their type's name (their contents are state), functions their own; objects are looked
    into `depth` levels deep. Sets are sorted: their order is no one's.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | torch.dtype | torch.device):
        return value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor | nn.Module) or depth == 0:
        return type(value).__qualname__
    if isinstance(value, tuple | list):
        return type(value).__name__, [plain(each, depth - 1) for each in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(plain(each, depth - 1)) for each in value)
    if isinstance(value, dict):
        return [(plain(name), plain(each, depth - 1)) for name, each in value.items()]
    return type(value).__qualname__, [(name, plain(each, depth - 1)) for name, each in attributes(value)]


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's own attributes, those in slots too."""
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _by_name(module: str | None) -> bool:
    """Say whether a module's code counts by its name: the standard library and FRAMEWORKS."""
    top = (module or "").partition(".")[0]
    return top in FRAMEWORKS or (top in sys.stdlib_module_names and top != "__main__")


def _said(value: Any) -> str:
    """Return what tells one object of a framework from another, such as an operator's name."""
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | np.generic):
        return str(value)
    return getattr(value, "__name__", "")


def is_frozen(value: Any) -> bool:
    """Say whether a value cannot change and stay itself: then its identity says all."""
    if value is None or isinstance(value, (*_PLAIN, enum.Enum, types.FunctionType, types.BuiltinFunctionType, type)):
        return True
    if isinstance(value, tuple):
        return all(map(is_frozen, value))
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(is_frozen(each) for _, each in attributes(value))
    return False
