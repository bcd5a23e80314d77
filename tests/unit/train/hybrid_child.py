"""One of the processes of test_hybrid_parallel.py: python hybrid_child.py OUT JSON, as a rank of `launch`.

JSON is a list of specs, which are trained one after the other in one process group; rank 0 writes, for each, the losses
of all steps, scores, how tables were divided and the run's tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.checkpoint.content import live_tensors
from twinstep.worker.train.group import Group
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.report import NoReporter
from twinstep.worker.train.stop import StopSignal


class Noting(NoReporter):
    """Keeps the numbers of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.values: list[dict[str, Any]] = []

    def metric(self, step: int, values: Mapping[str, float | None]) -> None:
        if "loss" in values:
            self.losses.append(float(values["loss"] or 0.0))
        self.values.append(dict(values))


def train(spec: JobSpec, together: Any = None) -> dict[str, Any]:
    """Train a spec here, as one process or as one of several, and return what came of it."""
    reporter = Noting()
    trainer = Trainer(
        spec, reporter=reporter, view=ProgressView(None, 1), stop=StopSignal(), run_dir=None, together=together
    )
    try:
        summary = trainer.train()
        trainer._stepper.pull()
        tensors = {path: each.clone() for path, each in live_tensors(trainer._model, trainer._optimizers).items()}
    finally:
        trainer.close()
    assert summary is not None
    plans = {each.table.name: each.kind for each in getattr(trainer._stepper, "plans", ())}
    return {
        "losses": reporter.losses,
        "scores": {"auc": summary.auc, "ne": summary.ne},
        "examples": summary.examples,
        "eval_examples": summary.eval_examples,
        "plans": plans,
        "tensors": tensors,
    }


def main() -> None:
    torch.set_num_threads(1)
    specs = [validate_spec(each) for each in json.loads(sys.argv[2])]
    ranks = Ranks.from_environment()
    group = Group(ranks, device=torch.device("cpu"), seconds=120)
    group.join()
    found = [train(spec, group) for spec in specs]
    if ranks.first:
        torch.save(found, Path(sys.argv[1]))
    group.leave()


if __name__ == "__main__":
    main()
