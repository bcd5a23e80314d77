"""What the command prints: JSON, tables, and errors with their exit codes.

Every text that came from outside (names, reasons, logs) passes `clean` before it reaches a terminal: a log line must
not move the cursor, retitle the window or pass for the command's own words. Nothing here asks the control plane.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinstep.spec.errors import CompileError, PeerLostError, TrainError, TwinstepError, UnavailableError
from twinstep.spec.words import BIDIRECTIONAL, CONTROLS, DASH, EXIT_PEER_LOST, cut, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXIT_FAILED = 1
EXIT_USAGE = 2
MOST_FAULTS = 20  # lines of one error
PIPE_WIDTH = 200  # columns of what a program reads

# Controls but tab and newline become visible pictures; U+FFFD stands for those that have none.
_SHOWN = dict.fromkeys(BIDIRECTIONAL | CONTROLS, 0xFFFD) | {code: 0x2400 + code for code in CONTROLS if code < 0x20}
_SHOWN |= {0x7F: 0x2421, 0x0A: 0x0A}

STATE_STYLES = {
    "pending": "dim",
    "queued": "cyan",
    "starting": "cyan",
    "running": "blue",
    "restarting": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
}


class UnreachableError(UnavailableError):
    """The control plane does not answer: nothing was wrong with what the user asked for."""

    code = "unreachable"


class RemoteError(TwinstepError):
    """The control plane answered with an error that is its own (5xx), or with something that is no answer of ours."""

    code = "remote_error"


def clean(text: str) -> str:
    """Return `text` with control characters made visible, tabs and newlines kept."""
    return text.translate(_SHOWN)


def one_line(text: str, *, width: int = 0) -> str:
    """Return `text` cleaned and on one line, cut to `width` characters where `width` is given."""
    line = " ".join(clean(text).split())
    return cut(line, width) if width else line


def exit_code(error: TwinstepError) -> int:
    """Return 1 where the work failed or the control plane is away, 2 where the user has something to mend.

    One of a run's processes that lost another one has a code of its own, which is no cause of the run's end.
    """
    if isinstance(error, PeerLostError):
        return EXIT_PEER_LOST
    if isinstance(error, TrainError | CompileError | UnreachableError | RemoteError):
        return EXIT_FAILED
    return EXIT_USAGE


def error_json(error: TwinstepError) -> dict[str, Any]:
    """Return the error as `--json` prints it."""
    faults = [
        {key: getattr(fault, key) for key in ("field", "problem", "given", "allowed", "remedy")}
        for fault in error.faults
    ]
    return {"error": {"code": error.code, "problem": error.problem, "remedy": error.remedy, "faults": faults}}


def report_error(error: TwinstepError, *, as_json: bool) -> None:
    """Print the error: one JSON line to standard output, or its lines to standard error."""
    if as_json:
        print_json(error_json(error))
        return
    # Each fault's line ends with what mends it. Problem and remedy share a line, as a fault's do: the control plane
    # gives the last line of a worker's log as the reason of its failure.
    remedy = f"; fix: {one_line(error.remedy)}" if error.remedy and not error.faults else ""
    problem = error.problem
    for fault in error.faults[:1]:  # its line says it
        problem = problem.removesuffix(f": {fault.field} {fault.problem}")
    lines = [f"error: {one_line(problem)}{remedy}"]
    lines += [f"  {one_line(fault.line())}" for fault in error.faults[:MOST_FAULTS]]
    if len(error.faults) > MOST_FAULTS:
        lines.append(f"  and {len(error.faults) - MOST_FAULTS} more; --json lists all")
    print("\n".join(lines), file=sys.stderr)


def print_json(data: Any) -> None:
    """Print one JSON value on one line, flushed, so that a reader of a stream sees it at once."""
    print(json.dumps(data, ensure_ascii=False, allow_nan=False, default=str), flush=True)


def console(*, stderr: bool = False) -> Console:
    """Return a console that takes text as it is: no markup, no emoji codes, no guessing at highlights.

    Where no terminal reads it, it is wide: a row of a table stays one line.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, width=None if stream.isatty() else PIPE_WIDTH
    )


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table without frame; columns named in `right` are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold" if column == "id" else "ellipsis"
        )
    return table


