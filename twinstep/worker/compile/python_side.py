"""What a step does on Python's side happens once, while it is traced, and never again.

Refused are changes of a module's attributes, another parameter or submodule in an old one's place, `tensor.data = …`
(which no graph shows), text of tensors (`print`), numbers from Python's and NumPy's generators, and reads of the clock.
A refused or failed step leaves modules as they were. What a step reads of globals, closures and modules is part of the
key (`code.py`): a new value compiles again. What else Python may read at each step (files, the environment) cannot be
seen, and stays as it was at the first.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from twinstep.spec.errors import CaptureError
from twinstep.worker.compile.key import module_settings

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


@contextlib.contextmanager
def python_as_it_was(model: nn.Module) -> Iterator[None]:
    """Refuse a step that changes what Python holds, or reads what will be another at the next step.

    Raises:
        CaptureError: what it changed or read, and what to do.
    """
    tree, settings, numbers = _Tree(model), dict(module_settings(model)), _generators()
    try:
        with _clocks_watched() as read, _NoValues() as tensors, _masks_are_masks():
            yield
        tree.check()
        if tensors.refused is not None:
            raise tensors.refused  # the step, or a logger in it, caught it
        _check_python(model, settings, numbers, read)
    except BaseException:
        tree.restore()
        raise


@contextlib.contextmanager
def _masks_are_masks() -> Iterator[None]:
    """Let torch's Transformer layers take a mask for what it says, and not look whether it is the causal one.

    What they look for is a hint, by which a faster kernel might be chosen: numbers are those of the mask either way.
    """
    before = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


def _check_python(model: nn.Module, settings: dict[str, str], numbers: tuple[Any, ...], read: list[str]) -> None:
    for name, now in module_settings(model):
        if settings.get(name) != now:
            raise CaptureError(
                f"the step changes the module's attribute {name} from {settings.get(name, 'none')} to {now}",
                remedy="make it a buffer (register_buffer), or change it outside the step",
            )
    if _generators() != numbers:
        raise CaptureError(
            "the step draws numbers from Python's or NumPy's generator, which would be the same at every step",
            remedy="draw with torch (torch.rand, torch.bernoulli), or put the numbers into the batch",
        )
    if read:
        raise CaptureError(
            f"the step reads the clock, which would stand still: {read[0]}",
            remedy="put the time into the batch, or measure outside the step",
        )


_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _Tree:
    """The modules of a model with what each holds: attributes, and the registries that nn.Module keeps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._attributes = {path: dict(vars(module)) for path, module in self._modules.items()}
        self._registries = {
            (path, name): dict(vars(module)[name]) for path, module in self._modules.items() for name in _REGISTRIES
        }
        self._tied = self._tied_buffers()

    def check(self) -> None:
        """Raise CaptureError where a registry holds something else than before; a buffer may be another tensor."""
        for (path, name), before in self._registries.items():
            now = vars(self._modules[path])[name]
            for key in {**before, **now}:
                old, new = before.get(key), now.get(key)
                rebound = name == "_buffers" and isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
                if old is not new and not rebound:
                    what = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}[name]
                    place = f"{path}.{key}" if path else key
                    raise CaptureError(
                        f"the step replaces, adds or removes the {what} {place}, which would happen only once",
                        remedy="write values in place (with torch.no_grad(): tensor.copy_(…)); register and exchange "
                        "modules, parameters and buffers outside the step",
                    )
        if self._tied_buffers() != self._tied:
            raise CaptureError(
                "the step gives one of two buffers that are one tensor a tensor of its own",
                remedy="write to it in place (buffer.copy_(…)), or register two buffers from the start",
            )

    def restore(self) -> None:
        """Put back attributes and registries."""
        for path, module in self._modules.items():
            attributes = module.__dict__
            attributes.clear()
            attributes.update(self._attributes[path])
            for name in _REGISTRIES:
                registry = vars(module)[name]
                registry.clear()
                registry.update(self._registries[path, name])

    def _tied_buffers(self) -> list[list[str]]:
        names: dict[int, list[str]] = {}
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            names.setdefault(id(buffer), []).append(name)
        return [each for each in names.values() if len(each) > 1]


_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__


class _NoValues(TorchFunctionMode):
    """Refuses what a trace cannot do with a tensor's values: `tensor.data = other`, which no graph shows, and text.

    A tensor that is printed would be shown once, without values, and never again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: CaptureError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:  # equal, not the same: a wrapper anew at each access
            self._refuse(
                "the step gives a tensor other data (tensor.data = …)",
                ", which no graph shows",
                remedy="write in place: with torch.no_grad(): tensor.copy_(…)",
            )
        if func in _TEXT and not _asked_by_torch():
            self._refuse(
                "the step prints a tensor, or makes text of it",
                ": it has no values while the step is captured, and a compiled step prints nothing",
                remedy="return the tensor and print it after the step",
            )
        return func(*args, **(kwargs or {}))

    def _refuse(self, problem: str, why: str, *, remedy: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        self.refused = CaptureError(f"{problem} at {place}: {line}{why}", remedy=remedy)
        raise self.refused


_TEXT = (torch.Tensor.__repr__, torch.Tensor.__format__)
_OF_TEXT = (str(Path(torch.__file__).parent / "_tensor.py"), torch.overrides.__file__, __file__)


def _asked_by_torch() -> bool:
    """Say whether torch's own code wants a tensor's text: for a message of its own."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OF_TEXT:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS[0])


@contextlib.contextmanager
def _clocks_watched() -> Iterator[list[str]]:
    """Note each read of a clock by code that is neither torch's, ours, nor the standard library's."""
    read: list[str] = []
    thread = threading.get_ident()
    clocks = {name: getattr(time, name) for name in _CLOCKS}

    def watched(name: str) -> Any:
        def clock() -> Any:
            frame = sys._getframe(1)
            if threading.get_ident() == thread and not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
                read.append(f"time.{name}() at {frame.f_code.co_filename}:{frame.f_lineno}")
            return clocks[name]()

        return clock

    for name in clocks:
        setattr(time, name, watched(name))
    try:
        yield read
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)


def _generators() -> tuple[Any, ...]:
    """Return where Python's and NumPy's global generators stand."""
    numpys: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    return random.getstate(), numpys[1].tobytes(), numpys[2]
