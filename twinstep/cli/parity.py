"""The command `parity`: compiled backends against eager PyTorch on this machine, as a table, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstep.cli.here import JsonOpt, Lowered, SpecArg
from twinstep.cli.output import EXIT_FAILED, check_place, console, one_line, plain_table, print_json, write_page
from twinstep.cli.specfile import read_spec
from twinstep.spec.errors import UnavailableError

if TYPE_CHECKING:
    from rich.table import Table

    from twinstep.worker.compile import ParityReport


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("parity")(parity)


def parity(
    spec_path: SpecArg,
    backend: Annotated[
        list[Lowered] | None,
        typer.Option("--backend", help="What to compare with eager; may be given twice. Both where none is named."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100_000, help="Steps to compare.")] = 20,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Look at gradients too, at twice the compiling.")
    ] = True,
    bisect: Annotated[
        bool,
        typer.Option("--bisect/--no-bisect", help="Where a backend diverges, look for the pass that is the cause."),
    ] = True,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write the report as a page, with a picture.")
    ] = None,
    as_json: JsonOpt = False,
) -> int:
    """Compare compiled steps with eager PyTorch, tensor by tensor; exit code 1 where one is over its tolerance."""
    spec = read_spec(spec_path)
    if html is not None:
        check_place(html)
    from twinstep.worker.train.parity import parity_spec

    screen = console(stderr=True)
    try:
        report = parity_spec(
            spec,
            backends=tuple(dict.fromkeys(each.value for each in backend or Lowered)),
            steps=steps,
            gradients=gradients,
            bisect=bisect,
            console=None if as_json else screen,
        )
    except ModuleNotFoundError as error:  # torch and the rest are imported inside
        if error.name is None or error.name.split(".")[0] == "twinstep":
            raise
        raise UnavailableError(
            f"comparing needs the package {error.name}, which is not installed here",
            remedy="pip install 'twinstep[worker,data]'",
        ) from None
    if html is not None:
        write_page(html, report.to_html())
    if as_json:
        print_json({"parity": report.to_json()})
    else:
        out = console()
        out.print(_table(report))
        for line in report.summary().splitlines():
            out.print(one_line(line))
        if html is not None:
            out.print(f"report: {one_line(str(html))}")
    return 0 if report.ok else EXIT_FAILED


def _table(report: ParityReport) -> Table:
    """Return the worst tensor of each kind, per backend."""
    heads = ("backend", "kind", "worst tensor", "max abs", "max rel", "error / allowed", "weighed", "")
    table = plain_table(*heads, right=heads[3:7])
    for backend, kind, tensor in report.rows():
        worst, weighed = tensor.worst, max(each.weighed for each in tensor.steps)
        table.add_row(
            backend.backend,
            kind,
            one_line(tensor.name, width=60),
            f"{worst.max_abs:.2g}",
            f"{worst.max_rel:.2g}",
            f"{worst.ratio:.2g}",
            str(weighed or ""),
            "excluded" if tensor.excluded else "ok" if tensor.ok else "OVER",
        )
    return table
