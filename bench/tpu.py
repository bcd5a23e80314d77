"""`tpu`: whole train steps compiled ahead of time for TPU slices by the real TPU compiler, on this machine.

The full-size step for v5p:4x4x8, naive and ours; then smaller ones for other slices. Naive is the same model, captured
as it is with every strategy off: attention is then plain ops, which write its scores to memory. Both are compiled at
both efforts, and compared at the same one. What the compiler counts as bytes accessed depends on it: at full effort it
brings values into the chip's fast memory (VMEM) ahead of their use, and counts each such move four times. So what
crosses HBM is compared as well.

Then the grid of `tpu_slices.py`: every engine of tables on slices of 4 chips to the largest. Each of its reports is
kept whole, in a file of its own in bench/results/tpu/. `--only PATTERN` compiles those steps of the grid alone whose
names match, and puts them into the kept result, which so may hold some of the grid.

Each compile is a process of its own and is done once: it takes a minute or two, and what is compared besides its
seconds (memory, traffic, collectives) is the same every time. Nothing runs on a TPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.measure import Say, as_page, result, rounded
from bench.tpu_slices import GRID, SliceCase
from twinstep.spec.errors import CompileError, NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.worker.compile.aot_report import AotReport, Effort
from twinstep.worker.train.ahead import compile_spec

REPORTS = Path(__file__).parent / "results" / "tpu"
"""Where the grid's reports are kept, one file each."""
NAIVE, OURS = "naive", "ours"
STRATEGIES: dict[str, tuple[str, ...] | None] = {NAIVE: (), OURS: None}
"""What each engine asks of the compiler; None: the defaults."""


