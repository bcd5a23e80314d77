"""Figures and times as people read them. Pure; knows nothing of pages or the store."""

from __future__ import annotations

import re

DASH = "–"

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if code != 0x09}
# Bidirectional overrides can make a line read as what it is not.
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], None)


def number(value: object, digits: int = 4) -> str:
    """Return a figure: thousands separated, `digits` after the point; a dash for what is no number."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """Return examples per second: whole from 100 on, one digit below."""
    return DASH if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """Return `0.8 s`, `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`; a dash for None."""
    if seconds is None:
        return DASH
    seconds = max(seconds, 0.0)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, small, rest in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            count, left = whole // size, whole % size // rest
            return f"{count} {unit} {left} {small}" if left else f"{count} {unit}"
    return f"{whole} s"


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


def cut(text: str, width: int) -> str:
    """Return `text` cut to `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def printable(text: str) -> str:
    """Return one line of a log without terminal colours, cursor moves and other controls."""
    return _ANSI.sub("", text).translate(_CONTROLS)
