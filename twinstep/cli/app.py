"""The table of commands, and the one place where an error becomes words and an exit code.

Commands live in `up.py` (a control plane), `here.py` (this machine: train, validate, schema), `preflight.py` (will it
fit, how fast, which tables where), `parity.py` (compare the backends here), `explain.py` (what the compiler does),
`data.py` (histories and token budgets), `tables.py` (tables on SparseCores), `cache.py` (compiled programs on disk),
`inference.py` (export, score), `jobs.py` and `attempts.py` (ask the control plane), `cluster.py` (topologies, render)
and `models.py` (what there is to train).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from twinstep.cli import (
    attempts,
    cache,
    cluster,
    credentials,
    data,
    explain,
    here,
    inference,
    jobs,
    models,
    parity,
    preflight,
    tables,
    up,
    users,
    webhooks,
)
from twinstep.cli.output import EXIT_FAILED, EXIT_USAGE, exit_code, report_error
from twinstep.spec.errors import TwinstepError
from twinstep.spec.words import EXIT_INTERRUPTED

app = typer.Typer(
    name="twinstep",
    help="Train recommendation models from one job spec: submit it, follow it, or run it here.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class UsageFault(TwinstepError):
    """The command line itself is wrong: an unknown option, a missing argument."""

    code = "usage"


class InternalFault(TwinstepError):
    """A bug of Twinstep's own."""

    code = "internal"


def _version(wanted: bool) -> None:
    if wanted:
        from twinstep import __version__

        print(f"twinstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with the token to show, before the command; else TWINSTEP_TOKEN, else what `login` kept.",
        ),
    ] = None,
) -> None:
    """Train recommendation models from one job spec: submit it, follow it, or run it here."""
    credentials.use_file(token_file)


up.register(app)
here.register(app)
jobs.register(app)
attempts.register(app)
cluster.register(app)
parity.register(app)
preflight.register(app)
explain.register(app)
data.register(app)
tables.register(app)
inference.register(app)
cache.register(app)
models.register(app)
webhooks.register(app)
users.register(app)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1 failed, 2 something to mend, 130 interrupted.

    No exception leaves: a user's mistake is one message, a bug of ours names its place. TWINSTEP_TRACEBACK=1 shows
    a bug's traceback. A run's log has it before the message: nobody can run that again with a variable set.
    """
    as_json = wants_json(argv)
    try:
        code = app(args=list(argv), prog_name="twinstep", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TwinstepError as error:
        return _fail(error, as_json=as_json, code=exit_code(error))
    except typer.TyperException as error:
        return _usage(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_FAILED
    except Exception as error:
        if os.environ.get("TWINSTEP_TRACEBACK") == "1":
            raise
        if os.environ.get("TWINSTEP_RUN_ID"):
            traceback.print_exc()
        return _fail(_internal(error), as_json=as_json, code=EXIT_FAILED)


def wants_json(argv: Sequence[str]) -> bool:
    """Say whether `--json` stands among the options; a usage error must know it before anything is parsed."""
    options = argv[: list(argv).index("--")] if "--" in argv else argv
    return "--json" in options


def _usage(error: typer.TyperException, *, as_json: bool) -> int:
    message = error.format_message().strip().replace("Value error, ", "")
    if not message:  # `twinstep` alone has printed its help already
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "twinstep"
    fault = UsageFault(message.rstrip("."), remedy=f"{command} --help lists what it takes")
    return _fail(fault, as_json=as_json, code=EXIT_USAGE)


def _internal(error: Exception) -> InternalFault:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return InternalFault(
        f"bug in twinstep: {type(error).__name__}: {str(error)[:500]}{place}",
        remedy="report it with the output of the same command under TWINSTEP_TRACEBACK=1",
    )


def _fail(error: TwinstepError, *, as_json: bool, code: int) -> int:
    try:
        report_error(error, as_json=as_json)
    except BrokenPipeError:
        _silence_stdout()
    return code


def _silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not complain about the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
