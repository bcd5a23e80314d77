"""C++ sources of our own as shared libraries: built at first use with the system's compiler, kept on disk.

A library's name is the digest of what went into it: sources, flags, compiler, processor. It is written under another
name and renamed, so that processes may build the same one at once, and carries the digest of its bytes at its end, so
that a torn file is never loaded but built again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOG = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("g++", "clang++", "c++")
BUILD_LIMIT = 300  # seconds; a build takes one or two
_DIGEST_BYTES = 32


class BuildError(Exception):
    """A library cannot be had: no compiler, or it failed."""


def build(source: Path, *, flags: Sequence[str] = (), reads: Sequence[Path] = ()) -> Path:
    """Return the path of `source` as a shared library, built unless it is on disk already.

    Args:
        flags: further flags of the compiler.
        reads: files that `source` includes, whose change makes another library.

    Raises:
        BuildError: there is no compiler, it failed, or the library cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler: neither $CXX nor any of {', '.join(COMPILERS)}")
    texts = [path.read_bytes() for path in (source, *reads)]
    parts = [*texts, "\0".join((*FLAGS, *flags)).encode(), _version(compiler).encode(), processor().encode()]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]
    path = cache_directory() / f"{source.stem}-{digest}.so"
    if not whole(path):
        _compile(compiler, source, flags, path)
    return path


def load(path: Path) -> ctypes.CDLL:
    """Load a library that `build` returned.

    Raises:
        BuildError: the system's linker refuses it.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error


def find_compiler() -> str | None:
    """Return the C++ compiler: $CXX, which Inductor calls too, or the first that is on PATH."""
    wanted = os.environ.get("CXX")
    return next((name for name in ((wanted,) if wanted else COMPILERS) if shutil.which(name)), None)


def cache_directory() -> Path:
    """Return where libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "twinstep" / "native"


def whole(path: Path) -> bool:
    """Say whether a library is there, the user's own, and as it was written."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@functools.cache
def processor() -> str:
    """Return the processor's model and instruction sets: a library is made for those."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "Features", "CPU part")))


@functools.cache
def _version(compiler: str) -> str:
    found = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout


def _compile(compiler: str, source: Path, flags: Sequence[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, *flags, "-o", str(made), str(source)]
            LOG.debug("building %s", path.name)
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_LIMIT)  # noqa: S603
            with made.open("ab") as file:  # a loader reads no further than the last section
                file.write(hashlib.sha256(made.read_bytes()).digest())
                file.flush()
                os.fsync(file.fileno())
            made.replace(path)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        raise BuildError(f"{compiler} failed on {source.name}: {said[:300]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot build {source.name}: {error}") from error
