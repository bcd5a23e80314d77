"""Lines for the run's log. A log on a full disk, or a pipe that nobody reads any more, ends no run."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Print a line on standard output, where it can be printed."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
        print(text, flush=True)


def give_up_output() -> None:
    """Point standard streams that cannot be written to nowhere, so that the interpreter's last flush does not fail.

    Python exits with code 120 where that flush fails, and the run would count as failed.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
