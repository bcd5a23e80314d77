"""The command `twinstep`: reads arguments and files, asks one of the two halves, prints what came of it.

Each command imports its half late, so `twinstep --help` needs neither torch nor FastAPI.
"""

from __future__ import annotations


def main() -> None:
    """Run the command with the process's arguments and exit with its code."""
    import sys

    from twinstep.cli.app import run

    sys.exit(run(sys.argv[1:]))
