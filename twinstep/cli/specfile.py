"""From a path (or `-`) to a JobSpec: reads no more than a spec may have, and says plainly what a path is instead."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinstep.spec.errors import SpecError

if TYPE_CHECKING:
    from twinstep.spec.job import JobSpec

_EXAMPLES = "give the path of a job spec in YAML or JSON, or - to read one from standard input"


def read_spec(path: str) -> JobSpec:
    """Return the JobSpec that the file at `path` holds; `-` reads standard input.

    Raises:
        SpecError: no such file, a directory, not readable, too large, no text, or no valid spec.
    """
    from twinstep.spec.parse import MAX_SPEC_BYTES, parse_spec

    source = "standard input" if path == "-" else path
    raw = _read(path, limit=MAX_SPEC_BYTES + 1)
    if b"\0" in raw[:4096]:
        raise SpecError(f"{source} is a binary file, not a job spec", remedy=_EXAMPLES)
    if len(raw) > MAX_SPEC_BYTES:
        raise SpecError(
            f"{source} is too large: a spec has at most {MAX_SPEC_BYTES:,} bytes",
            remedy=_EXAMPLES,
        )
    return parse_spec(raw, source=source)


def _read(path: str, *, limit: int) -> bytes:
    """Return at most `limit` bytes, so that neither /dev/zero nor a disk image fills the memory."""
    if path == "-":
        return sys.stdin.buffer.read(limit)
    try:
        # Without O_NONBLOCK, opening a named pipe that nobody writes to would hang.
        handle = os.open(Path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(21, "is a directory")
            os.set_blocking(handle, True)
            return file.read(limit)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file", remedy=_near(path)) from None
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory, not a job spec", remedy=_specs_in(Path(path))) from None
    except PermissionError:
        raise SpecError(f"{path} may not be read by you", remedy=f"chmod u+r {path}, or give another file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError(f"{path} cannot be read: {detail}", remedy=_EXAMPLES) from None


def _near(path: str) -> str:
    """Name the file that may be meant: the same name with the other suffix, or nearly, or in a directory below."""
    import difflib
    import glob

    try:
        wanted = Path(path)
        names = [entry.name for entry in wanted.parent.iterdir() if entry.suffix in (".yaml", ".yml", ".json")][:1000]
        below = next(wanted.parent.glob(f"[!.]*/{glob.escape(wanted.name)}"), None)
    except (OSError, ValueError):
        return _EXAMPLES
    stems = {Path(name).stem: name for name in names}
    close = difflib.get_close_matches(wanted.stem, stems, n=1, cutoff=0.7)
    meant = wanted.with_name(stems[close[0]]) if close else below
    return f"did you mean {meant}?" if meant is not None else _EXAMPLES


def _specs_in(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml", ".json"))
    except OSError:
        names = []
    return f"give one of its files, {folder / names[0]} for one" if names else _EXAMPLES
