"""Ids of jobs and runs: short, safe in a URL and a file name, sorted by the time they were made."""

from __future__ import annotations

import random
import re
import threading
import time

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # no i, l, o, u: they are misread
_TIME_DIGITS = 9  # 45 bits of milliseconds: good until the year 3084
_RANDOM_DIGITS = 5
_JOB_ID = re.compile(rf"job-[{_DIGITS}]{{{_TIME_DIGITS + _RANDOM_DIGITS}}}")
_lock = threading.Lock()
_last = 0


def new_id(prefix: str) -> str:
    """Return `prefix-` and 14 characters; of two ids from one process the later one sorts later."""
    global _last
    with _lock:
        _last = max(int(time.time() * 1000), _last + 1)
        return f"{prefix}-{_base32(_last, _TIME_DIGITS)}{_base32(random.getrandbits(25), _RANDOM_DIGITS)}"


def is_job_id(text: str) -> bool:
    """Say whether a text has the form of a job's id; what has it is never taken for a name."""
    return _JOB_ID.fullmatch(text) is not None


def _base32(number: int, width: int) -> str:
    return "".join(_DIGITS[(number >> 5 * place) & 31] for place in reversed(range(width)))
