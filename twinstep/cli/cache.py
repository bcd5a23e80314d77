"""The command `twinstep cache`: compiled programs on disk, listed, checked and removed."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinstep.cli.here import JsonOpt, needs_worker
from twinstep.cli.output import EXIT_FAILED, console, one_line, plain_table, print_json
from twinstep.spec.words import DASH, duration, number

if TYPE_CHECKING:
    from types import ModuleType

    from twinstep.worker.compile.upkeep import Entry

DirOpt = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The cache: a spec's compile.cache_dir; else the user's own."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    commands = typer.Typer(help="List, check and remove compiled programs on this machine.", no_args_is_help=True)
    for command in (ls, verify, prune, clear):
        commands.command(command.__name__)(command)
    app.add_typer(commands, name="cache")


def ls(place: DirOpt = None, as_json: JsonOpt = False) -> int:
    """List compiled programs, the one used last first: size, age since the last use, and what they were made for."""
    directory, upkeep = _open(place)
    entries, others = upkeep.list_entries(directory), upkeep.besides(directory)
    if as_json:
        print_json({"cache": _as_json(directory, entries) | {"besides": others}})
        return 0
    _print(directory, entries)
    if others:
        kept = ", ".join(f"{one_line(name)} {_mib(size)}" for name, size in others.items())
        console().print(f"besides, kept by the backends themselves: {kept}")
    return 0


def verify(
    place: DirOpt = None,
    mend: Annotated[bool, typer.Option("--remove", help="Remove what is damaged: it is compiled again.")] = False,
    as_json: JsonOpt = False,
) -> int:
    """Read every program whole and hold it to its checksums; exit code 1 if one is damaged."""
    directory, upkeep = _open(place)
    entries = upkeep.verify(directory)
    wrong = [entry for entry in entries if entry.fault and entry.bytes]
    gone = upkeep.drop(directory, wrong) if mend else []
    if as_json:
        checked = {"checked": len(entries), "damaged": [each.as_json(time.time()) for each in wrong]}
        print_json({"cache": {"directory": str(directory), **checked, "removed": len(gone)}})
    else:
        for entry in wrong:
            console().print(f"{entry.path}: {one_line(entry.fault)}")
        console().print(f"{_count(len(entries))} checked, {len(wrong)} damaged, {len(gone)} removed")
    return EXIT_FAILED if len(wrong) > len(gone) else 0


def prune(
    place: DirOpt = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="SIZE", help="What may be left: 500MiB, 2GiB.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Remove what was not used for so long: 12h, 7d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    as_json: JsonOpt = False,
) -> int:
    """Remove programs that were not used for long, or the longest unused ones until the rest fits."""
    if max_size is None and older_than is None:
        raise typer.BadParameter("give --max-size SIZE, --older-than AGE, or both; `twinstep cache clear` removes all")
    size = None if max_size is None else _amount(max_size, _SIZES, "--max-size", "500MiB, 2GiB, 0")
    age = None if older_than is None else _amount(older_than, _AGES, "--older-than", "30min, 12h, 7d")
    directory, upkeep = _open(place)
    most = None if size is None else int(size)
    gone = upkeep.prune(directory, max_bytes=most, older_than=age, dry_run=dry_run)
    return _tell(directory, gone, as_json=as_json, dry_run=dry_run)


def clear(place: DirOpt = None, as_json: JsonOpt = False) -> int:
    """Remove all programs. Runs that use one go on; the next start compiles."""
    directory, upkeep = _open(place)
    return _tell(directory, upkeep.clear(directory), as_json=as_json)


def _open(place: Path | None) -> tuple[Path, ModuleType]:
    try:
        from twinstep.worker.compile import upkeep
        from twinstep.worker.train.environment import users_cache
    except ModuleNotFoundError as error:
        raise needs_worker("looking at the compile cache", error) from None
    return (users_cache() if place is None else place.expanduser()), upkeep


def _tell(directory: Path, gone: Sequence[Entry], *, as_json: bool, dry_run: bool = False) -> int:
    if as_json:
        print_json({"cache": {"removed": _as_json(directory, gone), "dry_run": dry_run}})
        return 0
    if dry_run and gone:
        _print(directory, gone)
    amount = sum(entry.bytes for entry in gone)
    console().print(f"{'would remove' if dry_run else 'removed'} {_count(len(gone))}, {_mib(amount)}")
    return 0


def _as_json(directory: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    now = time.time()
    return {
        "directory": str(directory),
        "bytes": sum(entry.bytes for entry in entries),
        "entries": [entry.as_json(now) for entry in entries],
    }


def _print(directory: Path, entries: Sequence[Entry]) -> None:
    now = time.time()
    page = plain_table("key", "backend", "MiB", "unused for", "made for", right=("MiB", "unused for"))
    for entry in entries:
        page.add_row(
            entry.key or DASH,
            one_line(str(entry.summary.get("backend", entry.kind))),
            number(entry.bytes / 2**20, 2),
            duration(now - entry.used),
            one_line(f"{entry.fault}: not used" if entry.fault else _made_for(entry.summary), width=110),
        )
    if entries:
        console().print(page)
    amount = sum(entry.bytes for entry in entries)
    console().print(f"{_count(len(entries))}, {_mib(amount)} in {directory}")


def _made_for(summary: Any) -> str:
    if not summary:
        return DASH
    sizes = [f"{name} {value}" for name, value in summary["sizes"].items()] or list(summary["batch"][:2])
    if summary["devices"] > 1:
        sizes.append(f"{summary['devices']} devices")
    return ", ".join([*sizes, f"{len(summary['strategies'])} strategies", f"{summary['threads']} threads"])


def _count(count: int) -> str:
    return f"{number(count)} program{'' if count == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{number(size / 2**20, 1)} MiB"


_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_AGES = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST = 12  # digits of an amount


def _amount(text: str, units: dict[str, int], option: str, allowed: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or len(found[1]) > _LONGEST or found[2] not in units:
        raise typer.BadParameter(f"{option} {one_line(text, width=40)!r} is not understood; allowed: {allowed}")
    return float(found[1]) * units[found[2]]
