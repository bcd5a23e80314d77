"""`preflight`: the analytic model of a device's memory against the TPU compiler's own report, over a grid of specs.

Sizes × generations × ways to hold tables. Each spec is compiled for its slice by the real TPU compiler, in a process of
its own, at quick effort, which changes memory little; the model takes milliseconds. The page shows the error of each,
and whether the model lets anything pass that the compiler refuses. `--only PATTERN` compiles those specs alone whose
names match, and puts each into the kept result as soon as it is there.

Cases that are `apart` had no part in making the model: their errors say what it is worth elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.measure import Say, as_page, result, rounded
from twinstep.preflight.check import preflight
from twinstep.preflight.words import gib
from twinstep.spec.errors import CompileError, NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.train.ahead import compile_spec

MIB = 1 << 20
KEPT = Path(__file__).parent / "results" / "preflight.json"
"""The result that is kept."""


def dlrmv3(*, layers: int, dim: int, history: int, rows: int, batch: int, **more: Any) -> dict[str, Any]:
    """Return a DLRMv3: 4 heads, whose widths together are D; slots of a row that a fused layer takes."""
    return {
        "name": "bench-preflight",
        "model": {
            "embedding_dim": more.pop("width", 64),
            "transducer_dim": dim,
            "num_layers": layers,
            "num_heads": 4,
            "linear_dim": dim // 4,
            "attention_dim": dim // 4,
            "hidden_dim": dim,
        },
        "data": {
            "dataset": "synthetic",
            "batch_size": batch,
            "uih_len": history,
            "num_candidates": 6,
            "rows": {"item_id": rows},
            **more.pop("data", {}),
        },
        **more,
    }


def dlrm(*, rows: int, batch: int, width: int = 64, **more: Any) -> dict[str, Any]:
    """Return a DLRM of 26 tables with DCN-v2's cross layers; `rows` of the largest table, a third of each next one."""
    sizes = {f"cat_{index}": max(rows // 3**index, 2000) for index in range(12)}
    return {
        "name": "bench-preflight",
        "model": {
            "kind": "dlrm",
            "embedding_dim": width,
            "bottom_dims": [512, 256],
            "over_dims": [1024, 512, 256],
            "cross_rank": 256,
        },
        "data": {"dataset": "synthetic-clicks", "batch_size": batch, "rows": sizes},
        **more,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One spec on one slice."""

    name: str
    topology: str
    spec: Mapping[str, Any]
    apart: bool = False
    """Whether the model was made without looking at it."""

    @property
    def full_name(self) -> str:
        """Name of the spec on its slice, `v5p-2x2x1-dlrmv3-ring`."""
        return f"{self.topology.replace(':', '-')}-{self.name}"

    def job(self) -> JobSpec:
        """Return the spec for the slice."""
        asked = parse_slice(self.topology)
        accelerator: dict[str, Any] = {"kind": "tpu", "generation": asked.generation, "topology": asked.topology}
        if asked.topology == "2x4" and asked.generation in ("v5e", "v6e"):
            accelerator["chips_per_host"] = 8
        return JobSpec.model_validate({"embedding": {"engine": "dense"}, **self.spec, "accelerator": accelerator})


SMALL = dlrmv3(layers=2, dim=256, history=256, rows=1 << 20, batch=256)
MIDDLE = dlrmv3(layers=3, dim=512, history=512, rows=1 << 21, batch=128, width=128)
FULL = dlrmv3(layers=5, dim=512, history=512, rows=1 << 17, batch=1024)
PACKED = dlrmv3(layers=3, dim=256, history=512, rows=1 << 20, batch=128, data={"uih_budget": 384})
ADAM = dlrmv3(layers=2, dim=256, history=256, rows=1 << 20, batch=128, optimizers={"sparse": {"kind": "adam"}})
SPLIT = dlrmv3(layers=2, dim=256, history=256, rows=1 << 24, batch=128)
CLICKS = dlrm(rows=4_000_000, batch=8192)
MANY = dlrm(rows=40_000_000, batch=4096)
RING: dict[str, Any] = {**SPLIT, "embedding": {"engine": "ring"}}
SPARSECORE: dict[str, Any] = {**SPLIT, "embedding": {"engine": "sparsecore"}}
GRID = (
    Case(name="dlrmv3-2x256", topology="v5p:2x2x1", spec=SMALL),
    Case(name="dlrmv3-2x256", topology="v6e:2x2", spec=SMALL),
    Case(name="dlrmv3-2x256", topology="v7x:2x2x1", spec=SMALL),
    Case(name="dlrm-26x4M", topology="v5p:2x2x1", spec=CLICKS),
    Case(name="dlrm-26x4M", topology="v6e:4x4", spec=CLICKS),
    Case(name="dlrm-26x40M", topology="v5p:2x2x1", spec=MANY),
    Case(name="dlrmv3-packed", topology="v5p:2x2x1", spec=PACKED),
    Case(name="dlrmv3-adam", topology="v5p:2x2x1", spec=ADAM),
    Case(name="dlrmv3-split", topology="v5p:2x2x1", spec=SPLIT),
    Case(name="dlrmv3-split", topology="v6e:4x4", spec=SPLIT),
    Case(name="dlrmv3-3x512", topology="v5p:2x2x2", spec=MIDDLE),
    Case(name="dlrmv3-3x512", topology="v7x:2x2x1", spec=MIDDLE),
    Case(name="dlrm-26x40M", topology="v7x:2x2x1", spec=MANY),
    Case(name="dlrmv3-ring", topology="v5p:2x2x1", spec=RING),
    Case(name="dlrmv3-ring", topology="v6e:4x4", spec=RING),
    Case(name="dlrmv3-sparsecore", topology="v5p:2x2x1", spec=SPARSECORE),
    Case(name="dlrmv3-5x512", topology="v5p:4x4x8", spec=FULL),
)
"""Sizes × generations × ways to hold tables."""


def run(grid: tuple[Case, ...] = GRID, *, say: Say, kept: Path = KEPT, only: str | None = None) -> dict[str, Any]:
    """Compile all and return the result.

    Args:
        only: pattern of the names of the specs that are compiled, and of no others: they take their places in `kept`.

    Raises:
        TwinstepError: libtpu is not installed, or cannot take a step for another reason than memory; no name matches.
    """
    if only is None:
        return _summed_up([compared(case, say) for case in grid])
    chosen = [case for case in grid if fnmatchcase(case.full_name, only)]
    if not chosen:
        known = ", ".join(case.full_name for case in grid)
        raise NotFoundError(f"no spec's name matches {only!r}", remedy=f"there are {known}")
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"cases": []}
    for case in chosen:
        entries = {each["full_name"]: each for each in found["cases"]} | {case.full_name: compared(case, say)}
        found = _summed_up([entries[each.full_name] for each in grid if each.full_name in entries])
        kept.write_text(as_page(rounded(found)))
    return found


def _summed_up(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of these specs."""
    errors = [abs(each["error"]) for each in entries if each["error"] is not None]
    apart = [abs(each["error"]) for each in entries if each["error"] is not None and each["apart"]]
    body = {
        "cases": list(entries),
        "worst_error": max(errors, default=0.0),
        "worst_error_apart": max(apart, default=0.0),
        "mean_error": sum(errors) / max(len(errors), 1),
        "passed_but_refused": [each["full_name"] for each in entries if each["fits"] and each["compiler_mib"] is None],
        "equal": all(not each["fits"] or each["compiler_mib"] is not None for each in entries),
    }
    return result("preflight", body, runs=1)


def compared(case: Case, say: Say) -> dict[str, Any]:
    """Return what the model and the compiler say of one spec."""
    spec = case.job()
    started = time.perf_counter()
    model = preflight(spec)
    took = time.perf_counter() - started
    say(f"{case.name} for {case.topology}: {gib(model.hbm)} by the model")
    try:
        report = compile_spec(spec, effort="quick")
    except CompileError as error:
        say(f"the compiler refuses it: {error.problem}")
        report = None
    peak = None if report is None else report.hbm.peak
    return {
        "name": case.name,
        "full_name": case.full_name,
        "topology": case.topology,
        "apart": case.apart,
        "fits": model.fits,
        "model_mib": model.hbm / MIB,
        "compiler_mib": None if peak is None else peak / MIB,
        "error": None if peak is None else model.hbm / peak - 1,
        "parts_mib": {part.name: part.bytes / MIB for part in model.parts},
        "compiler_parts_mib": None
        if report is None
        else {name: getattr(report.hbm, name) / MIB for name in ("arguments", "outputs", "alias", "temp", "code")},
        "model_ms": took * 1e3,
        "model_step_ms": None if model.step is None else model.step.seconds * 1e3,
        "compiler_step_ms": None if report is None else (report.optimal_seconds or 0.0) * 1e3,
        "compile_s": None if report is None else report.compile_seconds,
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title="Memory of a device: the model against the TPU compiler",
        caption=f"worst error {found['worst_error']:.1%}, of specs that the model was made without "
        f"{found['worst_error_apart']:.1%}, mean {found['mean_error']:.1%}; "
        f"passed by the model, refused by the compiler: {len(found['passed_but_refused'])}",
    )
    for name in ("spec", "slice", "model MiB", "compiler MiB", "error", "model ms", "compile s"):
        page.add_column(name, justify="left" if name in ("spec", "slice") else "right")
    for each in found["cases"]:
        compiler, error = each["compiler_mib"], each["error"]
        page.add_row(
            each["name"],
            each["topology"],
            f"{each['model_mib']:,.0f}",
            "refused" if compiler is None else f"{compiler:,.0f}",
            "" if error is None else f"{error:+.1%}",
            f"{each['model_ms']:.1f}",
            "" if each["compile_s"] is None else f"{each['compile_s']:.0f}",
        )
    return page
