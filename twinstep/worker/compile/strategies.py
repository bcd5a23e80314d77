"""Strategies: what a user may ask of the compiler, as frozen values; the passes that carry them out look them up here.

`twinstep.compile(…, strategies=None)` takes DEFAULT_STRATEGIES; a list takes just those, by value or by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from twinstep.spec.errors import CompileError


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Base of all strategies."""

    name: ClassVar[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseEmbedding(Strategy):
    """Tables get row gradients and row updates wherever that gives the optimizer's own numbers; never rows × dim."""

    name: ClassVar[str] = "sparse_embedding"
    min_rows_per_id: float = 4.0
    """A table with fewer rows for each id of a batch stays dense: to find out which rows are used costs more there.
    Measured on a CPU with 4,352 ids and 64 columns, row-wise Adagrad: even at some 5 rows an id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingEmbedding(Strategy):
    """On a mesh, tables are split by rows whatever their size, and looked up and updated around a ring of devices."""

    name: ClassVar[str] = "ring_embedding"
    parameters: tuple[str, ...]
    """Patterns (fnmatch) of the tables' names. Other tables that the mesh splits go around the ring too."""

    def names(self, parameter: str) -> bool:
        """Say whether one of the patterns is a parameter's name."""
        return any(fnmatch.fnmatchcase(parameter, each) for each in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention(Strategy):
    """HSTU attention is lowered as one kernel that never writes the scores to memory."""

    name: ClassVar[str] = "fused_attention"
    whole_layers: bool = True
    """On a TPU, whether one kernel computes the whole layer around attention, where its ops work token by token and it
    fits into VMEM, and its backward pass computes it again from its input: nothing but that is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedUpdate(Strategy):
    """Optimizer updates of dense parameters run as one fused kernel per optimizer instead of one chain per tensor."""

    name: ClassVar[str] = "fused_update"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldLayers(Strategy):
    """Repeated layers are compiled once."""

    name: ClassVar[str] = "fold_layers"
    min_repeats: int = 2
    """Fewest equal layers that are folded."""
    min_nodes: int = 24
    """Fewest nodes of the graph that folding a run must leave out: calls of a small region cost more than they save."""
    targets: tuple[str, ...] = ("inductor", "gpu")
    """Where: inductor, or XLA's platform (cpu, gpu, tpu). XLA compiles a layer for the CPU sooner than it does a loop
    over layers, and runs the loop slower. For a TPU a loop moves more bytes, since what the backward pass needs, and
    the parameters, are stacked: DLRMv3 of 5 layers for v5p:4x4x8 moves 6.9 GB a device folded and 5.2 GB unfolded, and
    compiles in the same time (27 and 29 CPU seconds, quick)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision(Strategy):
    """Matrix products in a narrow dtype; parameters, optimizer state and sums stay float32."""

    name: ClassVar[str] = "mixed_precision"
    dtype: Literal["bfloat16"] = "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rematerialise(Strategy):
    """Values of the forward pass are computed again in the backward pass, so that memory stays within a budget."""

    name: ClassVar[str] = "rematerialise"
    budget_bytes: int
    """Most bytes of values (activations, gradients; not state or batch) that may live at once, per device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantize(Strategy):
    """Simulated quantization: values rounded to a grid in the forward pass, gradients passed straight through."""

    name: ClassVar[str] = "quantize"
    num_buckets: int = 256
    """Points of the grid."""
    low: float = -1.0
    """Least value of the grid."""
    high: float = 1.0
    """Greatest value of the grid."""
    parameters: tuple[str, ...] = ()
    """Patterns (fnmatch) of the parameters' names; none: every embedding table."""

    def __post_init__(self) -> None:
        if self.num_buckets < 2:
            raise CompileError(f"num_buckets is {self.num_buckets}", remedy="give at least 2 points: low and high")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise CompileError(f"low is {self.low} and high {self.high}", remedy="give finite numbers, low below high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication(Strategy):
    """Gradients are averaged over the ranks of a process group, in buckets, each sent as soon as it is whole.

    A table's gradient goes as ids and rows where that moves fewer bytes. Losses (outputs of one element) are averaged
    too; other outputs and batch statistics stay each rank's own.
    """

    name: ClassVar[str] = "communication"
    bucket_bytes: int = 25 << 20
    """Bytes after which a bucket is sent."""


STRATEGIES: dict[str, type[Strategy]] = {
    each.name: each
    for each in (
        SparseEmbedding,
        RingEmbedding,
        FusedAttention,
        FusedUpdate,
        FoldLayers,
        MixedPrecision,
        Rematerialise,
        Quantize,
        Communication,
    )
}
"""Every strategy by name."""

DEFAULT_STRATEGIES: tuple[Strategy, ...] = (SparseEmbedding(), FusedAttention(), FusedUpdate(), FoldLayers())
"""Those that make a step faster and change no result beyond rounding."""


def resolve(strategies: Sequence[Strategy | str] | None) -> dict[str, Strategy]:
    """Return strategies by name.

    Raises:
        CompileError: no list, what is no strategy, one that wants settings given by name alone, or one given twice.
    """
    if isinstance(strategies, str | Strategy):
        raise CompileError(f"strategies is {strategies!r} alone", remedy="give a list: strategies=[…]")
    found: dict[str, Strategy] = {}
    for each in DEFAULT_STRATEGIES if strategies is None else strategies:
        given = each.name if isinstance(each, type) and issubclass(each, Strategy) else each
        strategy = _by_name(given) if isinstance(given, str) else given
        if not isinstance(strategy, Strategy):
            raise CompileError(f"{each!r} is no strategy", remedy=f"use one of {', '.join(STRATEGIES)}")
        if strategy.name in found:
            raise CompileError(f"strategy {strategy.name!r} is given twice", remedy="give it once")
        found[strategy.name] = strategy
    return found


def _by_name(name: str) -> Strategy:
    kind = STRATEGIES.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise CompileError(f"no strategy is called {name!r}", remedy=f"{meant}use one of {', '.join(STRATEGIES)}")
    wanted = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if wanted:
        raise CompileError(
            f"strategy {name!r} needs {', '.join(wanted)}",
            remedy=f"give it as a value: {kind.__name__}({', '.join(f'{each}=…' for each in wanted)})",
        )
    return kind()
