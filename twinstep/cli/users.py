"""Commands about who may ask: login, logout, token, project, member, audit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from twinstep.cli.here import JsonOpt
from twinstep.cli.jobs import UrlOpt
from twinstep.cli.output import console, one_line, plain_table, print_json
from twinstep.cli.up import DatabaseOpt, DataDirOpt, stored_at
from twinstep.spec.errors import AuthError, UnavailableError
from twinstep.spec.roles import Role
from twinstep.spec.words import DASH, clock

tokens = typer.Typer(no_args_is_help=True, help="Make, list and revoke tokens.")
projects = typer.Typer(no_args_is_help=True, help="Make, list and delete projects.")
members = typer.Typer(no_args_is_help=True, help="Say who is in a project, and as what.")

PlaneArg = Annotated[
    str | None, typer.Argument(metavar="URL", help="The control plane; else the one other commands ask.")
]
UserArg = Annotated[str, typer.Argument(metavar="USER", help="A user's name.")]
ProjectArg = Annotated[str, typer.Argument(metavar="PROJECT", help="A project's name.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("login")(login)
    app.command("logout")(logout)
    app.command("audit")(audit)
    tokens.command("create")(create_token)
    tokens.command("new")(new_secret)
    tokens.command("list")(list_tokens)
    tokens.command("revoke")(revoke_token)
    projects.command("create")(create_project)
    projects.command("list")(list_projects)
    projects.command("delete")(delete_project)
    members.command("add")(add_member)
    members.command("list")(list_members)
    members.command("remove")(remove_member)
    for name, group in (("token", tokens), ("project", projects), ("member", members)):
        app.add_typer(group, name=name)


def login(
    at: PlaneArg = None,
    as_json: JsonOpt = False,
) -> int:
    """Ask for a token (or read it from standard input), try it, and keep it for this control plane."""
    import getpass

    from twinstep.cli.client import PlaneClient, environ_url
    from twinstep.cli.credentials import keep_token

    url = environ_url(at)
    typed = getpass.getpass(f"token for {url}: ") if sys.stdin.isatty() else sys.stdin.readline()
    token = typed.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise AuthError("no token was given", remedy="type or paste it, or hand it to standard input")
    with PlaneClient(url, token=token) as plane:
        found = plane.get("/v1/session")
    path = keep_token(url, token, os.environ)
    if as_json:
        print_json({"session": found})
        return 0
    print(f"logged in to {url} as {one_line(found['user'])}; the token is kept in {path}")
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        print("warning: this address is not HTTPS; the token can be read on its way", file=sys.stderr)
    return 0


def logout(
    at: PlaneArg = None,
) -> int:
    """Forget the token that is kept for a control plane. It stays good: `token revoke` ends it."""
    from twinstep.cli.client import environ_url
    from twinstep.cli.credentials import keep_token

    url = environ_url(at)
    keep_token(url, None, os.environ)
    print(f"no token is kept for {url} any more")
    return 0


def create_token(
    user: UserArg,
    role: Annotated[Role, typer.Option("--role", help="The most it allows in a project.")] = Role.SUBMITTER,
    admin: Annotated[bool, typer.Option("--admin", help="For all there is: --role admin --everywhere.")] = False,
    everywhere: Annotated[bool, typer.Option("--everywhere", help="Good in every project, member or not.")] = False,
    days: Annotated[int | None, typer.Option("--days", min=1, max=3650, help="Expires so soon; else never.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Write into the database itself: for the first token, or a lost one.")
    ] = False,
    data_dir: DataDirOpt = None,
    database_url: DatabaseOpt = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Make a token, and show it once."""
    wanted = {"user": user, "role": (Role.ADMIN if admin else role).value, "everywhere": admin or everywhere}
    if offline:
        made = _create_offline(wanted, days, data_dir, database_url)
    else:
        if data_dir or database_url:
            raise UnavailableError(
                "--data-dir and --database-url name a database, which only --offline writes to",
                remedy="add --offline, or leave them out",
            )
        made = _ask("POST", "/v1/tokens", url, wanted | {"expires_in_days": days})
    if as_json:
        print_json(made)
        return 0
    token = made["token"]
    ends = f", until {clock(token['expires_at'])}" if token["expires_at"] else ""
    where = "in every project" if token["everywhere"] else "in the projects of its user"
    print(f"{token['id']}: {token['role']} {where}{ends}; it is shown this once:", file=sys.stderr)
    print(made["secret"])
    return 0


def _create_offline(
    wanted: Mapping[str, Any], days: int | None, data_dir: str | None, database_url: str | None
) -> dict[str, Any]:
    from twinstep.platform.scheduler.accounts import create_offline

    settings = stored_at(data_dir, database_url)
    expires_at = None if days is None else time.time() + days * 86400
    token, secret = create_offline(
        settings, wanted["user"], role=Role(wanted["role"]), everywhere=wanted["everywhere"], expires_at=expires_at
    )
    return {"token": token.model_dump(mode="json"), "secret": secret}


def new_secret() -> int:
    """Print what can be a token, for the Secret that a cluster's first admin token comes from; it is not kept."""
    from twinstep.platform.store.users import new_token

    print(new_token())
    return 0


