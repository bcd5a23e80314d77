"""`step`: one train step of DLRMv3, four ways: eager, torch.compile, and our compiler on Inductor and on XLA.

The sides take turns, each in a process of its own (`variants.py`), over the same batches from the same weights; they
must come to the same losses, or the comparison is void. Eager and torch.compile run the model as plain PyTorch, padded
dense attention and all; what the compiler puts in its place is part of what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.child import need_cxx
from bench.measure import Say, result
from bench.sides import sides, take_turns

VARIANTS = ("eager", "torch_compile", "inductor", "xla")
PAIRS = (("eager", "inductor"), ("torch_compile", "inductor"), ("eager", "xla"))

SPEC: dict[str, Any] = {
    "name": "bench-step",
    "model": {"embedding_dim": 64, "transducer_dim": 64, "num_layers": 3, "num_heads": 4},
    "data": {
        "dataset": "ml-100k",
        "batch_size": 32,
        "uih_len": 128,
        "num_candidates": 8,
        "rows": {"item_id": 20_000},
    },
    "optimizers": {"dense": {"kind": "adam"}, "sparse": {"kind": "rowwise_adagrad"}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    variants: tuple[str, ...] = VARIANTS
    runs: int = 15
    """Counted rounds."""
    steps: int = 3
    """Steps of one variant's turn, so that its own data is in the caches for most of it."""
    warmup: int = 2


FULL = Size(spec=SPEC)


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, the dataset is missing, or a variant failed.
    """
    if {"inductor", "torch_compile"} & set(size.variants):
        need_cxx()
    wanted = {name: {"variant": name, "spec": size.spec} for name in size.variants}
    with sides("bench.variants:Variant", wanted, say=say) as (children, first):
        found = take_turns(children, size, say=say)
        memory = {name: child.call("memory") for name, child in children.items()}
    body = {
        **found.compared(PAIRS),
        "ms": {name: statistics.median(values) * 1e3 for name, values in found.samples.items()},
        "first_step_s": first,
        "peak_mib": {name: each["steps"] for name, each in memory.items() if "steps" in each},
        "memory_mib": {name: dict(each) for name, each in memory.items()},
        **found.agreement(),
        "steps_per_run": size.steps,
        "spec": dict(size.spec),
    }
    return result("step", body, runs=size.runs)


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    spec = found["spec"]
    optimizers = ", ".join(f"{name} {each['kind']}" for name, each in spec.get("optimizers", {}).items())
    gap = found["loss_gap"]
    agreement = "a loss is not finite" if gap is None else f"losses differ by at most {gap:.1e}"
    page = Table(
        title=f"one train step, batch {spec['data']['batch_size']}, history {spec['data']['uih_len']}, {optimizers}",
        caption=f"{found['runs']} interleaved runs of {found['steps_per_run']} steps; ×: eager's median over this one; "
        f"memory: peak while stepping; {agreement}",
    )
    for name in ("variant", "ms", "IQR", "least", "most", "×", "peak MiB", "first step s"):
        page.add_column(name, justify="left" if name == "variant" else "right")
    for name, numbers in found["ms_spread"].items():
        eager = found["ms"].get("eager")
        page.add_row(
            name,
            *(f"{numbers[key]:.1f}" for key in ("median", "iqr", "min", "max")),
            f"{eager / numbers['median']:.2f}" if eager else "–",
            f"{found['peak_mib'][name]:,.0f}" if name in found["peak_mib"] else "–",
            f"{found['first_step_s'][name]:.1f}",
        )
    return page
