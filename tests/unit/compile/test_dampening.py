"""SGD with dampening: the first step of each parameter is not dampened, whenever it comes, on both backends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.worker.compile import StepCompiler

BACKENDS = ["xla", pytest.param("inductor", marks=pytest.mark.inductor)]


class Net(nn.Module):
    """Two layers, and a scalar whose gradient is a zero of either sign where no x is negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.still = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) - self.still * x[:, :1].clamp(max=0)).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    plain = [each for name, each in model.named_parameters() if not name.startswith("second")]
    groups = [{"params": plain}, {"params": [*model.second.parameters()], "dampening": 0.3, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.7)


def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
    return loss


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for number in range(6):
        x = torch.randn(5, 3, generator=generator)
        yield x.abs() if number < 3 else x


def states(model: nn.Module, optimizer: torch.optim.SGD) -> dict[str, Tensor]:
    names = {id(each): name for name, each in model.named_parameters()}
    buffers = {f"buffer {names[id(each)]}": entries["momentum_buffer"] for each, entries in optimizer.state.items()}
    return {name: value.detach().clone() for name, value in (model.state_dict() | buffers).items()}


def compiled(model: nn.Module, optimizer: torch.optim.SGD, backend: Any) -> StepCompiler:
    return StepCompiler(step, model, optimizer, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eager_steps", [0, 2])
def test_the_first_step_is_not_dampened_and_all_others_are(backend: str, eager_steps: int) -> None:
    model = Net()
    optimizer, twin = optimizer_of(model), copy.deepcopy(model)
    other = optimizer_of(twin)
    given = list(batches())
    for x in given[:eager_steps]:
        step(model, optimizer, x)
        step(twin, other, x)
    compiler = compiled(model, optimizer, backend)
    for x in given[eager_steps:]:
        torch.testing.assert_close(compiler(x), step(twin, other, x).detach())
        compiler.pull()
        torch.testing.assert_close(states(model, optimizer), states(twin, other))


def test_a_checkpoint_from_before_the_first_step_still_knows_it() -> None:
    model = Net()
    optimizer, twin = optimizer_of(model), copy.deepcopy(model)
    other = optimizer_of(twin)
    compiled(model, optimizer, "xla").pull()  # makes the state
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = Net()
    optimizer_again = optimizer_of(again)
    compiler = compiled(again, optimizer_again, "xla")
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    for x in batches():
        compiler(x)
        step(twin, other, x)
    compiler.pull()
    torch.testing.assert_close(states(again, optimizer_again), states(twin, other))


def test_a_parameter_whose_first_gradient_is_zero_has_had_its_first_step() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    compiler = compiled(model, optimizer, "xla")
    compiler(next(batches()))
    compiler.pull()
    buffer = optimizer.state[model.still]["momentum_buffer"]
    assert buffer == 0
    assert not torch.signbit(buffer)