def list_tokens(
    user: Annotated[str | None, typer.Option("--user", help="Only this user's.")] = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """List tokens, the newest first."""
    found = _ask("GET", "/v1/tokens", url, params={"user": user} if user else None)["items"]
    if as_json:
        print_json({"tokens": found})
        return 0
    now = time.time()

    def standing(token: Mapping[str, Any]) -> str:
        if token["revoked_at"]:
            return "revoked"
        return "expired" if token["expires_at"] and token["expires_at"] <= now else "good"

    _table(
        ("id", "user", "role", "where", "is", "made", "expires", "last used"),
        (
            (
                token["id"],
                token["user"],
                token["role"],
                "everywhere" if token["everywhere"] else "projects",
                standing(token),
                *(clock(token[key]) for key in ("created_at", "expires_at", "last_used_at")),
            )
            for token in found
        ),
    )
    return 0


def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id: tok-…")],
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Refuse a token from now on, everywhere, and the browsers logged in with it."""
    token = _ask("DELETE", f"/v1/tokens/{_part(token_id)}", url)
    return _said({"token": token}, f"{token['id']} of {token['user']} is revoked", as_json)


def create_project(
    name: ProjectArg,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Of its jobs; else the project's name.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Kueue LocalQueue that admits its jobs.")] = None,
    image: Annotated[str | None, typer.Option("--image", help="Of workers, where a job names none.")] = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Make a project: a namespace and a queue for jobs that belong together."""
    wanted = {"name": name, "namespace": namespace, "queue": queue, "image": image}
    made = _ask("POST", "/v1/projects", url, wanted)
    return _said({"project": made}, f"project {made['name']} runs in namespace {made['namespace']}", as_json)


def list_projects(as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """List the projects you are a member of; all of them, for an admin."""
    found = _ask("GET", "/v1/projects", url)["items"]
    if as_json:
        print_json({"projects": found})
        return 0
    fields = ("name", "namespace", "queue", "image")
    _table(fields, ([each[field] or DASH for field in fields] for each in found))
    return 0


def delete_project(name: ProjectArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Delete a project and its members; its jobs stay, for admins to see."""
    _ask("DELETE", f"/v1/projects/{_part(name)}", url)
    return _said({"deleted": name}, f"project {name} is deleted", as_json)


def add_member(
    project: ProjectArg,
    user: UserArg,
    role: Annotated[Role, typer.Option("--role", help="What they are to be.")] = Role.SUBMITTER,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Make a user a member of a project, or give a member another role."""
    made = _ask("PUT", f"/v1/projects/{_part(project)}/members/{_part(user)}", url, {"role": role.value})
    return _said({"member": made}, f"{made['user']} is {made['role']} in {project}", as_json)


def list_members(project: ProjectArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """List a project's members."""
    found = _ask("GET", f"/v1/projects/{_part(project)}/members", url)["items"]
    if as_json:
        print_json({"members": found})
        return 0
    _table(("user", "role"), ((each["user"], each["role"]) for each in found))
    return 0


def remove_member(project: ProjectArg, user: UserArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Take a member away; their next request is refused."""
    _ask("DELETE", f"/v1/projects/{_part(project)}/members/{_part(user)}", url)
    return _said({"removed": user}, f"{user} is no member of {project} any more", as_json)


def audit(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many lines.")] = 50,
    before: Annotated[int | None, typer.Option("--before", min=1, help="Only lines older than this number.")] = None,
    actor: Annotated[str | None, typer.Option("--actor", help="Only what this user did.")] = None,
    action: Annotated[str | None, typer.Option("--action", help="Only this, as job.submit.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only in this project.")] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Show who changed what, and what was refused, the newest first."""
    asked = {
        "limit": limit, "before": before, "actor": actor, "action": action, "project": project,
        "outcome": "refused" if refused else None,
    }  # fmt: skip
    page = _ask("GET", "/v1/audit", url, params={key: value for key, value in asked.items() if value is not None})
    if as_json:
        print_json({"audit": page["items"], "next_before": page["next_before"]})
        return 0

    def about(line: Mapping[str, Any]) -> str:
        security = line["data"].get("security", "restricted")
        granted = f"security: {security}" if security != "restricted" else ""
        return "; ".join(part for part in (granted, line["reason"]) if part)

    _table(
        ("id", "time", "actor", "action", "target", "project", "outcome", "about"),
        (
            (
                line["id"],
                clock(line["time"]),
                *(line[key] or DASH for key in ("actor", "action", "target", "project", "outcome")),
                about(line),
            )
            for line in page["items"]
        ),
    )
    return 0


def _ask(
    method: str,
    path: str,
    url: str | None,
    body: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
) -> Any:
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        return plane.ask(method, path, body=body, params=params)


def _part(name: str) -> str:
    return quote(name, safe="")


def _said(data: Mapping[str, Any], words: str, as_json: bool) -> int:
    if as_json:
        print_json(data)
    else:
        print(one_line(words))
    return 0


def _table(heads: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> None:
    table = plain_table(*heads)
    for row in rows:
        table.add_row(*(one_line(str(cell)) for cell in row))
    console().print(table)
