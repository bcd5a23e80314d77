"""Held-out scores: eager, on the live model, whatever backend trained it: one ruler for all backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from twinstep.spec.errors import TrainError
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import AnyBatch, AnySchema
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.train.scores import Scores, TaskMetrics
from twinstep.worker.train.stop import StopSignal


def evaluate(
    model: nn.Module,
    loader: Loader,
    schema: AnySchema,
    *,
    max_batches: int | None,
    stop: StopSignal,
    before: Callable[[AnyBatch], None] = lambda batch: None,
    each: Callable[[AnyBatch, Tensor], None] | None = None,
) -> Scores | None:
    """Score the held-out part in order of time; the model is put back into the mode it was in.

    In a process group each process scores its host's share, and all return the scores of the whole.

    Args:
        before: called with every batch before it is scored.
        each: called with every batch and its logits, [Q, B, K].

    Returns:
        The scores, or None where a stop was asked for, of any process: those of a part would pass for those of the
        whole.

    Raises:
        TrainError: a logit is NaN: the parameters are no longer finite.
    """
    metrics = TaskMetrics(schema)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), Prefetch(loader.eval_batches()) as batches:
            for batch, _ in itertools.islice(batches, max_batches):
                if stop.asked:
                    break
                before(batch)
                logits = model(batch).logits
                if each is not None:
                    each(batch, logits)
                metrics.update(logits, batch)
    finally:
        model.train(was_training)
    if not metrics.gather(stopped=stop.asked):
        return None
    scores = metrics.compute()
    if not scores.first.finite:
        raise TrainError(
            "held-out logits are NaN", remedy="lower the learning rates, or set train.clip_norm; see the loss chart"
        )
    return scores
