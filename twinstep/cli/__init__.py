"""The command `twinstep`: reads arguments and files, asks one of the two halves, prints what came of it.

Each command imports its half late, so `twinstep --help` needs neither torch nor FastAPI.
"""

from __future__ import annotations


def main() -> None:
    """Run the command with the process's arguments and exit with its code."""
    import io
    import sys

    from twinstep.cli.app import run

    for stream in (sys.stdout, sys.stderr):
        # Half a surrogate pair in a log, or an arrow on a terminal that has none, is no reason to stop.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
