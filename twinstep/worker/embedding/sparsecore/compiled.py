"""How numba compiles what must be quick: once, without the interpreter's lock, kept on disk.

Everything is given to kernels as addresses and tables of one shape, so each kernel has one signature and no batch
compiles anything. numba knows a stored function by the file that defines it alone, while machine code holds what other
files' kernels do as well, and its index, which is read unlocked, lists several processors; so code is kept in a
directory named by the digest of all sources, numba's version and the processor. Files are written aside and renamed, so
processes may start at once, on hosts that share a home too. What cannot be written or read back stays in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core import caching, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def sources_digest() -> str:
    """Return the digest of all that machine code depends on: every source, numba and this processor."""
    folder = Path(__file__).parent
    paths = [Path(__file__), *sorted((folder / "kernels").glob("*.py"))]
    machine = f"{numba.__version__} {get_host_cpu_name()} {get_host_cpu_features().flatten()}"
    parts = [path.read_bytes() for path in paths] + [machine.encode()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]


def cache_directory() -> Path:
    """Return where machine code is kept: `NUMBA_CACHE_DIR`, or the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME", "/nonexistent") + "/.cache"
    return Path(os.environ.get("NUMBA_CACHE_DIR") or Path(base) / "twinstep" / "kernels") / sources_digest()


class _Locator(caching._CacheLocator):
    """Where numba keeps one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(cache_directory())

    def get_source_stamp(self) -> str:
        return sources_digest()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Callable[..., Any], path: str) -> Self | None:
        made = cls(function)
        try:
            made.ensure_cache_path()  # type: ignore[no-untyped-call]
        except OSError:
            return None
        return made


class _Stored(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # type: ignore[list-item]  # noqa: RUF012


class _Cache(caching.FunctionCache):
    _impl_class = _Stored

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except (OSError, EOFError, pickle.UnpicklingError):  # gone, or torn: compiled again
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a disk that has become full since: code stays in memory
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def kernel(function: Function) -> Function:
    """Compile `function` at its first call, or load it from disk."""
    return _compiled(function)


def inlined(function: Function) -> Function:
    """Do as `kernel`, and put the code wherever it is called, so that the loop around it runs in vector registers."""
    return _compiled(function, forceinline=True)


def _compiled(function: Function, **options: Any) -> Function:
    made: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False, **options)(function)
    with contextlib.suppress(RuntimeError):  # no directory can be written
        made._cache = _Cache(made.py_func)  # type: ignore[no-untyped-call]
    typed: Function = made
    return typed


def _pointer(typing_context: Any, address: Any) -> Any:
    """Turn an integer into a pointer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), build


def _fetch_add(typing_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, at once with other threads; return what was there."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))  # type: ignore[no-untyped-call]
        return builder.atomic_rmw("add", place, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(types.uintp), build


pointer: Any = intrinsic(_pointer)
fetch_add: Any = intrinsic(_fetch_add)
carray: Any = numba.carray  # type: ignore[attr-defined]
