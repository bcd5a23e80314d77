"""Held-out scores: eager, on the live model, whatever backend trained it: one ruler for all backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from twinstep.spec.errors import TrainError
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.metrics import BinaryMetrics, BinaryScores
from twinstep.worker.data.multi_hot import AnyBatch, AnySchema
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.train.stop import StopSignal


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of one pass over held-out data."""

    tasks: dict[str, BinaryScores]
    """By binary task; the first is the one a summary speaks of."""
    examples: int
    """Candidates scored for the first task."""

    def values(self) -> dict[str, float | None]:
        """Return AUC, NE, calibration and log loss by name; those of tasks after the first carry the task's name."""
        found: dict[str, float | None] = {}
        for index, (task, scores) in enumerate(self.tasks.items()):
            end = f"/{task}" if index else ""
            found |= {
                f"auc{end}": scores.auc,
                f"ne{end}": scores.ne,
                f"calibration{end}": scores.calibration,
                f"log_loss{end}": scores.log_loss,
            }
        return found

    def words(self) -> str:
        """Return the scores in words; what is undefined says why."""
        said = [f"{name} {value:.4f}" for name, value in self.values().items() if value is not None]
        for index, (task, scores) in enumerate(self.tasks.items()):
            if scores.undefined is not None:
                said.append(f"auc{f'/{task}' if index else ''} undefined: {scores.undefined}")
        return ", ".join(said)


def evaluate(
    model: nn.Module,
    loader: Loader,
    schema: AnySchema,
    *,
    max_batches: int | None,
    stop: StopSignal,
    each: Callable[[AnyBatch, Tensor], None] | None = None,
) -> Scores | None:
    """Score the held-out part in order of time; the model is put back into the mode it was in.

    In a process group each process scores its host's share, and all return the scores of the whole.

    Args:
        each: called with every batch and its logits, [Q, B, K].

    Returns:
        The scores, or None where a stop was asked for, of any process: those of a part would pass for those of the
        whole.

    Raises:
        TrainError: a logit is NaN: the parameters are no longer finite.
    """
    binary = [(index, task.name) for index, task in enumerate(schema.tasks) if task.kind == "binary"]
    metrics = {name: BinaryMetrics() for _, name in binary}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), Prefetch(loader.eval_batches()) as batches:
            for batch, _ in itertools.islice(batches, max_batches):
                if stop.asked:
                    break
                logits = model(batch).logits
                if each is not None:
                    each(batch, logits)
                for index, name in binary:
                    metrics[name].update(logits[index], batch.labels[index], batch.weights[index])
    finally:
        model.train(was_training)
    if not _whole(metrics, stopped=stop.asked):
        return None
    scores = {name: each.compute() for name, each in metrics.items()}
    first = scores[binary[0][1]]
    if first.examples and first.log_loss is None:
        raise TrainError(
            "held-out logits are NaN", remedy="lower the learning rates, or set train.clip_norm; see the loss chart"
        )
    return Scores(tasks=scores, examples=first.examples)


def _whole(metrics: Mapping[str, BinaryMetrics], *, stopped: bool) -> bool:
    """Add what the other processes collected, where there are any; say whether all went through their share."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return not stopped
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(
        found, None if stopped else {name: each.histogram() for name, each in metrics.items()}
    )
    if any(each is None for each in found):
        return False
    own = distributed.get_rank()
    for name, each in metrics.items():
        each.merge(other[name] for rank, other in enumerate(found) if rank != own)
    return True
