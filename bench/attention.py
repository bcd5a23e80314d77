"""`attention`: HSTU attention, forward and backward, on rows of uneven length: the jagged operator and padded dense.

Padded dense is plain PyTorch: scores of every slot with every slot, masked after they were computed. The jagged
operator (`twinstep::hstu_attention`) takes the same padded tensors and reads what is filled alone. Each side has a
process of its own, over the same numbers; both must come to the same output and gradients.

Its ratios are jagged over dense: below 1 is faster, or smaller. Memory is what a pass adds at its peak to what stood
before, outputs and gradients included.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from bench.child import Child, need_cxx
from bench.measure import Say, interleave, ratio, ratio_spread, result, spread, threads

SIDES = ("dense", "jagged")
TOLERANCE = 1e-5  # relative to the largest number; float32 sums in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    batch: int = 64
    longest: int = 512
    """Slots of a row, and the longest row."""
    num_targets: int = 8
    heads: int = 4
    width: int = 32
    """Of queries, keys and values, per head."""
    runs: int = 15
    warmup: int = 3
    seed: int = 0


FULL = Size()


def row_lengths(size: Size) -> list[int]:
    """Return prefix tokens of each row: a length l has a chance in proportion to 1/l, and one row is the longest."""
    most = size.longest - size.num_targets
    chance = 1.0 / np.arange(1, most + 1)
    drawn = np.random.default_rng(size.seed).choice(np.arange(1, most + 1), size.batch, p=chance / chance.sum())
    drawn[0] = most
    return [int(length) for length in drawn]


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, or a side failed.
    """
    need_cxx()
    lengths = row_lengths(size)
    with contextlib.ExitStack() as stack:
        children = {
            name: stack.enter_context(
                Child("bench.attention:Side", {"side": name, "size": asdict(size), "lengths": lengths})
            )
            for name in SIDES
        }
        sums = {}
        for name, child in children.items():
            say(f"{name}: first pass")
            sums[name] = child.call("first")

        def turn(name: str) -> Callable[[], float]:
            return lambda: float(children[name].call("seconds"))

        samples = interleave(
            {name: turn(name) for name in SIDES},
            runs=size.runs,
            warmup=size.warmup,
            on_round=lambda number, total: say(f"round {number} of {total}"),
        )
        memory = {name: float(child.call("memory")) for name, child in children.items()}
    return result("attention", _body(size, lengths, samples, sums, memory), runs=size.runs)


def _body(
    size: Size,
    lengths: list[int],
    samples: Mapping[str, list[float]],
    sums: Mapping[str, list[float]],
    memory: Mapping[str, float],
) -> dict[str, Any]:
    gaps = [abs(ours - theirs) / max(abs(theirs), 1e-3) for ours, theirs in zip(*sums.values(), strict=True)]
    gap = max(gaps) if all(map(math.isfinite, gaps)) else None
    return {
        "ratios": {
            "time": ratio(samples["jagged"], samples["dense"]),
            "memory": memory["jagged"] / memory["dense"],
        },
        "ratio_spread": {"time": ratio_spread(samples["jagged"], samples["dense"])},
        "ms": {name: statistics.median(values) * 1e3 for name, values in samples.items()},
        "ms_spread": {name: spread([value * 1e3 for value in values]) for name, values in samples.items()},
        "peak_mib": dict(memory),
        "gap": gap,
        "equal": gap is not None and gap <= TOLERANCE * 10,
        "fill": (sum(lengths) + size.num_targets * size.batch) / (size.batch * size.longest),
        "size": asdict(size),
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    size = found["size"]
    page = Table(
        title=f"HSTU attention, forward and backward: {size['batch']} rows of up to {size['longest']} tokens, "
        f"{found['fill']:.0%} of the slots filled, {size['heads']} heads of {size['width']}",
        caption=f"{found['runs']} interleaved runs; memory: what a pass adds at its peak; "
        f"time {found['ratios']['time']:.2f} and memory {found['ratios']['memory']:.2f} of dense",
    )
    for name in ("side", "ms", "IQR", "least", "most", "peak MiB"):
        page.add_column(name, justify="left" if name == "side" else "right")
    for name, numbers in found["ms_spread"].items():
        page.add_row(
            name, *(f"{numbers[key]:.1f}" for key in ("median", "iqr", "min", "max")), f"{found['peak_mib'][name]:,.0f}"
        )
    return page


class Side:
    """One side, in a process of its own."""

    def __init__(self, *, side: str, size: dict[str, Any], lengths: list[int]) -> None:
        import torch

        from twinstep.worker.ops import hstu_attention as ops

        torch.set_num_threads(threads())
        self._torch, self._ops = torch, ops
        made = Size(**size)
        generator = torch.Generator().manual_seed(made.seed)
        shape = (made.batch, made.longest, made.heads, made.width)
        self._grad = torch.randn(shape, generator=generator)
        self._leaves = [torch.randn(shape, generator=generator) for _ in range(3)]
        for leaf in self._leaves:
            leaf.requires_grad_()
        prefix, targets = torch.tensor(lengths), torch.full((made.batch,), made.num_targets)
        with ops.fused(side == "jagged"):
            self._rows = ops.attention_rows(
                prefix, targets, num_slots=made.longest, rule=ops.AttentionRule(made.num_targets)
            )
        valid = ops.slot_valid(prefix, targets, made.longest, made.num_targets)
        self._grad *= valid[:, :, None, None]  # what stands in empty slots has no meaning
        self._n = torch.tensor(float(made.longest))
        self._alpha = made.width**-0.5

    def first(self) -> list[float]:
        """Run once; return the squared norms of output and gradients, and start to watch memory."""
        from bench.variants import reset_peak, status

        found = self._pass()
        valid = self._grad.abs().sum(dim=(2, 3), keepdim=True) > 0
        sums = [float(self._torch.where(valid, x, 0.0).double().square().sum()) for x in found]
        del found
        reset_peak()
        self._before = status("VmRSS") or 0
        return sums

    def seconds(self) -> float:
        """Run once; return the seconds it took."""
        started = time.perf_counter()
        self._pass()
        return time.perf_counter() - started

    def memory(self) -> float:
        """Return the MiB that a pass added at its peak."""
        from bench.variants import status

        return ((status("VmHWM") or 0) - self._before) / 1024

    def _pass(self) -> tuple[Any, ...]:
        q, k, v = self._leaves
        out = self._ops.hstu_attention(q, k, v, self._rows, self._n, alpha=self._alpha)
        return (out.detach(), *self._torch.autograd.grad(out, self._leaves, self._grad))
