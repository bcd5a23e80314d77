"""Figures, times and hostile text, as the command and the pages both show them to people. Pure; prints nothing.

Here because the command and the pages may not import each other, and both may import the vocabulary: the same run
must read the same in a terminal and in a browser.
"""

from __future__ import annotations

import math
import time

DASH = "–"

# C0 and C1 controls and DEL but tab: they steer a terminal. The bidirectional ones make a line read as what it is not.
CONTROLS = frozenset({*range(0x20), *range(0x7F, 0xA0)} - {0x09})
BIDIRECTIONAL = frozenset({*range(0x202A, 0x202F), *range(0x2066, 0x206A)})


def number(value: object, digits: int = 4) -> str:
    """Return a figure: thousands separated, `digits` after the point; a dash for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return seconds as `0.8 s`, `42 s`, `3 min 20 s`, `2 h 5 min` or `3 d 4 h`; a dash for none."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = int(seconds)
    for unit, size, small, rest in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            count, left = whole // size, whole % size // rest
            return f"{count} {unit} {left} {small}" if left else f"{count} {unit}"
    return f"{whole} s"


def clock(at: object, form: str = "%Y-%m-%d %H:%M:%S", *, unknown: str = DASH) -> str:
    """Return Unix seconds as local time in the `form` of strftime; `unknown` for what is no time of any calendar."""
    try:
        return time.strftime(form, time.localtime(at)) if isinstance(at, int | float) else unknown
    except (ValueError, OverflowError, OSError):
        return unknown


def cut(text: str, width: int) -> str:
    """Return `text` cut to `width` characters, the last one an ellipsis where some are left out."""
    return text if len(text) <= width else text[: width - 1] + "…"


EXIT_FAILED = 1
"""Exit code of a worker whose run failed; trying again may help."""
EXIT_SPEC = 2
"""Exit code of a worker whose user has something to mend; trying again cannot help."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as a shell counts."""
EXIT_PREEMPTED = 75
"""Exit code of a worker that was asked to go and saved its work: no failure (sysexits' EX_TEMPFAIL)."""
EXIT_PEER_LOST = 76
"""Exit code of one of a run's processes that lost another one: what follows from a failure, and never its cause."""
EXIT_ABORTED = 134
"""After SIGABRT, as JAX and NCCL end a process whose peer is gone: no cause where another one failed by itself."""
FOLLOWS = (EXIT_ABORTED, EXIT_PEER_LOST)
"""Exit codes that may follow from a peer's end, the likelier cause first: an abort may be a crash of its own."""


def follows(code: int) -> int:
    """Return how much an exit code of one of a run's processes follows from another's end; 0: not at all."""
    return 1 + FOLLOWS.index(code) if code in FOLLOWS else 0
