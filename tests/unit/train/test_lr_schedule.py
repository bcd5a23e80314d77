"""Learning rates over a run, against PyTorch's own cosine, and what the loop makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.train.schedule import Schedule, lr_share


def spec_with(**train: object) -> JobSpec:
    return validate_spec({"name": "t", "train": {"steps": 20} | train, "optimizers": {"sparse": {"lr": 0.3}}})


def model() -> nn.Module:
    """One table and one dense parameter."""
    return nn.ModuleDict({"tables": EmbeddingCollection({"t": (3, 2)}), "dense": nn.Linear(3, 2)})


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_rates_are_those_of_pytorchs_cosine(final: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.5 * final)
    for step in range(20):
        assert 0.5 * lr_share(step, steps=20, final=final) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        oracle.step()
    assert lr_share(20, steps=20, final=final) == lr_share(99, steps=20, final=final) == pytest.approx(final)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_optimizer_takes_its_share_at_any_step_whatever_came_before(as_tensor: bool) -> None:
    spec = spec_with(lr_final=0.1)
    optimizers = build_optimizers(spec.optimizers, model())
    groups = [group for each in optimizers.values() for group in each.param_groups]
    if as_tensor:  # as the compiler makes them
        for group in groups:
            group["lr"] = torch.tensor(float(group["lr"]))
    schedule = Schedule(spec, optimizers)
    for step in (19, 0, 7):
        schedule.set(step)
        share = lr_share(step, steps=20, final=0.1)
        assert float(optimizers["dense"].param_groups[0]["lr"]) == pytest.approx(5e-4 * share)
        assert float(optimizers["sparse"].param_groups[0]["lr"]) == pytest.approx(0.3 * share)


def test_rates_that_stay_are_not_touched() -> None:
    optimizers = build_optimizers(spec_with().optimizers, model())
    optimizers["dense"].param_groups[0]["lr"] = 7.0
    Schedule(spec_with(), optimizers).set(10)
    assert optimizers["dense"].param_groups[0]["lr"] == 7.0
