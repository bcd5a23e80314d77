"""Addresses of web servers, as people write them. Pure."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def web_address(url: str) -> SplitResult | None:
    """Return the parts of an http or https URL with a host; None for anything else."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that does not close
        return None
    return parts if good else None
