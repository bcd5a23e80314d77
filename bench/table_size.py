"""`table-size`: the same step with a table of 2,000,000 × 64 and one of 20,000 × 64: its cost should follow used rows.

Time is a step's. Memory is a step's own, beyond state: the peak of resident memory while stepping, less what the
process holds between two steps (model, optimizer state, programs), each process by itself. It is taken in rounds after
those that are timed; before each, what is free goes back to the system and the peak starts anew. The median counts, for
XLA says that a step is done before it frees the step's buffer: about one step in fifty, of either size of table, meets
the buffer of the one before, and has one beside it. The greatest is told too. Ids are drawn evenly over either table,
so the large one misses the processor's caches and TLB more often: that part of its cost is real, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from bench.child import need_cxx
from bench.measure import Say, ratio, ratio_spread, result, spread
from bench.sides import sides, take_turns
from bench.tables import spec_with
from twinstep.spec.errors import UnavailableError

BACKENDS = ("inductor", "xla")
MEMORY_ROUNDS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    specs: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"small": spec_with(20_000), "large": spec_with(2_000_000)}
    )
    """The two jobs, which differ in the table's rows."""
    backends: tuple[str, ...] = BACKENDS
    runs: int = 21
    steps: int = 2
    """Steps of one turn."""
    warmup: int = 2


FULL = Size()


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, the dataset is missing, memory cannot be watched, or a side failed.
    """
    if "inductor" in size.backends:
        need_cxx()
    wanted = {
        f"{backend} {name}": {"variant": backend, "spec": spec}
        for backend in size.backends
        for name, spec in size.specs.items()
    }
    with sides("bench.tables:TableVariant", wanted, say=say) as (children, _):
        samples = take_turns(children, size, say=say).samples
        memory = {name: child.call("beyond_state", rounds=MEMORY_ROUNDS) for name, child in children.items()}
    return result("table-size", _body(size, samples, memory), runs=size.runs)


def _body(size: Size, samples: Mapping[str, list[float]], memory: Mapping[str, list[float]]) -> dict[str, Any]:
    if not all(memory.values()):
        raise UnavailableError(
            "this system does not say how much memory a process holds", remedy="run it on Linux, with /proc mounted"
        )
    beyond = {name: spread(found) for name, found in memory.items()}
    ratios, spreads = {}, {}
    for backend in size.backends:
        large, small = f"{backend} large", f"{backend} small"
        ratios[f"{backend}_time"] = ratio(samples[large], samples[small])
        ratios[f"{backend}_memory"] = beyond[large]["median"] / beyond[small]["median"]
        spreads[f"{backend}_time"] = ratio_spread(samples[large], samples[small])
    return {
        "ratios": ratios,
        "ratio_spread": spreads,
        "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        "beyond_state_mib": beyond,
        "steps_per_run": size.steps,
        "specs": {name: dict(spec) for name, spec in size.specs.items()},
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title="one train step, table of 2,000,000 × 64 (large) over 20,000 × 64 (small), Adagrad",
        caption=f"{found['runs']} interleaved runs of {found['steps_per_run']} steps; memory: peak beyond state, "
        f"median of {MEMORY_ROUNDS} rounds",
    )
    for name in ("side", "ms", "IQR", "least", "MiB beyond state", "time ×", "memory ×"):
        page.add_column(name, justify="left" if name == "side" else "right")
    for name, numbers in found["ms_spread"].items():
        backend, _, which = name.partition(" ")
        ratios = [f"{found['ratios'][f'{backend}_{kind}']:.3f}" for kind in ("time", "memory")]
        page.add_row(
            name,
            *(f"{numbers[key]:.1f}" for key in ("median", "iqr", "min")),
            f"{found['beyond_state_mib'][name]['median']:.1f}",
            *(ratios if which == "large" else ("", "")),
        )
    return page