def check_place(path: Path) -> None:
    """Refuse a place for a report before it is worked for.

    Raises:
        UnavailableError: it is a directory, or lies in none.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UnavailableError(
            f"the report cannot be written to {path}: "
            + ("it is a directory" if path.is_dir() else f"there is no directory {path.parent}"),
            remedy="--html report.html",
        )


def write_page(path: Path, page: str) -> None:
    """Write a report.

    Raises:
        UnavailableError: it cannot be written there.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UnavailableError(
            f"the report cannot be written to {path}: {error.strerror}", remedy="--html with a place you can write to"
        ) from error


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the table a finished run ends with: backend, speed, compile, held-out scores, the baselines' AUC."""
    baselines = summary.get("baselines") or {}
    names = [name for name in baselines if isinstance(baselines[name], Mapping)][:6]
    heads = ["backend", "steps", "examples/s", "compile s", "AUC", "NE"]
    heads += [f"AUC {one_line(name, width=24).replace('_', ' ')}" for name in names]
    table = plain_table(*heads, right=tuple(heads[1:]))
    table.add_row(
        one_line(str(summary.get("backend", DASH)), width=24),
        number(summary.get("steps")),
        number(summary.get("examples_per_s"), 1),
        number(summary.get("compile_s"), 1),
        number(summary.get("auc")),
        number(summary.get("ne")),
        *[number(baselines[name].get("auc")) for name in names],
    )
    return table


_LEAST_TRAFFIC = 0.01  # of all bytes: kinds of work below it take no line of their own


def _beside_sparsecores(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what an AotReport's overlap says; one of an older version has no spans."""
    covered, least = found.get("covered", 0), found.get("sparse_cycles", 0)
    calls = f"{number(found['calls'])}, {number(found['beside'])} with TensorCore work beside"
    shares = [
        ("SparseCore span covered, %", covered, least),
        ("TensorCore beside, %", found["cycles_beside"], found["cycles"]),
    ]
    return [
        ("SparseCore calls", calls),
        *((name, number(100 * part / whole, 1)) for name, part, whole in shares if whole),
    ]


def aot_table(report: Mapping[str, Any]) -> Table:
    """Return the table of a step that was compiled ahead of time; amounts are for one step on one device."""
    table = plain_table("what", "value", right=("value",))
    hbm = report["hbm"]
    rows = [
        ("slice", one_line(str(report["topology"]))),
        ("devices", number(report["devices"])),
        *[(f"HBM {name}, MiB", number(hbm[name] / 2**20, 1)) for name in hbm if name != "peak"],
        ("HBM in all, MiB", number(hbm["peak"] / 2**20, 1)),
        ("state, MiB", number(report["state_bytes"] / 2**20, 1)),
        ("GFLOP", number(report["flops"] / 1e9, 1)),
        ("GB read and written", number(report["bytes_accessed"] / 1e9, 3)),
        *[
            (f"GB, {one_line(each['kind'])}", f"{each['bytes'] / 1e9:.3f}, of HBM {each['hbm_bytes'] / 1e9:.3f}")
            for each in report["traffic"]
            if each["bytes"] >= _LEAST_TRAFFIC * report["bytes_accessed"]
        ],
    ]
    if report["optimal_seconds"] is not None:
        rows.append(("compiler's bound, ms", number(report["optimal_seconds"] * 1e3, 3)))
    if (beside := report.get("overlap")) and beside["calls"]:
        rows += _beside_sparsecores(beside)
    for each in report["collectives"]:
        size = f"{number(each['count'])} of {number(each['bytes'] / 2**20, 2)} MiB in all"
        rows.append((one_line(each["kind"]), size))
    rows += [
        ("compile s", number(report["compile_seconds"], 1)),
        ("capture s", number(report["capture_seconds"], 1)),
        ("key", one_line(report["key"])),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table
