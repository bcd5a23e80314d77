"""`depth`: how long DLRMv3's step takes to compile with 2 to 20 layers, equal layers folded into one and not.

Folded, Inductor compiles a layer once, whatever the depth; what still grows is the capture, which runs the user's own
Python for each layer, and the updates' lists of tensors. XLA is compiled as it is: nothing is folded for the CPU. Each
compile is a process of its own with an empty cache and is done once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.child import Child, need_cxx
from bench.measure import Say, result
from bench.recompile import SPEC

FOLDED, PLAIN, XLA = "folded", "plain", "xla"
SIDES: dict[str, dict[str, Any]] = {
    FOLDED: {"backend": "inductor", "fold": True},
    PLAIN: {"backend": "inductor", "fold": False},
    XLA: {"backend": "xla", "fold": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is compiled."""

    spec: Mapping[str, Any]
    depths: Mapping[str, tuple[int, ...]]
    """Layers, by side."""


FULL = Size(spec=SPEC, depths={FOLDED: (2, 5, 10, 20), PLAIN: (2, 5, 10), XLA: (2, 5, 10, 20)})


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Compile and return the result.

    Raises:
        TwinstepError: there is no C++ compiler, or a child failed.
    """
    if {FOLDED, PLAIN} & set(size.depths):
        need_cxx()
    found: dict[str, dict[str, Any]] = {}
    for side, depths in size.depths.items():
        found[side] = {}
        for depth in depths:
            say(f"{side}, {depth} layers")
            found[side][str(depth)] = _compile(side, depth, size)
    ratios = {side: _growth(by_depth) for side, by_depth in found.items()}
    return result("depth", {"sides": found, "ratios": ratios, "spec": dict(size.spec)}, runs=1)


def _compile(side: str, depth: int, size: Size) -> dict[str, Any]:
    spec = {**size.spec, "model": {**size.spec["model"], "num_layers": depth}}
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-") as folder:
        arguments = {"spec": spec, "cache_dir": folder, **SIDES[side]}
        with Child("bench.starts:Deep", arguments, cache_dir=Path(folder) / "inductor") as child:
            answer: dict[str, Any] = child.call("first")
            return answer


def _growth(by_depth: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return seconds at the greatest depth over those at the least, of all of it and of the lowering alone."""
    least, *_, most = by_depth.values()
    return {kind: most[kind] / least[kind] for kind in ("seconds", "lower_s")}


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(title="seconds to compile DLRMv3's step by depth", caption="each compiled once, with an empty cache")
    for name in ("side", "layers", "s", "capture s", "lower s", "graph nodes"):
        page.add_column(name, justify="left" if name == "side" else "right")
    for side, by_depth in found["sides"].items():
        for depth, numbers in by_depth.items():
            seconds = (f"{numbers[kind]:.1f}" for kind in ("seconds", "capture_s", "lower_s"))
            page.add_row(side, depth, *seconds, f"{numbers['nodes']:,}")
    return page
