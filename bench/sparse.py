"""`sparse`: a step with a table of 1,000,000 × 64 by Adagrad: eager, eager with sparse gradients, and ours.

Eager's dense gradient is as large as the table, and its optimizer goes through all of it. `sparse=True` makes torch's
own sparse gradients. Ours is the plain model: the compiler finds out that rows suffice.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import Child, need_cxx
from bench.measure import Say, interleave, ratio, ratio_spread, result, spread
from bench.tables import spec_with

VARIANTS = ("eager", "eager_sparse", "inductor", "xla")
PAIRS = tuple((eager, ours) for ours in ("inductor", "xla") for eager in ("eager", "eager_sparse"))
LOSS_TOLERANCE = 1e-2  # relative; as in `step.py`


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    variants: tuple[str, ...] = VARIANTS
    runs: int = 15
    steps: int = 2
    """Steps of one variant's turn."""
    warmup: int = 2


FULL = Size(spec=spec_with(1_000_000))


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, the dataset is missing, or a variant failed.
    """
    if "inductor" in size.variants:
        need_cxx()
    losses: dict[str, list[float]] = {name: [] for name in size.variants}
    with contextlib.ExitStack() as stack:
        children = start(stack, {name: {"variant": name, "spec": size.spec} for name in size.variants}, say=say)

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
    pairs = [pair for pair in PAIRS if set(pair) <= set(samples)]
    gap = loss_gap(losses)
    body = {
        "ratios": {f"{above}/{below}": ratio(samples[above], samples[below]) for above, below in pairs},
        "ratio_spread": {f"{above}/{below}": ratio_spread(samples[above], samples[below]) for above, below in pairs},
        "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        "loss_gap": gap,
        "equal": gap is not None and gap <= LOSS_TOLERANCE,
        "steps_per_run": size.steps,
        "spec": dict(size.spec),
    }
    return result("sparse", body, runs=size.runs)


def start(stack: contextlib.ExitStack, wanted: Mapping[str, Mapping[str, Any]], *, say: Say) -> dict[str, Child]:
    """Start a child for each of `wanted` and run its first step; all of them end with `stack`."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinstep-bench-")))
    children = {}
    for number, (name, arguments) in enumerate(wanted.items()):
        cache = folder / str(number)
        children[name] = stack.enter_context(
            Child("bench.tables:TableVariant", {**arguments, "cache_dir": str(cache)}, cache_dir=cache / "inductor")
        )
        say(f"{name}: first step")
        children[name].call("first")
    return children


def loss_gap(losses: Mapping[str, list[float]]) -> float | None:
    """Return the greatest relative difference to the first variant's losses; None where one is not finite."""
    reference, *others = losses.values()
    gaps = [abs(loss / right - 1) for each in others for loss, right in zip(each, reference, strict=True)]
    return max(gaps, default=0.0) if all(map(math.isfinite, gaps)) else None


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    gap = found["loss_gap"]
    agreement = "a loss is not finite" if gap is None else f"losses differ by at most {gap:.1e}"
    page = Table(
        title="one train step with a table of 1,000,000 × 64, Adagrad",
        caption=f"{found['runs']} interleaved runs of {found['steps_per_run']} steps; {agreement}",
    )
    for name in ("variant", "ms", "IQR", "least", "eager/…", "eager_sparse/…"):
        page.add_column(name, justify="left" if name == "variant" else "right")
    for name, numbers in found["ms_spread"].items():
        ratios = [found["ratios"].get(f"{eager}/{name}") for eager in ("eager", "eager_sparse")]
        page.add_row(
            name,
            *(f"{numbers[key]:.1f}" for key in ("median", "iqr", "min")),
            *("–" if each is None else f"{each:.2f}" for each in ratios),
        )
    return page
