"""One process of the benchmark `hybrid`: two copies of one run, with and without overlap, that take turns.

Started by `bench/hybrid.py`: python -m bench.hybrid_rank OUT JSON starts itself again as two ranks. Both copies come
from the same weights and see the same batches, so their losses are the same.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from twinstep.spec.job import JobSpec
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.order import HostShare
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.engines import Parts
from twinstep.worker.train.group import Group
from twinstep.worker.train.hybrid import HybridStepper
from twinstep.worker.train.launch import launch
from twinstep.worker.train.ranks import Ranks

BATCHES = 8  # packed before the clock runs: the loader is not what is measured
RANKS = 2
SIDES = {"off": False, "on": True}


class Side:
    """One copy of the run."""

    def __init__(self, spec: JobSpec, dataset: Any, group: Group, *, overlap: bool) -> None:
        spec = spec.model_copy(update={"embedding": spec.embedding.model_copy(update={"overlap": overlap})})
        share = HostShare(host=group.ranks.rank, hosts=group.ranks.size, layout="rows")
        loader = Loader(dataset, spec.data, seed=0, share=share)
        model = build_model(spec, dataset.schema)
        model.train()
        self._stepper = HybridStepper(
            Parts(
                spec=spec,
                model=model,
                optimizers=build_optimizers(spec.optimizers, model),
                loader=loader,
                together=group,
                on_start=lambda reason: None,
                on_event=lambda event: None,
                on_warning=lambda warning: None,
                tell=lambda name, text, data: None,
            )
        )
        ready = list(itertools.islice(self._stepper.prepared(loader.train_batches()), BATCHES))
        self._batches: Iterator[Any] = self._stepper.drawn(itertools.cycle(ready))
        self._number = 0

    def steps(self, count: int) -> tuple[float, float]:
        """Run steps; return the seconds of one and the last loss."""
        distributed.barrier()
        started, loss = time.perf_counter(), 0.0
        for _ in range(count):
            batch, _stats = next(self._batches)
            output = self._stepper.program(batch, sizes={}, step=self._number)()
            loss = float(output.loss)
            self._number += 1
        self._stepper.settle()  # what overlap has begun for the next step counts here, as it is done by then
        distributed.barrier()
        return (time.perf_counter() - started) / count, loss


def main() -> None:
    out, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Ranks.from_environment()
    group = Group(ranks, device=torch.device("cpu"), seconds=600)
    group.join()
    spec = JobSpec.model_validate(asked["spec"])
    dataset = load_dataset(spec.data)
    sides = {name: Side(spec, dataset, group, overlap=overlap) for name, overlap in SIDES.items()}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.steps(1)  # compiles
    for number in range(asked["warmup"] + asked["runs"]):
        for name in sides if number % 2 else reversed(list(sides)):
            seconds, loss = sides[name].steps(asked["steps"])
            losses[name].append(loss)
            if number >= asked["warmup"]:
                samples[name].append(seconds)
    if ranks.first:
        out.write_text(json.dumps({"samples": samples, "losses": losses}))
    distributed.barrier()
    group.leave()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(launch([sys.executable, "-m", "bench.hybrid_rank", *sys.argv[1:]], RANKS))
