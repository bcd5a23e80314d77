"""Learning rates over a run: a function of the step alone, so a run that goes on has the ones it would have had."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from twinstep.spec.job import JobSpec


def lr_share(step: int, *, steps: int, final: float) -> float:
    """Return the share of its learning rate that step number `step`, from 0, takes.

    It falls from 1 along half a cosine (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts)
    and is `final` after the last step and from then on.
    """
    done = min(step / steps, 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


class Schedule:
    """Sets the learning rates of a job's optimizers before each step; nothing is done where they do not change."""

    def __init__(self, spec: JobSpec, optimizers: Mapping[str, Optimizer]) -> None:
        self._steps, self._final = spec.train.steps, spec.train.lr_final
        rates = {"dense": spec.optimizers.dense.lr, "sparse": spec.optimizers.sparse.lr}
        self._groups = [(group, rates[name]) for name, each in optimizers.items() for group in each.param_groups]

    def set(self, step: int) -> None:
        """Set the learning rates for step number `step`, from 0."""
        if self._final == 1:
            return
        share = lr_share(step, steps=self._steps, final=self._final)
        for group, rate in self._groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
