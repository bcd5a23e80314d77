"""The processes of one run: which one this is, what they agree on. All of them run the same loop on the same numbers.

A run's pods say by environment where they stand (`platform/scheduler/render/jobset.py` sets it). JAX's processes
compute together; a gloo group of torch's beside it carries what hosts must agree on: a wish to stop, whether a
checkpoint is due, limits, scores. Process 0 reports, and decides on checkpoints and makes them count; each writes its
own rows. Importing this loads no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from twinstep.spec.errors import PeerLostError, TwinstepError, UnavailableError

LOG = logging.getLogger(__name__)

NAMES = ("TWINSTEP_SLICES", "TWINSTEP_HOSTS_PER_SLICE", "TWINSTEP_SLICE", "TWINSTEP_HOST", "TWINSTEP_COORDINATOR")
PATIENCE = datetime.timedelta(minutes=30)  # for a process that compiles, or whose image is still pulled
Value = TypeVar("Value")
_LOST = re.compile(r"/gloo/[\w/]+\.(cc|h):\d+\]|\bProcessGroup(Gloo|NCCL)\b|\bNCCL error\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One of a run's processes."""

    rank: int = 0
    """Which, from 0; slice after slice."""
    count: int = 1
    coordinator: str = ""
    """HOST:PORT of process 0 for JAX; the port above it is for what hosts agree on."""

    @classmethod
    def from_environment(cls) -> Process:
        """Return where this process stands; the only one where nothing is said.

        Raises:
            UnavailableError: only some of the variables are set, or they name no process.
        """
        values = {name: os.environ.get(name, "") for name in NAMES}
        if not any(values.values()):
            return cls()
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise UnavailableError(
                f"the environment of a run's process lacks {', '.join(missing)}",
                remedy=f"set all of {', '.join(NAMES)}, or none",
            )
        try:
            slices, hosts, number, host = (int(values[name]) for name in NAMES[:4])
            where, port = values[NAMES[4]].rsplit(":", 1)
            if not (0 <= number < slices and 0 <= host < hosts and where and 0 < int(port) < 65535):
                raise ValueError(values)
        except ValueError:
            told = ", ".join(f"{name}={value}" for name, value in values.items())
            raise UnavailableError(
                f"the environment names no process of a run: {told}",
                remedy="slices and hosts count from 0, and TWINSTEP_COORDINATOR is HOST:PORT",
            ) from None
        return cls(rank=number * hosts + host, count=slices * hosts, coordinator=values[NAMES[4]])


class Together:
    """What the processes of a run agree on; one process agrees with itself. Each call is made by all, in one order."""

    own_rows = False
    """Whether each process steps on rows of its own, and not on its part of one program."""
    host: Any = None
    """The group, over gloo, of what hosts agree on; None: torch's default one."""
    patience = PATIENCE
    """That one waits for another."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._failed = False

    @property
    def several(self) -> bool:
        """Whether there is more than one process."""
        return self.process.count > 1

    @property
    def first(self) -> bool:
        """Whether this is the one that reports and saves."""
        return self.process.rank == 0

    def join(self) -> None:
        """Meet the others: JAX's processes, and a group for what hosts agree on.

        Raises:
            UnavailableError: they do not come.
        """
        if not self.several:
            return
        from torch import distributed

        from twinstep.worker.compile.processes import join

        process = self.process
        host, port = process.coordinator.rsplit(":", 1)
        join(process.coordinator, rank=process.rank, count=process.count, seconds=PATIENCE.total_seconds())
        try:
            distributed.init_process_group(
                "gloo",
                init_method=f"tcp://{host}:{int(port) + 1}",
                rank=process.rank,
                world_size=process.count,
                timeout=PATIENCE,
            )
        except Exception as error:
            raise UnavailableError(
                f"the processes of the run do not meet at {host}:{int(port) + 1}: {error}",
                remedy="let the run's pods reach both ports of the coordinator, JAX's and the one above it",
            ) from error

    @contextlib.contextmanager
    def minding(self) -> Iterator[None]:
        """Turn what a lost process looks like from here into a plain error.

        Raises:
            PeerLostError: another process is gone, or did not answer in time.
        """
        try:
            yield
        except TwinstepError:
            raise
        except RuntimeError as error:
            if not self.several or not _is_loss(error):
                raise
            raise PeerLostError(
                f"process {self.process.rank} lost touch with another one of this run's {self.process.count}: "
                f"{self.first_failure() or short(error)}",
                remedy="look at what the other process said last; the run goes on from its last checkpoint",
            ) from error

    def first_failure(self) -> str | None:
        """Return the word that a process left of its failure, None where there is none to be had."""
        return None

    def tell_failure(self, error: BaseException) -> None:
        """Leave word of why this process fails, for those that will miss it."""
        self._failed = not isinstance(error, SystemExit)  # told to stop, all leave together

    def leave(self) -> None:
        """Part from the others, which a process that failed does not wait for; what goes wrong here is only logged."""
        if not self.several:
            return
        from torch import distributed

        from twinstep.worker.compile.processes import abandon, leave

        def close_sockets() -> None:
            if distributed.is_initialized():
                distributed.destroy_process_group()

        # The sockets first: that they close is how the others learn of a failure.
        for part in (close_sockets, abandon if self._failed else leave):
            try:
                part()
            except Exception as error:  # whatever either library raises: how the run ended is what counts
                LOG.warning("this process does not part from the others in order: %s", error)

    def gather(self, value: Value) -> list[Value]:
        """Return the value of each process."""
        if not self.several:
            return [value]
        from torch import distributed

        found: list[Any] = [None] * self.process.count
        distributed.all_gather_object(found, value, group=self.host)
        return found

    def summed(self, values: Any) -> Any:
        """Return the sum of every process's float32 array; where all but one are zero, that one's very bits."""
        if not self.several:
            return values
        import torch
        from torch import distributed

        bits = torch.from_numpy(values).view(torch.int32)
        distributed.all_reduce(bits, group=self.host)
        return bits.view(torch.float32).numpy()

    def any(self, wish: bool) -> bool:
        """Say whether any process wants it."""
        return any(self.gather(wish)) if self.several else wish

    def of_first(self, value: Value) -> Value:
        """Return process 0's value."""
        if not self.several:
            return value
        from torch import distributed

        found: list[Any] = [value]
        distributed.broadcast_object_list(found, src=0, group=self.host)
        told: Value = found[0]
        return told


def _is_loss(error: BaseException) -> bool:
    """Say whether an error comes from an exchange; gloo's, JAX's too, are RuntimeErrors that name gloo's own file."""
    from torch import distributed

    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and bool(_LOST.search(f"{error}"))
    )


def short(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
