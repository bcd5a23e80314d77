"""The processes of one run as a process group: joined with a time limit, left in order, and what a lost one means.

Rank 0 decides what its own clock or disk says, and the others follow; whatever else decides is a sum over all. So all
take the same branch at the same step, and none waits for a collective that another never starts.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from twinstep.spec.errors import TwinstepError, UnavailableError
from twinstep.worker.train.processes import Process, Together, short
from twinstep.worker.train.ranks import Ranks

if TYPE_CHECKING:
    from twinstep.worker.train.shared import AgreedStop

FAILURE = "twinstep/failure"
"""Key of the store under which the first process that fails leaves word."""
LAST_WORD = datetime.timedelta(seconds=1)


class Group(Together):
    """The process group that a run is in; a process alone is a group of one.

    Args:
        device: cpu or cuda: gloo's or NCCL's. `tables` is a group of its own for what embedding tables exchange, so
            that no gradient waits behind it.
        seconds: that this process waits for another in any one exchange.
    """

    own_rows = True

    def __init__(self, ranks: Ranks, *, device: torch.device, seconds: float) -> None:
        super().__init__(Process(rank=ranks.rank, count=ranks.size, coordinator=f"{ranks.address}:{ranks.port}"))
        self.ranks, self.device = ranks, device
        self.stop: AgreedStop | None = None
        """What processes tell each other with every batch; None outside a loop."""
        self.patience = datetime.timedelta(seconds=seconds)
        self._store: Any = HashStore()
        self._own = False

    def join(self) -> None:
        """Meet the others; where a process group is there already, it is taken.

        Raises:
            UnavailableError: they cannot be reached in time, or there is no GPU for this one.
        """
        ranks = self.ranks
        if self.device.type == "cuda":
            take_gpu(self.device)
        self._own = not distributed.is_initialized()
        try:
            if self._own:
                self._join()
            self.tables = distributed.new_group(timeout=self.patience)
            # What is not on the device travels by gloo whatever the device: counts, checkpoints, what hosts agree on.
            self.host = distributed.new_group(backend="gloo", timeout=self.patience)
        except (RuntimeError, ValueError) as error:
            raise UnavailableError(
                f"process {ranks.rank} of {ranks.size} does not reach the others at {ranks.address}:{ranks.port} "
                f"within {self.patience.total_seconds():g} s: {short(error)}",
                remedy="start all processes at about the same time; MASTER_ADDR names the host of rank 0",
            ) from error

    def _join(self) -> None:
        ranks = self.ranks
        if ranks.size > 1:
            self._store = TCPStore(ranks.address, ranks.port, ranks.size, ranks.first, self.patience, multi_tenant=True)
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=PrefixStore("twinstep", self._store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=self.patience,
        )

    def sum(self, values: Tensor) -> distributed.Work:
        """Begin to add up `values`, on the host, over all processes, in place."""
        begun: distributed.Work = distributed.all_reduce(values, group=self.host, async_op=True)
        return begun

    def tell_failure(self, error: BaseException) -> None:
        """Leave word of why this process fails, for those that will miss it; the first word stays.

        One that ends because it was told to has not failed.
        """
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return
        with contextlib.suppress(Exception):
            text = error.problem if isinstance(error, TwinstepError) else f"{type(error).__name__}: {error}"
            self._store.compare_set(FAILURE, "", f"process {self.ranks.rank} failed: {text}"[:500])

    def first_failure(self) -> str | None:
        """Return the word that a process left of its failure, None where there is none to be had."""
        try:
            self._store.wait([FAILURE], LAST_WORD)
            return str(self._store.get(FAILURE).decode(errors="replace"))
        except Exception:  # nobody left word, or the store went with rank 0
            return None

    def leave(self) -> None:
        """Leave the group."""
        if self._own:
            with contextlib.suppress(Exception):
                distributed.destroy_process_group()


def take_gpu(device: torch.device) -> None:
    """Make a GPU this process's own.

    Raises:
        UnavailableError: the host has none, or fewer than processes.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        raise UnavailableError(
            "accelerator.kind is gpu, and PyTorch finds no GPU on this host",
            remedy="run on a host with one and a PyTorch built for CUDA, or use accelerator: {kind: cpu}",
        )
    number = device.index or 0
    if number >= there:
        raise UnavailableError(
            f"LOCAL_RANK is {number}, and this host has {there} GPUs, numbered from 0",
            remedy=f"start at most {there} processes on this host",
        )
    torch.cuda.set_device(device)
