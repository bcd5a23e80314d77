"""One of two processes that save together over gloo: `python crew_child.py slow|alone|dies RANK PORT PLACE`."""

from __future__ import annotations

import datetime
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn

from twinstep.spec.parse import validate_spec
from twinstep.worker.checkpoint import manifest
from twinstep.worker.checkpoint.place import LocalPlace
from twinstep.worker.train.group import Group
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.shared_saving import SharedSaving

PEER_SECONDS = 3
SLOW_SECONDS = 5.0
"""More than one process waits for another."""
WAITS = SimpleNamespace(seconds=0.0, files=0)
write = LocalPlace.write


def written_slowly(self: LocalPlace, name: str, file: str, parts: Any) -> None:
    """Wait, then write."""
    WAITS.files += 1
    time.sleep(WAITS.seconds)
    write(self, name, file, parts)


def gone(self: LocalPlace, name: str, file: str, parts: Any) -> None:
    """End the process, as a node that goes."""
    time.sleep(2.0)  # till the other one has begun
    os._exit(9)


def main(which: str, rank: int, port: int, where: str) -> None:
    """Save, and print what happened."""
    ranks = Ranks(rank=rank, size=2, local=rank, address="127.0.0.1", port=port)
    group = Group(ranks, device=torch.device("cpu"), seconds=120)
    group.join()
    patience = datetime.timedelta(seconds=PEER_SECONDS)
    group.patience, group.host = patience, distributed.new_group(backend="gloo", timeout=patience)
    manifest.FILE_BYTES = 4096
    model = nn.ParameterList([nn.Parameter(torch.rand(1024)) for _ in range(40)])
    nothing = {"pull": dict, "pull_own": dict, "compiled_for": dict}
    stepper: Any = SimpleNamespace(random_state=lambda: torch.zeros(8, dtype=torch.uint8), **nothing)
    if which == "alone":
        SharedSaving._all_see = lambda *_: False  # type: ignore[method-assign]
    saving = SharedSaving(
        validate_spec({"name": "t"}),
        where,
        group,
        model=model,
        optimizers={},
        stepper=stepper,
        tell=lambda name, text, data: print(name, data.get("step"), text, flush=True),
    )
    LocalPlace.write = written_slowly  # type: ignore[method-assign]
    if which == "alone":
        WAITS.seconds = SLOW_SECONDS / 20  # of 40 files, by two threads
        saving.save(1, {})
        saving.save(2, {})
        assert saving.save_last(3, {}, within=60.0)
        began = time.monotonic()
        saving.close()
        print("closed, written", WAITS.files, int(time.monotonic() - began), flush=True)
        return
    if which == "slow":
        WAITS.seconds = rank * SLOW_SECONDS / 10
        saving.save(1, {})
        WAITS.seconds = 0.0 if rank == 0 else WAITS.seconds
        saving.save(2, {})
        assert saving.save_last(2, {}, within=60.0)
        saving.close()
        print("closed", flush=True)
        return
    WAITS.seconds = 1.0
    if rank == 0:
        LocalPlace.write = gone  # type: ignore[method-assign]
    saving.save(1, {})
    try:
        raise RuntimeError("lost touch") if group.gather(rank) else AssertionError
    except RuntimeError:
        saving.close()
    print("gave up after", WAITS.files, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
