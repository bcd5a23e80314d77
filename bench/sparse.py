"""`sparse`: a step with a table of 1,000,000 × 64 by Adagrad: eager, eager with sparse gradients, and ours.

Eager's dense gradient is as large as the table, and its optimizer goes through all of it. `sparse=True` makes torch's
own sparse gradients. Ours is the plain model: the compiler finds out that rows suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.child import need_cxx
from bench.measure import Say, result
from bench.sides import sides, take_turns
from bench.tables import spec_with

VARIANTS = ("eager", "eager_sparse", "inductor", "xla")
PAIRS = tuple((eager, ours) for ours in ("inductor", "xla") for eager in ("eager", "eager_sparse"))


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
    wanted = {name: {"variant": name, "spec": size.spec} for name in size.variants}
    with sides("bench.tables:TableVariant", wanted, say=say) as (children, _):
        found = take_turns(children, size, say=say)
    body = {
        **found.compared(PAIRS),
        **found.agreement(),
        "steps_per_run": size.steps,
        "spec": dict(size.spec),
    }
    return result("sparse", body, runs=size.runs)


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
