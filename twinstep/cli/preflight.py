"""Commands that ask before anything runs: preflight (will it fit, how fast), compile (by the TPU compiler), plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinstep.cli.here import JsonOpt, SpecArg, needs_worker
from twinstep.cli.output import aot_table, clean, console, one_line, plain_table, print_json
from twinstep.cli.specfile import read_spec
from twinstep.spec.errors import UnavailableError

if TYPE_CHECKING:
    from twinstep.spec.job import JobSpec

TopologyOpt = Annotated[
    str | None,
    typer.Option("--topology", metavar="SLICE", help="A TPU slice, v5p:4x4x8; else the spec's accelerator."),
]
QuickOpt = Annotated[
    bool, typer.Option("--quick", help="Ask sooner, for slower code; bytes moved then count differently.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("preflight")(preflight)
    app.command("compile")(compile_ahead)
    app.command("plan")(plan)


def preflight(
    spec_path: SpecArg,
    aot: Annotated[
        bool, typer.Option("--aot", help="Ask the TPU compiler too: minutes, exact; what it made is kept for the run.")
    ] = False,
    quick: QuickOpt = False,
    as_json: JsonOpt = False,
) -> int:
    """Say whether a spec fits its accelerator, how fast a step could be, and what would make it fit."""
    spec = read_spec(spec_path)
    from twinstep.preflight.check import preflight as look

    found = look(spec)
    compiled = _compiled(spec, topology=None, quick=quick, keep=True) if aot else None
    if as_json:
        print_json({"preflight": found.as_json(), **({} if compiled is None else {"report": compiled})})
    else:
        from twinstep.preflight.words import as_text

        print(clean(as_text(found)))
        if compiled is not None:
            print()
            console().print(aot_table(compiled))
    return 0 if found.fits else 1


def compile_ahead(
    spec_path: SpecArg, topology: TopologyOpt = None, quick: QuickOpt = False, as_json: JsonOpt = False
) -> int:
    """Compile a spec's step for a TPU slice, without a TPU: memory, traffic, collectives, seconds."""
    report = _compiled(read_spec(spec_path), topology=topology, quick=quick, keep=False)
    if as_json:
        print_json({"report": report})
    else:
        console().print(aot_table(report))
    return 0


def _compiled(spec: JobSpec, *, topology: str | None, quick: bool, keep: bool) -> dict[str, Any]:
    try:
        from twinstep.worker.train.ahead import compile_spec
    except ModuleNotFoundError as error:
        raise needs_worker("compiling", error) from None
    return compile_spec(spec, topology=topology, effort="quick" if quick else "full", keep=keep).as_json()


def plan(
    spec_path: SpecArg,
    stats: Annotated[
        Path | None,
        typer.Option("--stats", metavar="FILE", help="What `twinstep tables --json` found; else ids are zipf's."),
    ] = None,
    as_json: JsonOpt = False,
) -> int:
    """Say how a spec's embedding tables are best held on its devices: replicated, split, on SparseCores; and why."""
    spec = read_spec(spec_path)
    from twinstep.preflight.planning import plan_spec

    found = plan_spec(spec, seen=None if stats is None else _read_stats(stats)).as_json()
    if as_json:
        print_json({"plan": found})
        return 0 if found["fits"] else 1
    from twinstep.preflight.words import gib, seconds

    heads = ("table", "rows", "width", "ids a batch", "way", "a device", "a step", "why")
    table = plain_table(*heads, right=("rows", "width", "ids a batch", "a device", "a step"))
    for each in found["choices"]:
        use = each["table"]
        way = f"{each['way']} ({each['stack']})" if each["stack"] else each["way"]
        sizes = (f"{use['rows']:,}", str(use["width"]), f"{use['ids']:,}")
        table.add_row(
            one_line(use["name"], width=32), *sizes, way, gib(each["bytes"]), seconds(each["seconds"]), each["why"]
        )
    console().print(table)
    said = "fits" if found["fits"] else "does not fit"
    print(f"{said}: {gib(found['bytes'])} of the {gib(found['budget'])} that tables have on each device")
    return 0 if found["fits"] else 1


def _read_stats(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        wrong = "they are nested too deeply" if isinstance(error, RecursionError) else "they are no JSON"
        raise UnavailableError(
            f"the statistics in {path} cannot be read: {getattr(error, 'strerror', None) or wrong}",
            remedy="twinstep tables SPEC --json > seen.json",
        ) from None
