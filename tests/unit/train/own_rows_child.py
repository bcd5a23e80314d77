"""One of the processes of test_own_rows_alone.py: python own_rows_child.py OUT JSON, which is a list of specs.

Specs are trained one after the other. Of each OUT gets losses, scores, tensors as they stand at the end, and how much
of the live tensors of its large table was in memory before they were brought here whole.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from typing import Any

import numpy as np
import torch
from hybrid_child import Noting

from twinstep.spec.parse import validate_spec
from twinstep.worker.checkpoint.content import live_tensors
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.stop import StopSignal

CHUNK = 1 << 34  # bytes of address space that are asked about at a time


def resident(tensor: torch.Tensor) -> int:
    """Return how many bytes of the pages that a tensor lies in are in memory.

    Asked page by page: Linux joins mappings that touch one another, so that what it tells of a mapping counts others.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page, found = mmap.PAGESIZE, 0
    start = tensor.data_ptr() // page * page
    stop = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    flags = np.empty(CHUNK // page, np.uint8)
    for at in range(start, stop, CHUNK):
        size = min(CHUNK, stop - at)
        told = libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), flags.ctypes.data_as(ctypes.c_void_p))
        assert told == 0, os.strerror(ctypes.get_errno())
        found += int((flags[: -(-size // page)] & 1).sum()) * page
    return found


def main(out: str, specs: str) -> None:
    together = Together(Process.from_environment())
    together.join()
    done: list[dict[str, Any]] = []
    try:
        for each in json.loads(specs):
            reporter, spec = Noting(), validate_spec(each)
            trainer = Trainer(
                spec, reporter=reporter, view=ProgressView(None, 1), stop=StopSignal(), run_dir=None, together=together
            )
            try:
                first = trainer.step
                summary = trainer.train()
                assert summary is not None
                live = live_tensors(trainer._model, trainer._optimizers)
                large = {path: tensor for path, tensor in live.items() if tensor.numel() * 4 >= 1 << 26}
                here = {path: resident(tensor) / (tensor.numel() * 4) for path, tensor in large.items()}
                trainer._stepper.pull()
                values = {path: tensor.clone() for path, tensor in live.items()}
            finally:
                trainer.close()
            done.append(
                {"first": first, "losses": reporter.losses, "ne": summary.ne, "resident": here, "values": values}
            )
        torch.save(done, out)
    except BaseException as error:
        together.tell_failure(error)
        raise
    finally:
        together.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
