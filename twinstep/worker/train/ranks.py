"""The processes of one run: which of them this is, by the variables that torchrun and Ray Train set. Imports no torch.

| variable | what it says |
|---|---|
| `RANK` | this process, from 0; rank 0 reports, and makes checkpoints count, to which each writes its own rows |
| `WORLD_SIZE` | how many there are |
| `LOCAL_RANK` | which one on its host, from 0: its GPU; without it, `RANK` |
| `LOCAL_WORLD_SIZE` | how many there are on its host, who share its processors; without it, 1 |
| `MASTER_ADDR`, `MASTER_PORT` | where rank 0 listens, for the others to find each other |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from twinstep.spec.errors import UnavailableError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Where a process stands among those of its run; the default is alone."""

    rank: int = 0
    size: int = 1
    local: int = 0
    on_host: int = 1
    """Processes on the same host."""
    address: str = ""
    """Host that rank 0 listens on; empty for a process alone."""
    port: int = 0

    @property
    def first(self) -> bool:
        """Whether this process reports for all."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Ranks:
        """Return what the environment says; alone where it says nothing.

        Raises:
            UnavailableError: only some of the variables are set, or a value is none.
        """
        here = os.environ if environment is None else environment
        there = {name: here[name] for name in NAMES if here.get(name)}
        if not {"RANK", "WORLD_SIZE"} & set(there):
            return cls()
        missing = [name for name in NAMES if name not in there]
        if missing:
            raise UnavailableError(
                f"the environment of a process among several lacks {', '.join(missing)}",
                remedy=f"set all of {', '.join(NAMES)}, or none; `twinstep train SPEC --processes N` does so",
            )
        rank, size, port = (_whole(name, there[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not 0 <= rank < size:
            raise UnavailableError(
                f"RANK is {rank} and WORLD_SIZE {size}", remedy="number processes from 0 to WORLD_SIZE - 1"
            )
        local = _whole("LOCAL_RANK", here.get("LOCAL_RANK") or str(rank))
        on_host = max(1, _whole("LOCAL_WORLD_SIZE", here.get("LOCAL_WORLD_SIZE") or "1"))
        return cls(rank=rank, size=size, local=local, on_host=on_host, address=there["MASTER_ADDR"], port=port)

    def as_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.on_host),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UnavailableError(f"{name} is {value[:40]!r}, not a whole number", remedy=f"set {name} to a number from 0")
    return int(value)
