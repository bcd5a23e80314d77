"""What is seen of a run in a cluster, as the API server answers it; and how to read a condition. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One look at a run's objects."""

    workload: Object | None
    """The JobSet or RayJob; None where it is not there."""
    admission: Object | None = None
    """Kueue's Workload, found by its owner; None where there is none."""
    pods: Sequence[Object] = field(default_factory=tuple)
    events: Sequence[Object] = field(default_factory=tuple)
    """What the cluster told of the workload, its admission and its pods lately, oldest first."""
    now: float = 0.0
    """Unix seconds of the look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One condition that holds."""

    reason: str
    message: str
    since: float | None
    """Unix seconds; None where the object does not say."""


def holds(value: Object | None, kind: str) -> Condition | None:
    """Return a condition of `value` by type if its status is True.

    The order of a list of conditions and their times say nothing of which holds; only `status` does.
    """
    for each in ((value or {}).get("status") or {}).get("conditions") or ():
        if each.get("type") == kind and each.get("status") == "True":
            return _condition(each)
    return None


def fails(value: Object | None, kind: str) -> Condition | None:
    """Return a condition of `value` by type if its status is False."""
    for each in ((value or {}).get("status") or {}).get("conditions") or ():
        if each.get("type") == kind and each.get("status") == "False":
            return _condition(each)
    return None


def _condition(value: Object) -> Condition:
    return Condition(
        reason=value.get("reason") or "",
        message=value.get("message") or "",
        since=seconds(value.get("lastTransitionTime")),
    )


def seconds(text: str | None) -> float | None:
    """Return an RFC 3339 time as Unix seconds, whatever its offset; None for none, or for what is no time."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def number(text: str | None) -> int | None:
    """Return the number that a label or an annotation holds; None for none, or for what is no index of a host."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None
