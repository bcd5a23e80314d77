"""The command `explain`: what the compiler does with a spec's step, as tables, text, JSON or a picture."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstep.cli.here import JsonOpt, Lowered, SpecArg
from twinstep.cli.output import clean, console, print_json
from twinstep.cli.specfile import read_spec
from twinstep.spec.errors import UnavailableError

if TYPE_CHECKING:
    from twinstep.worker.compile.inspection import Inspectable


class Stage(enum.Enum):
    """Where a step can be looked at as text."""

    CAPTURED = "captured"
    TRANSFORMED = "transformed"
    LOWERED = "lowered"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("explain")(explain)


def explain(
    spec_path: SpecArg,
    backend: Annotated[
        Lowered | None, typer.Option("--backend", help="What lowers the step; else the spec's compile.backend.")
    ] = None,
    stage: Annotated[
        Stage | None, typer.Option("--stage", help="Print the step as text at a stage, instead of tables.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option("--draw", metavar="PATH", help="Write the step as an SVG picture.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="List every value of the step too.")] = False,
    as_json: JsonOpt = False,
) -> int:
    """Capture a spec's training step and say what the compiler does with it; nothing is trained."""
    spec = read_spec(spec_path)
    from twinstep.worker.train.explain import look_at

    try:
        step = look_at(spec, backend=backend.value if backend else None, say=_say_aside)
    except ModuleNotFoundError as error:  # torch and the rest are imported inside
        if error.name is None or error.name.split(".")[0] == "twinstep":
            raise
        raise UnavailableError(
            f"the compiler needs the package {error.name}, which is not installed here",
            remedy="pip install 'twinstep[worker,data]'",
        ) from None
    if draw is not None:
        step.draw(draw)
    if stage is not None:
        text = step.graph(stage.value)
        if as_json:
            print_json({"stage": stage.value, "text": text})
        else:
            sys.stdout.write(clean(text) + "\n")
    else:
        _show(step, values=values, as_json=as_json)
    return 0


def _say_aside(text: str) -> None:
    """Tell a person at a terminal what takes its time."""
    if sys.stderr.isatty():
        print(f"{text} …", file=sys.stderr, flush=True)


def _show(step: Inspectable, *, values: bool, as_json: bool) -> None:
    explanation = step.explain()
    if as_json:
        listed = {"values": explanation.values().as_rows()} if values else {}
        print_json({"explain": explanation.as_dict() | listed})
        return
    out = console()
    if out.is_terminal:
        out.print(explanation)
    else:
        sys.stdout.write(clean(str(explanation)) + "\n")
    if values:
        sys.stdout.write("\n" + clean(explanation.values().text()) + "\n")
