"""How often an address may fail to log in before it is told to wait. In memory and bounded.

A token is 256 random bits, so this is not what keeps guessers out: it keeps them from costing much, and from filling
the audit log. A token that is right is let in however often its address failed: behind a proxy all have one address.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address, ip_network

FAILURES = 10
"""Failures of one address at once; one more is forgiven every `EACH_S` seconds."""
EACH_S = 6.0
FAILURES_IN_ALL = 100
"""Of all addresses at once; ten more are forgiven every `EACH_S`."""
ADDRESSES = 4096
"""Addresses that are remembered; of more, those that failed longest ago are forgotten."""


class Failures:
    """Counts failures by address, as buckets that leak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._all = (0.0, 0.0)

    def note(self, address: str) -> float | None:
        """Count a failure; return the seconds to wait where there were too many, else None."""
        now, key = time.monotonic(), _network(address)
        with self._lock:
            level = _leaked(self._buckets.get(key, (0.0, now)), now, 1 / EACH_S)
            everybody = _leaked(self._all, now, 10 / EACH_S)
            if level + 1 > FAILURES or everybody + 1 > FAILURES_IN_ALL:
                return EACH_S
            self._all = (everybody + 1, now)
            self._buckets[key] = (level + 1, now)
            self._buckets.move_to_end(key)
            if len(self._buckets) > ADDRESSES:
                self._buckets.popitem(last=False)
        return None

    def __len__(self) -> int:
        return len(self._buckets)


def _leaked(bucket: tuple[float, float], now: float, rate: float) -> float:
    level, at = bucket
    return max(0.0, level - (now - at) * rate)


def _network(address: str) -> str:
    """Return what counts as one address: of IPv6 the /64 that one machine has."""
    try:
        found = ip_address(address)
    except ValueError:
        return "unknown"
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(ip_network((found, 64), strict=False))
    return str(found)
