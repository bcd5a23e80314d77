"""What Inductor compiled, as bytes and back: the Python module it wrote and the libraries its C++ became.

Inductor's own artefacts name files in its cache directory and look them up by a digest of source and compiler; these
carry the libraries' bytes, so that loading one asks neither the compiler nor Inductor for anything, and nothing is
unpickled. CPU code only: a program with GPU kernels is left to Inductor's own cache.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph

Code = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled graph: takes its inputs in a list, which it empties, and returns its outputs."""

_MAKES_COMPILER = "async_compile = AsyncCompile()"
_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(", re.MULTILINE)
_OTHER_USE = re.compile(r"\basync_compile\.(?!cpp_pybinding\(|wait\(globals\(\)\))")
_numbers = itertools.count()


def save_code(compiled: Any) -> dict[str, bytes] | None:
    """Return the parts that `load_code` makes the compiled graph of, or None where it cannot be carried so."""
    if not isinstance(compiled, CompiledFxGraph) or set(compiled.device_types) - {"cpu"} or compiled.inputs_to_check:
        return None
    if compiled.constants or compiled.frozen_param_names or compiled.torchbind_constants:
        return None
    source, module = compiled.source_code, _module_of(compiled.current_callable)
    if module is None or source.count(_MAKES_COMPILER) != 1 or _OTHER_USE.search(source):
        return None
    parts = {"source": source.encode()}
    names = _KERNEL.findall(source)
    for number, name in enumerate(names):
        library = getattr(getattr(vars(module).get(name), "__self__", None), "__file__", None)
        if library is None:
            return None
        parts[f"kernel/{number}"] = Path(library).read_bytes()
    parts["kernels"] = json.dumps(names).encode()
    return parts


class LoadedCode:
    """A compiled graph that was loaded; called as the one it was saved from."""

    def __init__(self, call: Code, source_code: str) -> None:
        self._call = call
        self.source_code = source_code

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run the graph on inputs in a list, which is emptied."""
        return self._call(inputs)


def load_code(parts: Mapping[str, bytes]) -> LoadedCode:
    """Return the compiled graph that `save_code` made parts of.

    Raises:
        Exception: whatever loading a library or running a module of another torch raises; then it is a miss.
    """
    names = json.loads(parts["kernels"])
    with tempfile.TemporaryDirectory(prefix="twinstep-program-") as folder:
        # A library stays mapped when its file is gone; nobody can change it after its sum was checked.
        kernels = [_library(parts[f"kernel/{number}"], Path(folder) / f"{number}.so") for number in range(len(names))]
    module = types.ModuleType(f"twinstep_program_{next(_numbers)}")
    vars(module)["AsyncCompile"] = lambda: _Loaded(kernels)
    source = parts["source"].decode()
    # The module would make a compiler of its own; here it is given one that has everything already.
    loaded = source.replace("from torch._inductor.async_compile import AsyncCompile\n", "")
    exec(compile(loaded, module.__name__, "exec"), vars(module))  # noqa: S102  Inductor's code, its sum checked
    return LoadedCode(vars(module)["call"], source)


class _Loaded:
    """Stands in for Inductor's compiler while a module is loaded: hands out the kernels in the module's order."""

    def __init__(self, kernels: list[Any]) -> None:
        self._kernels = iter(kernels)

    def cpp_pybinding(self, *_: Any, **__: Any) -> Any:
        return next(self._kernels)

    def wait(self, _: dict[str, Any]) -> None:
        pass


def _library(content: bytes, path: Path) -> Any:
    """Return the function of a library's bytes."""
    path.touch(mode=0o700)
    path.write_bytes(content)
    # Inductor's libraries find torch's own function by this address.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = importlib.util.spec_from_file_location(f"twinstep_kernel_{next(_numbers)}.kernel", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no library that Python can load")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)["kernel"]


def _module_of(function: Any) -> types.ModuleType | None:
    """Return the module Inductor wrote: `call` is a function of it, or a method of its runner."""
    name = getattr(function, "__module__", None)
    return sys.modules.get(name) if name else None
