"""Versions of the software that a run's numbers depend on."""

from __future__ import annotations

import platform as machine
import sys

import torch

from twinstep import __version__


def software_versions() -> dict[str, str]:
    """Return versions by name; of JAX and torchax only where they are in use."""
    found = {"twinstep": __version__, "python": machine.python_version(), "torch": torch.__version__}
    for name in ("jax", "torchax"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = module.__version__
    return {name: str(version) for name, version in found.items()}
