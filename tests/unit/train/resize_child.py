"""Run by test_resized_runs.py in a process of its own: JAX must be told of eight devices before it is imported.

`python resize_child.py FOLDER`: a job of 4 devices, moved to 8 and back to 4 over one place; and the same, not moved.
Prints one line of JSON per attempt: losses by step, the samples of each step, events of compiles, where tables lie.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinstep.spec.parse import validate_spec
from twinstep.spec.placement import SHARD_BYTES
from twinstep.worker.data.multi_hot import MultiHotBatch
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.report import NoReporter
from twinstep.worker.train.stop import StopSignal

DIM = 8
TABLE = "cat_1"  # large enough that devices divide it by rows
SPEC: dict[str, Any] = {
    "name": "resized",
    "model": {
        "kind": "dlrm", "embedding_dim": DIM, "bottom_dims": [8], "over_dims": [8], "num_cross_layers": 1,
        "cross_rank": 4,
    },
    "data": {
        "dataset": "synthetic-clicks", "synthetic_events": 800, "batch_size": 16,
        "synthetic": {"table_rows": [50, SHARD_BYTES // (4 * DIM)], "max_ids": 3},
    },
    "optimizers": {"dense": {"kind": "adam", "lr": 0.01}, "sparse": {"kind": "adagrad", "lr": 0.05}},
    "compile": {"backend": "xla", "cache": False},
}  # fmt: skip


class Heard(NoReporter):
    """Keeps losses and events; asks for a stop after a step."""

    def __init__(self, stop: StopSignal, at: int) -> None:
        self.losses: dict[int, float] = {}
        self.events: list[tuple[str, str]] = []
        self._stop, self._at = stop, at

    def metric(self, step: int, values: Any) -> None:
        if "loss" in values:
            self.losses[step] = values["loss"]
            self._stop.asked = self._stop.asked or step == self._at

    def event(self, name: str, reason: str, data: Any = None) -> None:
        self.events.append((name, reason))


def attempt(place: Path, *, devices: int, total: int, until: int) -> dict[str, Any]:
    """Run one attempt that is told to stop after step `until`, or ends at `total`."""
    spec = {
        **SPEC,
        "accelerator": {"kind": "cpu", "devices": devices},
        "train": {"steps": total, "eval_batches": 1, "log_every": 1},
        "checkpoint": {"path": str(place)},
    }
    stop = StopSignal()
    heard = Heard(stop, until)
    trainer = Trainer(validate_spec(spec), reporter=heard, view=ProgressView(None, 1), stop=stop, run_dir=None)
    samples: list[str] = []
    one_step = trainer._one_step

    def noted(batch: MultiHotBatch, stats: Any, *, waited: float) -> bool:
        samples.append(hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in batch)).hexdigest())
        return one_step(batch, stats, waited=waited)

    trainer._one_step = noted  # type: ignore[method-assign]
    try:
        if trainer.train() is None:
            trainer.leave()
        arrays = {
            slot.path: len({shard.device for shard in array.addressable_shards if shard.data.shape != array.shape})
            for slot, array in zip(
                trainer._stepper._compiler.state.slots,
                trainer._stepper._compiler._need_lifted().backend.arrays,
                strict=True,
            )
        }
    finally:
        trainer.close()
    return {
        "losses": heard.losses,
        "samples": samples,
        "events": heard.events,
        "pieces": next(count for path, count in arrays.items() if path.startswith("parameter:") and TABLE in path),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    straight = attempt(folder / "straight", devices=4, total=12, until=12)
    print(json.dumps(straight), flush=True)
    for devices, until in ((4, 4), (8, 8), (4, 12)):
        print(json.dumps(attempt(folder / "moved", devices=devices, total=12, until=until)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
