"""`step`: one train step of DLRMv3, four ways: eager, torch.compile, and our compiler on Inductor and on XLA.

The sides take turns, each in a process of its own (`variants.py`), over the same batches from the same weights; they
must come to the same losses, or the comparison is void. Eager and torch.compile run the model as plain PyTorch, padded
dense attention and all; what the compiler puts in its place is part of what is measured.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import Child, need_cxx
from bench.measure import Say, interleave, ratio, ratio_spread, result, spread

VARIANTS = ("eager", "torch_compile", "inductor", "xla")
PAIRS = (("eager", "inductor"), ("torch_compile", "inductor"), ("eager", "xla"))
LOSS_TOLERANCE = (
    1e-2  # relative to the first variant's; float32 sums in another order drift apart by far less in a hundred steps
)

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
    losses: dict[str, list[float]] = {name: [] for name in size.variants}
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-") as folder, contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for name in size.variants:
            cache = Path(folder) / name
            arguments = {"variant": name, "spec": size.spec, "cache_dir": str(cache)}
            children[name] = stack.enter_context(
                Child("bench.variants:Variant", arguments, cache_dir=cache / "inductor")
            )
        first = {}
        for name, child in children.items():
            say(f"{name}: first step")
            first[name] = float(child.call("first"))

        def turn(name: str) -> Callable[[], float]:
            def go() -> float:
                found = children[name].call("steps", count=size.steps)
                losses[name].append(found["loss"])
                return float(found["seconds"])

            return go

        samples = interleave(
            {name: turn(name) for name in size.variants},
            runs=size.runs,
            warmup=size.warmup,
            on_round=lambda number, total: say(f"round {number} of {total}"),
        )
        memory = {name: child.call("memory") for name, child in children.items()}
    return result("step", _body(size, samples, losses, first, memory), runs=size.runs)


def _body(
    size: Size,
    samples: Mapping[str, list[float]],
    losses: Mapping[str, list[float]],
    first: Mapping[str, float],
    memory: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    pairs = [pair for pair in PAIRS if set(pair) <= set(samples)]
    reference = losses[size.variants[0]]
    gaps = [
        abs(loss - right) / abs(right) for each in losses.values() for loss, right in zip(each, reference, strict=True)
    ]
    # NaN compares with nothing, so that max() could pass over it, and JSON has no word for it.
    gap = max(gaps) if all(map(math.isfinite, gaps)) else None
    return {
        "ratios": {f"{above}/{below}": ratio(samples[above], samples[below]) for above, below in pairs},
        "ratio_spread": {f"{above}/{below}": ratio_spread(samples[above], samples[below]) for above, below in pairs},
        "ms": {name: statistics.median(values) * 1e3 for name, values in samples.items()},
        "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        "first_step_s": dict(first),
        "peak_mib": {name: found["steps"] for name, found in memory.items() if "steps" in found},
        "memory_mib": {name: dict(found) for name, found in memory.items()},
        "loss_gap": gap,
        "equal": gap is not None and gap <= LOSS_TOLERANCE,
        "steps_per_run": size.steps,
        "spec": dict(size.spec),
    }


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
