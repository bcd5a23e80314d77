"""The command `twinstep webhooks`: who is told of what happens to jobs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from twinstep.cli.here import JsonOpt
from twinstep.cli.jobs import UrlOpt
from twinstep.cli.output import console, one_line, plain_table, print_json
from twinstep.spec.words import DASH, clock

TypesOpt = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="TYPE", help="A type of event: run.failed, run.succeeded, …; once each. Else all."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    commands = typer.Typer(help="Have an address told, signed, of what happens to jobs.", no_args_is_help=True)
    commands.command("add")(add)
    commands.command("ls")(ls)
    commands.command("rm")(rm)
    app.add_typer(commands, name="webhooks")


def add(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Where messages are posted: https://…")],
    types: TypesOpt = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Make a webhook and print its secret, which is not shown again."""
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        made = plane.post("/v1/webhooks", {"url": address, "types": types or []})
    if as_json:
        print_json(made)
    else:
        print(f"made {made['webhook']['id']}\nsecret, not shown again: {made['secret']}")
    return 0


def ls(as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """List webhooks, what waits for them and what is wrong with them."""
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        hooks = plane.get("/v1/webhooks")["items"]
    if as_json:
        print_json({"webhooks": hooks})
        return 0
    table = plain_table("id", "address", "types", "waiting", "last told", "wrong", right=("waiting",))
    for hook in hooks:
        table.add_row(
            hook["id"],
            one_line(hook["url"]),
            one_line(", ".join(hook.get("types") or []) or "all"),
            str(hook.get("waiting", "")),
            clock(hook.get("delivered_at")),
            one_line(hook.get("disabled_reason") or hook.get("last_error") or DASH),
        )
    console().print(table)
    return 0


def rm(
    webhook: Annotated[str, typer.Argument(metavar="ID", help="The webhook's id.")],
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Delete a webhook; it is told nothing any more."""
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        plane.delete(f"/v1/webhooks/{quote(webhook, safe='')}")
    if as_json:
        print_json({"deleted": webhook})
    else:
        print(f"deleted {one_line(webhook)}")
    return 0
