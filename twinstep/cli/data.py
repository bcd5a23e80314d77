"""The command `data`: how long a spec's histories are, what padding wastes, and which token budget suits them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from twinstep.cli.here import JsonOpt, SpecArg, needs_worker
from twinstep.cli.output import check_place, console, plain_table, print_json, write_page
from twinstep.cli.specfile import read_spec
from twinstep.spec.errors import SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from twinstep.worker.data.lengths import LengthStudy

BAR = 48  # columns of the longest bar


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("data")(data)


def data(
    spec_path: SpecArg,
    target_loss: Annotated[
        float,
        typer.Option("--target-loss", min=0.0, max=1.0, metavar="SHARE", help="Share of the events that may be lost."),
    ] = 0.01,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write what was found as a page, with a picture.")
    ] = None,
    as_json: JsonOpt = False,
) -> int:
    """Look at a spec's data: how long histories are, what padding wastes, which uih_budget to take."""
    spec = read_spec(spec_path)
    if html is not None:
        check_place(html)
    try:
        from twinstep.worker.data.datasets import Dataset, load_dataset
        from twinstep.worker.data.lengths import study_lengths
        from twinstep.worker.data.lengths_page import render
    except ModuleNotFoundError as error:
        raise needs_worker("looking at data", error) from None
    dataset = load_dataset(spec.data)
    if not isinstance(dataset, Dataset):
        from twinstep.spec.job import DATASETS_OF_ROWS

        every = get_args(type(spec.data).model_fields["dataset"].annotation)
        raise SpecError(
            f"data.dataset {spec.data.dataset} has rows without histories, so there is no token budget to choose",
            remedy=f"name a dataset of events: {', '.join(each for each in every if each not in DATASETS_OF_ROWS)}",
        )
    study = study_lengths(dataset, spec.data, seed=spec.train.seed, target_loss=target_loss)
    if html is not None:
        write_page(html, render(study))
    if as_json:
        print_json({"data": study.as_json()})
    else:
        _show(study, console())
        if html is not None:
            console().print(f"report: {html}")
    return 0


def _show(study: LengthStudy, out: Console) -> None:
    out.print(
        f"{study.name}: {study.events:,} events of {study.users:,} users; {study.train_samples:,} training samples, "
        f"{study.held_out_events:,} events held out, {study.positives:.1%} of training labels positive\n"
    )
    quantiles = plain_table("history", *study.quantiles, "mean", "empty", "full", right=(*study.quantiles, "mean"))
    values = [str(value) for value in study.quantiles.values()]
    quantiles.add_row("events", *values, f"{study.mean:.1f}", f"{study.empty:.1%}", f"{study.whole:.1%}")
    out.print(quantiles)
    out.print()
    most = max(1, *(count for _, _, count in study.histogram))
    bars = plain_table("events", "samples", "", right=("events", "samples"))
    for low, high, count in study.histogram:
        bars.add_row(f"{low}–{high}", f"{count:,}", "█" * round(BAR * count / most))
    out.print(bars)
    out.print()
    heads = ("batches with", "uih_budget", "padded tokens", "events lost", "batches that lose some")
    uses = plain_table(*heads, right=heads[1:])
    uses.add_row("all padded to uih_len", str(study.uih_len), f"{study.padded_slots:.1%}", "0.00%", "0.0%")
    for says, use in (("the spec's budget", study.current), ("recommended", study.recommended)):
        uses.add_row(says, str(use.budget), f"{use.padded:.1%}", f"{use.lost:.2%}", f"{use.batches_cut:.1%}")
    out.print(uses)
    out.print(
        f"\nrecommended: data.uih_budget: {study.recommended.budget}, the least that loses at most "
        f"{study.target_loss:.2%} of the events in batches of {study.batch_size}"
    )
