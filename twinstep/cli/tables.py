"""The command `tables`: how SparseCores would hold a spec's tables, and the limits that its batches need."""

from __future__ import annotations

from typing import Annotated

import typer

from twinstep.cli.here import JsonOpt, SpecArg, needs_worker
from twinstep.cli.output import console, one_line, plain_table, print_json
from twinstep.cli.specfile import read_spec

STACK_WIDTH = 24  # columns of a stack's name, which is the names of all its tables


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("tables")(tables)


def tables(
    spec_path: SpecArg,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Devices of the job; else those of the spec's slices.")
    ] = None,
    cores: Annotated[int | None, typer.Option("--cores", min=1, help="SparseCores of a device.")] = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches of training data to look at.")] = 4,
    as_json: JsonOpt = False,
) -> int:
    """Lay a spec's embedding tables out over SparseCores: padding, stacks, limits, balance; nothing is trained."""
    spec = read_spec(spec_path)
    try:
        from twinstep.worker.embedding.sparsecore.spec import Cores
        from twinstep.worker.train.tables import HEADS, as_rows, cores_of_spec, look_at_tables

        chosen = None
        if devices or cores:
            own = cores_of_spec(spec)
            chosen = Cores(devices=devices or own.devices, per_device=cores or own.per_device)
        found = look_at_tables(spec, cores=chosen, batches=batches)
    except ModuleNotFoundError as error:
        raise needs_worker("looking at tables", error) from None
    if as_json:
        print_json({"tables": found})
        return 0
    held = found["cores"]
    console().print(f"{held['devices']} devices of {held['per_device']} SparseCores; {found['batches']} batches\n")
    page = plain_table(*HEADS, right=tuple(each for each in HEADS if each not in ("table", "stack")))
    for row in as_rows(found):
        cells = dict(zip(HEADS, row, strict=True))
        page.add_row(*(cells | {"stack": one_line(cells["stack"], width=STACK_WIDTH)}).values())
    console().print(page)
    return 0
