"""Whether this machine can build what Inductor writes: C++ that includes Python.h. Imports neither torch nor jax."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from twinstep.spec.errors import UnavailableError

PROBE_LIMIT = 60.0  # seconds; a compiler that takes longer for one line is none
ANOTHER_WAY = "or compile.backend: xla, which needs no compiler"


def check_compiler() -> None:
    """Compile one line as Inductor would, with the compiler named in CXX or g++.

    Raises:
        UnavailableError: there is no such compiler, it lacks Python's headers, or it fails.
    """
    name = os.environ.get("CXX") or "g++"
    headers = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory(prefix="twinstep-probe-") as place:
        source = Path(place) / "probe.cpp"
        source.write_text("#include <Python.h>\n")
        command = [*shlex.split(name), f"-I{headers}", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        try:
            done = subprocess.run(  # noqa: S603  the user's own compiler
                command, capture_output=True, text=True, errors="replace", timeout=PROBE_LIMIT, check=False
            )
        except FileNotFoundError:
            raise UnavailableError(
                f"the inductor backend needs a C++ compiler, and {name} is not here",
                remedy=f"install one (apt-get install g++), name one in CXX, {ANOTHER_WAY}",
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(
                f"the inductor backend needs a C++ compiler, and {name} cannot be run: {error}",
                remedy=f"install g++, name another in CXX, {ANOTHER_WAY}",
            ) from error
    if done.returncode == 0:
        return
    if not (Path(headers) / "Python.h").exists():
        raise UnavailableError(
            f"the inductor backend needs Python's C headers, and {headers} has no Python.h",
            remedy=f"install them (apt-get install python3-dev), {ANOTHER_WAY}",
        )
    said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
    raise UnavailableError(
        f"the inductor backend needs a C++ compiler, and {name} fails: {said[:300]}",
        remedy=f"install g++, name another in CXX, {ANOTHER_WAY}",
    )
