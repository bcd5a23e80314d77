"""Leaves of a batch that are None: part of its structure, known to the step, one program for each set of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile import StepCompiler

LINES = ({"x": torch.ones(4, 3), "weights": None, "y": torch.zeros(4)}, {"x": torch.ones(4, 3), "y": torch.zeros(4)})
WEIGHED = {"x": torch.ones(4, 3), "weights": torch.tensor([1.0, 0.0, 2.0, 0.5]), "y": torch.arange(4.0)}


def step(model: Any, optimizer: Any, batch: dict[str, Tensor | None]) -> Tensor:
    optimizer.zero_grad()
    error = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
    weights = batch.get("weights")
    loss = error.mean() if weights is None else (error * weights).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_follows_eager_with_a_leaf_there_missing_and_there_again(tmp_path: Path) -> None:
    model, optimizer = job()
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    reasons: list[str] = []
    compiler = StepCompiler(step, model, optimizer, backend="xla", cache_dir=tmp_path, on_start=reasons.append)
    for batch in (*LINES, WEIGHED, LINES[0], WEIGHED):
        torch.testing.assert_close(compiler(batch), step(twin, other, batch))
    compiler.pull()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert len(reasons) == 3


def test_a_runner_refuses_a_batch_that_has_what_its_example_had_not() -> None:
    model, optimizer = job()
    runner = StepCompiler(step, model, optimizer, backend="xla").runner(LINES[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompileError, match=r"structure differs.*adds.*weights"):
        runner(WEIGHED)
    with pytest.raises(CompileError, match=r"structure differs.*lacks.*'y'"):
        runner({**LINES[0], "y": None})
    torch.testing.assert_close(model.state_dict(), before)
