"""What a spec asks of the compiler, as strategies."""

from __future__ import annotations

from twinstep.spec.job import CompileSpec
from twinstep.worker.compile.strategies import DEFAULT_STRATEGIES, Rematerialise, Strategy

MIB = 1 << 20


def strategies_of(spec: CompileSpec) -> tuple[Strategy | str, ...] | None:
    """Return the strategies of a spec; None: the defaults."""
    if spec.strategies is None and spec.memory_budget_mib is None:
        return None
    names: tuple[Strategy | str, ...] = DEFAULT_STRATEGIES if spec.strategies is None else spec.strategies
    if spec.memory_budget_mib is None:
        return names
    return (*names, Rematerialise(budget_bytes=spec.memory_budget_mib * MIB))
