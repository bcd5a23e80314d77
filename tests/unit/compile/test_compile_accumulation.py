"""Gradients that add up over calls follow eager PyTorch: in one step with a switch, in two steps, from leftovers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import twinstep
from twinstep.worker.compile import StepCompiler

BACKENDS = ["xla", pytest.param("inductor", marks=pytest.mark.inductor)]


class Scorer(nn.Module):
    """A table, a tower, and a head that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(20, 4)
        self.tower = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 1)

    def forward(self, item: Tensor) -> Tensor:
        return torch.tanh(self.tower(self.items(item))).sum(-1)


def make(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Scorer()
    return model, kind(model.parameters(), lr=0.1, **options)


def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    return make(momentum=0.9, weight_decay=0.1)


def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    return make(torch.optim.AdamW)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(20, (6,), generator=generator)


def add(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    return loss


def update(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    loss = add(model, optimizer, batch)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def zero_first(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    return add(model, optimizer, batch)


def take(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    optimizer.step()
    return batch.float().mean()


def usual(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = add(model, optimizer, batch)
    optimizer.step()
    return loss


def assert_same(model: nn.Module, optimizer: Any, eager: nn.Module, eager_optimizer: Any) -> None:
    close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **close)
    state, wanted = optimizer.state_dict()["state"], eager_optimizer.state_dict()["state"]
    made = {key: state[key] for key in wanted}  # a parameter that gets no gradient has its state, zeros, all the same
    torch.testing.assert_close(made, wanted, **close)
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, **close)


def started(kind: Callable[[], Any]) -> tuple[Any, Any, Any, Any]:
    """Return a model and its optimizer, whose state is there, with copies of both for eager."""
    model, optimizer = kind()
    usual(model, optimizer, torch.arange(6))
    optimizer.zero_grad()
    eager, eager_optimizer = copy.deepcopy((model, optimizer))
    return model, optimizer, eager, eager_optimizer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [sgd, adam])
def test_one_step_with_a_switch_adds_up(kind: Any, backend: Any) -> None:
    model, optimizer, eager, eager_optimizer = started(kind)
    run = SimpleNamespace(last=False)

    def step(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
        return update(model, optimizer, batch) if run.last else add(model, optimizer, batch)

    events: list[Any] = []
    compiler = StepCompiler(step, model, optimizer, backend=backend, on_event=events.append)
    for number, batch in zip(range(9), batches(), strict=False):
        run.last = number % 3 == 2
        loss = compiler(batch)
        torch.testing.assert_close(loss, step(eager, eager_optimizer, batch).detach(), rtol=1e-5, atol=1e-6)
        if number in (1, 2, 7, 8):
            compiler.pull()
            assert_same(model, optimizer, eager, eager_optimizer)
    # Adding, the update, and adding again once it is known that the update passes over gradients that are None.
    assert len(events) == 3
    assert [slot.name for slot in compiler.state.slots if slot.role == "gradient"] == [
        f"gradient/{name}" for name, _ in model.named_parameters()
    ]
    gradients = compiler.runner(batch).annotations().of_role("gradient")
    assert "gradient/items.weight" in [value.label for value in gradients if value.stage == "input"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ahead", [True, False])
def test_two_steps_compiled_apart_share_gradients(ahead: bool, backend: Any) -> None:
    model, optimizer, eager, eager_optimizer = started(sgd)
    runners: dict[Any, Any] = {}
    drawn = batches()

    def run(step: Any, batch: Tensor) -> None:
        if step not in runners:
            runners[step] = twinstep.compile(step, model, optimizer, batch, target=backend)
        runners[step](batch)

    if ahead:  # when no gradient is there yet
        runners = {
            each: twinstep.compile(each, model, optimizer, next(drawn), target=backend) for each in (add, update)
        }
    for step in (add, add, update, add, update, update, add):
        batch = next(drawn)
        run(step, batch)
        step(eager, eager_optimizer, batch)
        for runner in runners.values():
            runner.pull()
        assert_same(model, optimizer, eager, eager_optimizer)


STEPS = {"add": add, "update": update, "zero_first": zero_first, "take": take}


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([*STEPS, "pull", "eager", "drop", "zero", "load"]), min_size=3, max_size=10))
def test_any_order_of_steps_follows_eager(compilers: Any, names: list[str]) -> None:
    (model, optimizer, eager, eager_optimizer, run, compiler), drawn = compilers, batches()
    for which in ((model, optimizer), (eager, eager_optimizer)):
        which[1].zero_grad()
    for name in names:
        batch = next(drawn)
        if name in STEPS:
            run.name = name
            compiler(batch)
            STEPS[name](eager, eager_optimizer, batch)
            continue
        compiler.pull()
        for m, o in ((model, optimizer), (eager, eager_optimizer)):
            if name == "eager":
                add(m, o, batch)
            elif name == "drop":
                m.tower.weight.grad = None
            elif name == "zero":
                o.zero_grad(set_to_none=False)
            elif name == "load":
                m.load_state_dict({key: value * 0.9 for key, value in m.state_dict().items()})
    compiler.pull()
    assert_same(model, optimizer, eager, eager_optimizer)


@pytest.fixture(scope="module")
def compilers() -> Any:
    model, optimizer, eager, eager_optimizer = started(sgd)
    run = SimpleNamespace(name="")

    def step(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
        return STEPS[run.name](model, optimizer, batch)

    compiler = StepCompiler(step, model, optimizer, backend="xla", max_runners=64, storm=(1000, 1))
    return model, optimizer, eager, eager_optimizer, run, compiler


@pytest.mark.parametrize("compiled_before", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_leftovers_of_eager_steps_count_where_zero_grad_stands_at_the_end(backend: Any, compiled_before: bool) -> None:
    model, optimizer, eager, eager_optimizer = started(sgd)
    drawn = batches()
    compiler = StepCompiler(update, model, optimizer, backend=backend)
    if compiled_before:
        batch = next(drawn)
        compiler(batch)
        assert not any(slot.role == "gradient" for slot in compiler.state.slots)
        update(eager, eager_optimizer, batch)
        compiler.pull()
    for m, o in ((model, optimizer), (eager, eager_optimizer)):
        add(m, o, torch.tensor([3, 5, 3]))
    for _ in range(2):
        batch = next(drawn)
        compiler(batch)
        update(eager, eager_optimizer, batch)
    compiler.pull()
    assert_same(model, optimizer, eager, eager_optimizer)


def test_the_usual_step_has_no_slots_for_gradients_whatever_is_left_over() -> None:
    model, optimizer, eager, eager_optimizer = started(sgd)
    for m, o in ((model, optimizer), (eager, eager_optimizer)):
        add(m, o, torch.tensor([3, 5, 3]))
    compiler = StepCompiler(usual, model, optimizer, backend="xla")
    compiler(torch.arange(6))
    usual(eager, eager_optimizer, torch.arange(6))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert {slot.role for slot in compiler.state.slots} == {"parameter", "optimizer"}


def test_a_warm_start_needs_no_capture_to_know_that_gradients_are_state(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer, eager, eager_optimizer = started(sgd)
    compiler = StepCompiler(add, model, optimizer, backend="xla", cache_dir=tmp_path)
    compiler(torch.arange(6))
    add(eager, eager_optimizer, torch.arange(6))
    compiler.pull()
    warm = StepCompiler(add, model, optimizer, backend="xla", cache_dir=tmp_path)
    monkeypatch.setattr("twinstep.worker.compile.capture.capture", None)
    for _ in range(2):
        warm(torch.arange(6))
        add(eager, eager_optimizer, torch.arange(6))
    warm.pull()
    assert_same(model, optimizer, eager, eager_optimizer)


def test_compilers_over_one_model_hand_its_state_to_each_other() -> None:
    model, optimizer, eager, eager_optimizer = started(adam)

    def evaluate(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    train = StepCompiler(usual, model, optimizer, backend="xla")
    look = StepCompiler(evaluate, model, None, backend="xla")
    for batch, _ in zip(batches(), range(4), strict=False):
        train(batch)
        usual(eager, eager_optimizer, batch)
        torch.testing.assert_close(look(batch), evaluate(eager, batch).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)
