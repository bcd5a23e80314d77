"""The commands `export` and `score`, experimental: a trained model out of its run, and candidates scored with it."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from twinstep.cli.here import JsonOpt, needs_worker
from twinstep.cli.jobs import UrlOpt
from twinstep.cli.output import console, one_line, print_json
from twinstep.spec.errors import NotFoundError, ToldToStop
from twinstep.spec.words import DASH, number


class Ranges(enum.Enum):
    """What shares a range of int8."""

    ROW = "row"
    TABLE = "table"


class Part(enum.Enum):
    """Which events are scored."""

    HELD_OUT = "held-out"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("export")(export)
    app.command("score")(score)


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A job; or the directory or URI of a checkpoint, or of a run's checkpoints.",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIRECTORY", help="What to make; nothing may be there yet.")],
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="The checkpoint after this step; else the newest.")
    ] = None,
    int8: Annotated[
        Ranges | None,
        typer.Option("--int8", help="Tables as int8, one range per row or per table; says what it costs."),
    ] = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Take a trained model out of its run: weights, spec and checksums in one directory. Experimental."""
    place = _place(source, url)
    _prepare()
    try:
        from twinstep.worker.inference.export import export as write
    except ModuleNotFoundError as error:
        raise needs_worker("exporting", error) from None
    with _unwound_by_sigterm():
        found = write(place, out, step=step, int8=None if int8 is None else int8.value)
    if as_json:
        print_json({"export": found.as_json()})
        return 0
    held = f", tables as int8 by {found.int8}" if found.int8 else ""
    print(one_line(f"{found.place}: step {found.step} of {found.checkpoint}, {found.bytes / 2**20:,.1f} MiB{held}"))
    for kind, scores in found.scores.items():
        print(f"held out, {kind}: " + ", ".join(f"{name} {number(value)}" for name, value in scores.items()))
    if found.scores:
        print(f"int8 costs {DASH if found.auc_loss is None else f'{found.auc_loss:.5f}'} of AUC")
    return 0


def score(
    where: Annotated[str, typer.Argument(metavar="EXPORT", help="Directory or URI of an export.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where scores go: .parquet, .csv or .jsonl.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FOLDER", help="Files in the form of the run's dataset; else those of its spec."
        ),
    ] = None,
    part: Annotated[Part, typer.Option("--part", help="Held-out events alone, or all of them.")] = Part.HELD_OUT,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, max=65536, help="Samples at a time.")] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FOLDER",
            help="Of your own module: where its package lies, else where Python looks; the export's own is not taken.",
        ),
    ] = None,
    as_json: JsonOpt = False,
) -> int:
    """Score candidates with an exported model, in batches; one row each. Experimental."""
    _prepare()
    try:
        from twinstep.worker.inference.score import score as run
    except ModuleNotFoundError as error:
        raise needs_worker("scoring", error) from None
    with _unwound_by_sigterm():
        found = run(where, out, data=data, part=part.value, batch_size=batch_size, source=code)
    if as_json:
        told = {"out": found.out, "candidates": found.candidates, "int8": found.int8, "scores": found.scores.values()}
        print_json({"score": told})
        return 0
    console().print(f"{found.candidates:,} candidates scored: {found.scores.words()}")
    console().print(one_line(found.out))
    return 0


def _prepare() -> None:
    """Set what torch reads when it is loaded: scoring is on the CPU."""
    from twinstep.worker.train.environment import settle_threads

    settle_threads(os.environ)


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does: what was half written is removed on the way out."""

    def end(number: int, frame: FrameType | None) -> None:
        raise ToldToStop(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _place(source: str, url: str | None) -> str:
    """Return where checkpoints lie: as given, where that is a path or URI, else where a job's are.

    Raises:
        NotFoundError: they are not in this machine's data directory; where a control plane keeps its own, it tells
            nobody.
    """
    if "/" in source or Path(source).exists():
        return source
    from twinstep.cli.client import PlaneClient
    from twinstep.platform.scheduler.local import checkpoint_place
    from twinstep.platform.settings import default_data_dir

    with PlaneClient.of(url) as plane:
        job: dict[str, Any] = plane.find(source)
    wanted = (job["spec"].get("checkpoint") or {}).get("path")
    place = checkpoint_place(default_data_dir(os.environ), job["id"], wanted)
    if "://" not in place and not Path(place).exists():  # no two jobs have one id, so what is there is this job's
        raise NotFoundError(
            f"there are no checkpoints of {job['id']} in {place}",
            remedy=f"where the control plane {plane.url} has another data directory, or is on another machine, give "
            f"that place: DATA_DIR/checkpoints/{job['id']}; a run that has ended has one, "
            "unless checkpoint.at_end is false",
        )
    return place
