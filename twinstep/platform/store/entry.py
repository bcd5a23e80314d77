"""What is known of a change while its request is worked on, for whoever writes it to write down who made it.

It lies in a context variable, so no function between a route and a table has to hand it on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_current: ContextVar[Entry | None] = ContextVar("audit_entry", default=None)


@dataclass(kw_only=True, slots=True)
class Entry:
    """A change that is under way; filled in as more is known of it."""

    actor: str
    action: str
    """What is done, as `job.submit`."""
    target: str = ""
    """To what: an id or a name."""
    token_id: str | None = None
    project: str | None = None
    request_id: str = ""
    address: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    """What else is worth knowing; `security`: exceptions that a job's pods were granted."""
    reason: str = ""
    """Why it was refused."""
    refused: bool = False
    """Whether whoever asks may not do it, whatever they are told."""
    written: bool = False
    """Whether it was committed together with its change."""


@contextmanager
def under_way(entry: Entry) -> Iterator[None]:
    """Make `entry` the one that a change within, also in threads that are waited for, is written with."""
    token = _current.set(entry)
    try:
        yield
    finally:
        _current.reset(token)


def current_entry() -> Entry | None:
    """Return the entry of the request that is worked on; None outside one."""
    return _current.get()


@contextmanager
def kept_if_committed() -> Iterator[None]:
    """Let the entry count as written only where what is within, a transaction, comes to its end."""
    try:
        yield
    except BaseException:
        if (entry := _current.get()) is not None:
            entry.written = False
        raise
