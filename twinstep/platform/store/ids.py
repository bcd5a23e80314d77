"""Ids of jobs and runs: short, safe in a URL and a file name, sorted by the time they were made."""

from __future__ import annotations

import random
import threading
import time

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # no i, l, o, u: they are misread
_TIME_DIGITS = 9  # 45 bits of milliseconds: good until the year 3084
_RANDOM_DIGITS = 5
_lock = threading.Lock()
_last = 0


def new_id(prefix: str) -> str:
    """Return `prefix-` and 14 characters; of two ids from one process the later one sorts later."""
    global _last
    with _lock:
        _last = max(int(time.time() * 1000), _last + 1)
        return f"{prefix}-{_base32(_last, _TIME_DIGITS)}{_base32(random.getrandbits(25), _RANDOM_DIGITS)}"


def _base32(number: int, width: int) -> str:
    return "".join(_DIGITS[(number >> 5 * place) & 31] for place in reversed(range(width)))
