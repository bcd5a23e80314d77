"""`twinstep models`: the configurations of DLRMv3 by dataset, and the models there are."""

from __future__ import annotations

import typer

from twinstep.cli.here import JsonOpt
from twinstep.cli.output import console, plain_table, print_json


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("models")(models)


def models(as_json: JsonOpt = False) -> int:
    """List the models, and DLRMv3's configurations by dataset: what `model.preset` may name."""
    from twinstep.spec.parse import spec_json_schema
    from twinstep.spec.presets import presets_listing

    kinds = list(spec_json_schema()["properties"]["model"]["discriminator"]["mapping"])
    rows = presets_listing()
    if as_json:
        print_json({"models": kinds, "presets": rows})
        return 0
    screen = console()
    screen.print(f"models: {', '.join(kinds)}")
    table = plain_table(
        "preset", "dataset", "contextual", "item features", "tasks", "D", "layers", right=("D", "layers")
    )
    for row in rows:
        table.add_row(
            row["preset"],
            row["dataset"],
            ", ".join(row["contextual"]),
            ", ".join(row["item_features"]),
            ", ".join(row["tasks"]),
            str(row["sizes"]["transducer_dim"]),
            str(row["sizes"]["num_layers"]),
        )
    screen.print(table)
    return 0
