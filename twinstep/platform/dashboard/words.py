"""Words that only the pages use; those the command says too are in spec/words.py. Pure; knows no page and no store."""

from __future__ import annotations

import re

from twinstep.spec.words import BIDIRECTIONAL, CONTROLS, DASH

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_REMOVED = dict.fromkeys(CONTROLS | BIDIRECTIONAL)


def rate(value: float | None) -> str:
    """Return examples per second: whole from 100 on, one digit below."""
    return DASH if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def age(seconds: float) -> str:
    """Return how long ago something was, in one unit: `now`, `12 s ago`, `5 min ago`, `3 h ago`, `2 d ago`."""
    whole = int(seconds)
    if whole < 2:
        return "now"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} ago"
    # Steps of five: a figure that changes every second draws the eye to what does not matter.
    return f"{whole if whole < 10 else whole // 5 * 5} s ago"


def printable(text: str) -> str:
    """Return one line of a log without terminal colours, cursor moves and other controls."""
    return _ANSI.sub("", text).translate(_REMOVED)