def full_size(*, batch_size: int, num_layers: int = 5) -> dict[str, Any]:
    """Return the spec of the full-size model: D = 512, 4 heads of 128, 512 tokens of history, 520 slots a row."""
    return {
        "name": "bench-tpu",
        "model": {
            "embedding_dim": 64,
            "transducer_dim": 512,
            "num_layers": num_layers,
            "num_heads": 4,
            "linear_dim": 128,
            "attention_dim": 128,
            "hidden_dim": 512,
        },
        "data": {
            "dataset": "synthetic",
            "batch_size": batch_size,
            "uih_len": 512,
            "num_candidates": 6,
            "rows": {"item_id": 1 << 17},
        },
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One compile."""

    topology: str
    model: str
    """What the result calls the model."""
    spec: Mapping[str, Any]
    engine: str = OURS
    effort: Effort = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is compiled. The first four cases are compared: naive and ours, at full effort and quick."""

    cases: tuple[Case, ...]
    grid: tuple[SliceCase, ...] = GRID


_FULL = Case(topology="v5p:4x4x8", model="dlrmv3-5x512", spec=full_size(batch_size=1024), engine=NAIVE)
_SMALL = full_size(batch_size=32, num_layers=2)
FULL = Size(
    cases=(
        _FULL,
        dataclasses.replace(_FULL, engine=OURS),
        dataclasses.replace(_FULL, effort="quick"),
        dataclasses.replace(_FULL, engine=OURS, effort="quick"),
        *(
            Case(topology=each, model="dlrmv3-2x512", spec=_SMALL, effort="quick")
            for each in ("v5p:2x2x1", "v6e:2x4", "v7x:2x2x1")
        ),
    )
)


def run(size: Size = FULL, *, say: Say, reports: Path = REPORTS, only: str | None = None) -> dict[str, Any]:
    """Compile, write the grid's reports into a directory, and return the result.

    Args:
        only: pattern of the names of the grid's steps that are compiled, and of nothing else; they take their places in
            the result that is kept beside the directory.

    Raises:
        TwinstepError: libtpu is not installed, or it refuses a step outside the grid; no name matches.
    """
    if only is not None:
        return _of_parts(size.grid, only, say, reports)
    compared = []
    for case in size.cases:
        say(f"{case.model} for {case.topology}, {case.engine}, {case.effort} effort")
        compared.append(
            compile_spec(
                JobSpec.model_validate(case.spec),
                topology=case.topology,
                strategies=STRATEGIES[case.engine],
                effort=case.effort,
            )
        )
    naive, ours, naive_quick, ours_quick = compared[:4]
    body = {
        "slices": [_entry(case, report) for case, report in zip(size.cases, compared, strict=True)],
        "grid": [_of_grid(case, say, reports) for case in size.grid],
        "ratios": {
            "compile_s": naive.compile_seconds / ours.compile_seconds,
            "bytes_accessed": naive.bytes_accessed / ours.bytes_accessed,
            "compile_s_quick": naive_quick.compile_seconds / ours_quick.compile_seconds,
            "bytes_accessed_quick": naive_quick.bytes_accessed / ours_quick.bytes_accessed,
            "hbm_traffic": naive.hbm_traffic / ours.hbm_traffic,
            "hbm_traffic_quick": naive_quick.hbm_traffic / ours_quick.hbm_traffic,
        },
    }
    return result("tpu", body, runs=1)


def _of_parts(grid: Sequence[SliceCase], only: str, say: Say, reports: Path) -> dict[str, Any]:
    chosen = [case for case in grid if fnmatchcase(case.name, only)]
    if not chosen:
        raise NotFoundError(f"no step's name matches {only!r}", remedy=f"there are {', '.join(c.name for c in grid)}")
    place = reports.with_name(f"{reports.name}.json")
    kept: dict[str, Any] = json.loads(place.read_text())
    for case in chosen:
        entries = {each["name"]: each for each in kept["grid"]} | {case.name: _of_grid(case, say, reports)}
        kept["grid"] = [entries[each.name] for each in grid if each.name in entries]
        place.write_text(as_page(rounded(kept)))
    return kept


def _entry(case: Case, report: AotReport) -> dict[str, Any]:
    return {
        "topology": report.topology,
        "model": case.model,
        "engine": case.engine,
        "effort": case.effort,
        "compiled": True,
        "compile_s": report.compile_seconds,
        "capture_s": report.capture_seconds,
        "hbm_bytes": report.hbm.peak,
        "optimal_seconds": report.optimal_seconds,
        "bytes_accessed": report.bytes_accessed,
        "hbm_traffic": report.hbm_traffic,
        "traffic": {each.kind: {"bytes": each.bytes, "hbm_bytes": each.hbm_bytes} for each in report.traffic},
        "flops": report.flops,
        "collectives": {each.kind: {"count": each.count, "bytes": each.bytes} for each in report.collectives},
    }


def _of_grid(case: SliceCase, say: Say, reports: Path) -> dict[str, Any]:
    """Compile one step of the grid, keep its report, and return what the result says of it."""
    say(f"{case.model} for {case.topology}, {case.engine}, pipeline {case.pipeline}, {case.effort} effort")
    kept = reports / f"{case.name}.json"
    try:
        report = compile_spec(case.job(), topology=case.topology, effort=case.effort)
    except CompileError as error:
        say(f"the compiler refuses it: {error.problem}")
        kept.unlink(missing_ok=True)
        return {"name": case.name, "compiled": False, "problem": error.problem[:300]}
    reports.mkdir(parents=True, exist_ok=True)
    kept.write_text(as_page(rounded(report.as_json())))
    return of_report(case, report)


def of_report(case: SliceCase, report: AotReport) -> dict[str, Any]:
    """Return what the result says of a step of the grid."""
    beside = report.overlap
    return {
        "name": case.name,
        "compiled": True,
        "topology": report.topology,
        "devices": report.devices,
        "model": case.model,
        "engine": case.engine,
        "pipeline": case.pipeline,
        "effort": case.effort,
        "compile_s": report.compile_seconds,
        "hbm_bytes": report.hbm.peak,
        "optimal_seconds": report.optimal_seconds,
        "collectives": {each.kind: {"count": each.count, "bytes": each.bytes} for each in report.collectives},
        "sparsecore_calls": 0 if beside is None else beside.calls,
        "share_of_span": None if beside is None or not beside.calls else beside.share_of_span,
        "share_of_cycles": None if beside is None or not beside.calls else beside.share_of_cycles,
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    ratios = found["ratios"]
    page = Table(
        title="Train steps, compiled ahead of time by the TPU compiler; amounts per device",
        caption="naive over ours: "
        f"compile {ratios['compile_s']:.2f}×, bytes {ratios['bytes_accessed']:.2f}×, "
        f"across HBM {ratios['hbm_traffic']:.2f}×; both quick: compile {ratios['compile_s_quick']:.2f}×, "
        f"bytes {ratios['bytes_accessed_quick']:.2f}×, across HBM {ratios['hbm_traffic_quick']:.2f}×",
    )
    heads = ("slice", "model", "engine", "effort", "compile s", "HBM MiB", "GB moved", "GFLOP", "collectives")
    for name in (*heads, "SC span covered"):
        page.add_column(name, justify="left" if name in heads[:4] else "right")
    for each in found["slices"]:
        page.add_row(
            each["topology"],
            each["model"],
            each["engine"],
            each["effort"],
            f"{each['compile_s']:.1f}",
            f"{each['hbm_bytes'] / 2**20:,.0f}",
            f"{each['bytes_accessed'] / 1e9:.2f}",
            f"{each['flops'] / 1e9:.0f}",
            str(sum(kind["count"] for kind in each["collectives"].values())),
        )
    for each in found["grid"]:
        if each["compiled"]:
            engine = each["engine"] + (" pipelined" if each["pipeline"] == "full" else "")
            count = str(sum(kind["count"] for kind in each["collectives"].values()))
            sizes = (f"{each['compile_s']:.1f}", f"{each['hbm_bytes'] / 2**20:,.0f}", "", "", count)
            page.add_row(each["topology"], each["model"], engine, each["effort"], *sizes, _beside(each))
        else:
            page.add_row(each["name"], "", "", "", "refused", "", "", "", "", "")
    return page


def _beside(entry: Mapping[str, Any]) -> str:
    """Return the share of SparseCore calls' span beside which TensorCore work is scheduled; `quick` schedules none."""
    share = entry["share_of_span"]
    return "" if share is None or entry["effort"] == "quick" else f"{share:.1%}"
