"""How numba compiles what must be quick: once, without the interpreter's lock, kept on disk.

Everything is given to kernels as addresses and tables of one shape, so each kernel has one signature and no batch
compiles anything. numba knows a stored function by the file that defines it alone, while machine code holds what other
files' kernels do as well; so code is kept in a directory named by the digest of all of them. It is written to a file
of its own and renamed, so processes may start at once. Where no directory can be written, code stays in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import numba
from numba.core import caching, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def sources_digest() -> str:
    """Return the digest of every source that kernels are compiled from."""
    folder = Path(__file__).parent
    paths = [Path(__file__), *sorted((folder / "kernels").glob("*.py"))]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()[:24]


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


def kernel(function: Function) -> Function:
    """Compile `function` at its first call, or load it from disk."""
    made: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    with contextlib.suppress(RuntimeError):  # no directory can be written
        made._cache = _Cache(made.py_func)  # type: ignore[no-untyped-call]
    typed: Function = made
    return typed


def _pointer(typing_context: Any, address: Any) -> Any:
    """Turn an integer into a pointer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), build


pointer: Any = intrinsic(_pointer)
carray: Any = numba.carray  # type: ignore[attr-defined]
