"""What a StepCompiler tells: each compile with its reason, and what goes on but should be known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileEvent:
    """One compile: why, how long, and whether a cache answered."""

    name: Literal["compiled", "recompiled"]
    reason: str
    seconds: float
    capture_seconds: float
    backend: str
    cache: Literal["none", "disk", "backend", "ahead"]
    """What answered. disk: the program as a whole, nothing was traced; backend: the backend's own cache, after a trace;
    ahead: a program that preflight compiled for this slice.
    Programs in memory answer without an event."""
    key: str
    nodes: int
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileWarning:
    """What goes on but should be known: steps that keep being compiled, a cache or a program that cannot be used."""

    name: Literal["recompile_storm", "cache_unusable", "ahead_not_used"]
    text: str
    data: dict[str, Any] = field(default_factory=dict)
