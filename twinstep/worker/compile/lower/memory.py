"""Let glibc keep what a step frees for the next step.

A step on a CPU allocates the same buffers every time. By default glibc gives large ones back to the system when they
are freed; at the next step each page is faulted in anew and filled with zeros. At the shape of `bench step` that was
12,000 faults a step with Inductor and 29,000 with XLA (which makes one large buffer of all), a fifth to a half of the
step's time. The price: what a process has freed stays its own until `give_back`.
"""

from __future__ import annotations

import ctypes
import functools
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
_MOST = 2**31 - 1
_LARGEST_THRESHOLD = 32 << 20  # glibc refuses a higher one
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX")


@functools.cache
def keep_freed_memory(*, large: bool = False) -> bool:
    """Keep freed memory in this process from now on; say whether that was done.

    Not where the C library is not glibc, or where the environment sets glibc's allocator up itself (mallopt(3)).

    Args:
        large: also buffers over 32 MiB, and those of threads that start later (all then share one arena).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _OWN_SETTINGS)
    if mallopt is None or tuned:
        return False
    settings = {_M_TRIM_THRESHOLD: _MOST, _M_MMAP_THRESHOLD: _LARGEST_THRESHOLD}
    if large:
        settings |= {_M_MMAP_MAX: 0, _M_ARENA_MAX: 1}
    set_up = [mallopt(name, value) == 1 for name, value in settings.items()]  # each one, also after a refusal
    return all(set_up)


def give_back() -> None:
    """Give freed memory back to the system: after a compile, whose leavings no step needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
