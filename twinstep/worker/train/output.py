"""Lines for the run's log. A log on a full disk, or a pipe that nobody reads any more, ends no run: it is given up."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO


def say(text: str) -> None:
    """Print a line on standard output, where it can be printed."""
    with giving_up(sys.stdout):
        print(text, flush=True)


@contextlib.contextmanager
def giving_up(stream: IO[str]) -> Iterator[None]:
    """Where writing to `stream` fails within a block, point it to nowhere from then on.

    What it still holds would fail again, at the latest when the interpreter flushes it: that makes exit code 120, and
    the run would count as failed.
    """
    try:
        yield
    except (OSError, ValueError, SystemExit) as error:  # ValueError: it was closed
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # only rich ends a program whose pipe nobody reads any more
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def flush_output() -> None:
    """Write out what standard streams hold, where that can be done."""
    for stream in (sys.stdout, sys.stderr):
        with giving_up(stream):
            stream.flush()
