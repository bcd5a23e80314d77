"""Steps that are started one after the other before the first one's outputs are looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from twinstep.spec.errors import DataError
from twinstep.worker.compile import StepCompiler

BACKENDS = ["xla", pytest.param("inductor", marks=pytest.mark.inductor)]


def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> dict[str, Any]:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "weight": model.weight, "name": "a"}  # type: ignore[attr-defined]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_in_flight_give_what_steps_one_by_one_give(backend: Any) -> None:
    batches = [torch.randn(5, 4) for _ in range(4)]
    model, optimizer = made()
    want = [
        {name: each.clone() for name, each in train_step(model, optimizer, batch).items() if name != "name"}
        for batch in batches
    ]
    other, its_optimizer = made()
    compiler = StepCompiler(train_step, other, its_optimizer, backend=backend)
    started = [compiler.runner(batch).dispatch(batch) for batch in batches]
    # The last first: waiting for one waits for those before it, and an output that is state is that step's still.
    for pending, expected in reversed(list(zip(started, want, strict=True))):
        found = pending.outputs()
        assert found["name"] == "a"
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["weight"], expected["weight"])
        assert pending.outputs() is found
    compiler.pull()
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_refused_is_refused_when_the_step_is_started(backend: Any) -> None:
    model = nn.Embedding(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiler = StepCompiler(train_step, model, optimizer, backend=backend)
    runner = compiler.runner(torch.tensor([1, 2]))
    before = runner.dispatch(torch.tensor([1, 2]))
    with pytest.raises(DataError):
        runner.dispatch(torch.tensor([1, 9]))
    assert torch.isfinite(before.outputs()["loss"])
    compiler.pull()
    assert torch.isfinite(model.weight).all()
