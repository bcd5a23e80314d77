"""`tpu`: DLRMv3's whole train step compiled ahead of time for TPU slices by the real TPU compiler, on this machine.

The full-size step for v5p:4x4x8, naive and ours; then smaller ones for other slices. Naive is the same model, captured
as it is with every strategy off: attention is then plain ops, which write its scores to memory. Both are compiled at
both efforts, and compared at the same one. What the compiler counts as bytes accessed depends on it: at full effort it
brings values into the chip's fast memory (VMEM) ahead of their use, and counts each such move four times. So what
crosses HBM is compared as well.

Each compile is a process of its own and is done once: it takes a minute or two, and what is compared besides its
seconds (memory, traffic, collectives) is the same every time. Nothing runs on a TPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.measure import Say, result
from twinstep.spec.job import JobSpec
from twinstep.worker.compile.aot_report import AotReport, Effort
from twinstep.worker.train.ahead import compile_spec

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


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Compile and return the result.

    Raises:
        TwinstepError: libtpu is not installed, or it refuses a step.
    """
    reports = []
    for case in size.cases:
        say(f"{case.model} for {case.topology}, {case.engine}, {case.effort} effort")
        reports.append(
            compile_spec(
                JobSpec.model_validate(case.spec),
                topology=case.topology,
                strategies=STRATEGIES[case.engine],
                effort=case.effort,
            )
        )
    naive, ours, naive_quick, ours_quick = reports[:4]
    body = {
        "slices": [_entry(case, report) for case, report in zip(size.cases, reports, strict=True)],
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


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    ratios = found["ratios"]
    page = Table(
        title="DLRMv3's step, compiled ahead of time by the TPU compiler; amounts per device",
        caption="naive over ours: "
        f"compile {ratios['compile_s']:.2f}×, bytes {ratios['bytes_accessed']:.2f}×, "
        f"across HBM {ratios['hbm_traffic']:.2f}×; both quick: compile {ratios['compile_s_quick']:.2f}×, "
        f"bytes {ratios['bytes_accessed_quick']:.2f}×, across HBM {ratios['hbm_traffic_quick']:.2f}×",
    )
    for name in ("slice", "model", "engine", "effort", "compile s", "HBM MiB", "GB moved", "GFLOP", "collectives"):
        page.add_column(name, justify="left" if name in ("slice", "model", "engine", "effort") else "right")
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
    return page
