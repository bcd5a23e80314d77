"""Train steps that take turns: each side in a child process of its own, over the same batches from the same weights.

`step.py`, `sparse.py` and `table_size.py` differ in what the sides are, not in how they are run.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.child import Child
from bench.measure import Say, interleave, ratio, ratio_spread, spread

LOSS_TOLERANCE = (
    1e-2  # relative to the first side's; float32 sums in another order drift apart by far less in a hundred steps
)


class Rounds(Protocol):
    """How much is run."""

    @property
    def runs(self) -> int:
        """Counted rounds."""

    @property
    def warmup(self) -> int:
        """Rounds before them."""

    @property
    def steps(self) -> int:
        """Steps of one side's turn."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the rounds gave, by side."""

    samples: Mapping[str, list[float]]
    """Seconds of a step, of the counted rounds."""
    losses: Mapping[str, list[float]]
    """The last loss of every round, warm-up included."""

    def compared(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return ratios of the pairs whose sides were both run, and each side's milliseconds."""
        samples = self.samples
        there = [pair for pair in pairs if set(pair) <= set(samples)]
        return {
            "ratios": {f"{above}/{below}": ratio(samples[above], samples[below]) for above, below in there},
            "ratio_spread": {
                f"{above}/{below}": ratio_spread(samples[above], samples[below]) for above, below in there
            },
            "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        }

    def agreement(self) -> dict[str, Any]:
        """Return the greatest relative difference to the first side's losses, and whether that is within tolerance."""
        reference, *others = self.losses.values()
        gaps = [abs(loss / right - 1) for each in others for loss, right in zip(each, reference, strict=True)]
        # NaN compares with nothing, so that max() could pass over it, and JSON has no word for it.
        gap = max(gaps, default=0.0) if all(map(math.isfinite, [*gaps, *reference])) else None
        return {"loss_gap": gap, "equal": gap is not None and gap <= LOSS_TOLERANCE}


Started = tuple[dict[str, Child], dict[str, float]]


@contextlib.contextmanager
def sides(kind: str, wanted: Mapping[str, Mapping[str, Any]], *, say: Say) -> Iterator[Started]:
    """Start a child per side and run its first step, which compiles; yield them, and the first steps' seconds.

    Args:
        kind: `module:class` of what lives in a child.
        wanted: its arguments by side, without `cache_dir`: each side has an empty one.
        say: is told what goes on.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinstep-bench-")))
        children: dict[str, Child] = {}
        first: dict[str, float] = {}
        for number, (name, arguments) in enumerate(wanted.items()):
            cache = folder / str(number)
            children[name] = stack.enter_context(
                Child(kind, {**arguments, "cache_dir": str(cache)}, cache_dir=cache / "inductor")
            )
        for name, child in children.items():
            say(f"{name}: first step")
            first[name] = float(child.call("first"))
        yield children, first


def take_turns(children: Mapping[str, Child], size: Rounds, *, say: Say) -> Found:
    """Let the sides run their steps in turn."""
    losses: dict[str, list[float]] = {name: [] for name in children}

    def turn(name: str) -> Callable[[], float]:
        def go() -> float:
            found = children[name].call("steps", count=size.steps)
            losses[name].append(found["loss"])
            return float(found["seconds"])

        return go

    samples = interleave(
        {name: turn(name) for name in children},
        runs=size.runs,
        warmup=size.warmup,
        on_round=lambda number, total: say(f"round {number} of {total}"),
    )
    return Found(samples, losses)
