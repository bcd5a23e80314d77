"""What a pass may know beside the graph: the state's slots, the backend, the strategies asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from twinstep.worker.compile.state import Slot
from twinstep.worker.compile.strategies import Strategy

S = TypeVar("S", bound=Strategy)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """Surroundings of one step's passes.

    Placeholders of the graph stand in this order: `slots`, `num_rates` learning rates, `num_batch` batch leaves, lifted
    constants. Its outputs: new state in the order of `slots`, then the user's outputs.
    """

    slots: tuple[Slot, ...]
    num_rates: int
    num_batch: int
    backend: str
    """inductor or xla."""
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    """What was asked for, by name."""
    without: frozenset[str] = frozenset()
    """Names of passes that are left out: to find the one that brings a fault."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What passes found out, by pass name (bytes saved, tables rewritten, why not): `Runner.explain` shows it."""

    def strategy(self, kind: type[S]) -> S | None:
        """Return the strategy of this kind, if it was asked for."""
        found = self.strategies.get(kind.name)
        return found if isinstance(found, kind) else None
