"""Optimizer updates as torch's fused kernels: eager's numbers for every setting; what has no such kernel stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.capture import capture
from twinstep.worker.compile.lower import fused_updates
from twinstep.worker.compile.lower.inductor import InductorBackend
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import resolve
from twinstep.worker.compile.updates import cut_updates

Make = Callable[[Iterable[Tensor]], Optimizer]

FUSED: dict[str, Make] = {
    "adam": lambda p: Adam(p, lr=1e-2),
    "adam_decay": lambda p: Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "adam_amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True, maximize=True),
    "adam_decoupled": lambda p: Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw_amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True, weight_decay=0.3),
    "adamw_maximize": lambda p: AdamW(p, lr=1e-2, maximize=True),
    "sgd": lambda p: SGD(p, lr=1e-2),
    "sgd_decay": lambda p: SGD(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "adagrad_decay": lambda p: Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "adagrad_maximize": lambda p: Adagrad(p, lr=1e-2, maximize=True),
    "asked_for": lambda p: Adam(p, lr=1e-2, foreach=True),
}
SHAPES = ((3, 4), (5,), (), (0, 2))


class Bag(nn.Module):
    """Parameters of several shapes for each of several names."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleDict(
            {name: nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES) for name in names}
        )

    def forward(self, x: Tensor) -> Tensor:
        terms = [(each * x.mean() + x.std()).square().sum() for bag in self.bags.values() for each in bag]
        return torch.stack(terms).sum()

    def optimizers(self, make: dict[str, Make]) -> dict[str, Optimizer]:
        return {name: each(self.bags[name].parameters()) for name, each in make.items()}


def step(model: nn.Module, optimizers: Any, batch: Tensor) -> Tensor:
    for each in optimizers.values():
        each.zero_grad()
    loss = model(batch)
    loss.backward()
    for bag in model.bags.values():  # type: ignore[union-attr, operator]
        nn.utils.clip_grad_norm_(bag.parameters(), 5.0)
    for each in optimizers.values():
        each.step()
    return loss


def train(backend: str, make: dict[str, Make], steps: int, train_step: Any = step) -> tuple[Bag, Any, StepCompiler]:
    model = Bag(make)
    optimizers = model.optimizers(make)
    compiler = StepCompiler(train_step, model, optimizers, backend=backend, strategies=["fused_update"])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for index in range(steps):
        if index == steps // 2:  # as a schedule would
            for each in optimizers.values():
                each.param_groups[0]["lr"] *= 0.5
        compiler(torch.randn(7, generator=generator))
    return model, optimizers, compiler


def notes(make: dict[str, Make], train_step: Any = step) -> dict[str, Any]:
    """What is found out about fusing, without compiling."""
    model = Bag(make)
    optimizers = model.optimizers(make)
    state = TrainState(model, optimizers)
    decompositions = InductorBackend(state, cache_dir=None).decompositions()
    captured = capture(
        train_step, state, optimizers, torch.ones(7), decompositions, backend="inductor", strategies=resolve([])
    )
    return cut_updates(captured, state, decompositions)[1]


@pytest.mark.inductor
def test_every_setting_with_a_fused_kernel_follows_eager_over_twenty_steps() -> None:
    want, want_optimizers, _ = train("eager", FUSED, 20)
    model, optimizers, compiler = train("inductor", FUSED, 20)
    (runner,) = compiler._runners.values()
    found = runner.captured.context.notes["fused_update"]
    assert found["left"] == {}
    for name, bag in model.bags.items():
        for got, wanted in zip(bag.parameters(), want.bags[name].parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    for name, optimizer in optimizers.items():
        wanted_state = want_optimizers[name].state_dict()["state"]
        for index, entries in optimizer.state_dict()["state"].items():
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(value, wanted_state[index][entry], rtol=1e-5, atol=1e-7)


def test_all_parameters_of_a_group_are_one_call() -> None:
    found = notes(FUSED)
    assert found["left"] == {}
    assert len(found["fused"]) == len(FUSED)
    assert {count for _, count in found["fused"]} == {len(SHAPES)}


def test_settings_without_a_fused_kernel_stay_as_they_are_with_the_reason() -> None:
    others: dict[str, Make] = {
        "rmsprop": lambda p: RMSprop(p, lr=1e-2),
        "betas": lambda p: Adam(p, lr=1e-2, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
        "fine": lambda p: SGD(p, lr=1e-2),
    }
    found = notes(others)
    assert [count for _, count in found["fused"]] == [len(SHAPES)]
    assert {reason: len(names) for reason, names in found["left"].items()} == {
        "RMSprop has no fused kernel": len(SHAPES),
        "betas are tensors": len(SHAPES),
    }


def twice(model: Any, optimizers: Any, batch: Tensor) -> Tensor:
    loss = step(model, optimizers, batch)
    step(model, optimizers, batch * 2)
    return loss


def read_after(model: Any, optimizers: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    loss = step(model, optimizers, batch)
    return loss, model(batch).detach()


def changed_after(model: Any, optimizers: Any, batch: Tensor) -> Tensor:
    loss = step(model, optimizers, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.5, 0.5)
    return loss


def by_hand(model: Any, optimizers: Any, batch: Tensor) -> Tensor:
    loss = step(model, optimizers, batch)
    for optimizer in optimizers.values():
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["step"].add_(1)
    return loss


@pytest.mark.parametrize("train_step", [twice, read_after, changed_after, by_hand])
def test_a_step_that_does_more_with_its_parameters_is_left_as_it_is(train_step: Any) -> None:
    found = notes({"adam": FUSED["adam"]}, train_step)
    fused = sum(count for _, count in found["fused"])
    assert fused + sum(map(len, found["left"].values())) == len(SHAPES)
    assert fused <= 1  # the one without elements may be read: nobody does


@pytest.mark.inductor
def test_what_is_fused_beside_what_is_not_follows_eager() -> None:
    make: dict[str, Make] = {"rmsprop": lambda p: RMSprop(p, lr=1e-2), "adam": FUSED["adam"]}
    want, _, _ = train("eager", make, 4)
    model, _, _ = train("inductor", make, 4)
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.inductor
def test_a_step_that_fails_before_its_updates_leaves_the_state_and_one_after_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizers, compiler = train("inductor", {"adam": FUSED["adam"]}, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counts = [entries["step"].clone() for entries in optimizers["adam"].state.values()]
    program = compiler.runner(torch.ones(7))._program

    def fails(_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(program, "code", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            compiler(torch.ones(7))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close([e["step"] for e in optimizers["adam"].state.values()], counts, rtol=0, atol=0)
    compiler(torch.ones(7))
    assert not torch.equal(model.bags["adam"][0], before["bags.adam.0"])


def test_a_gradient_in_another_layout_is_brought_into_the_parameters() -> None:
    parameter, gradient = torch.zeros(2, 3), torch.arange(6.0).view(3, 2).t()
    laid_out = fused_updates._as_laid_out(gradient, parameter)
    assert laid_out.stride() == parameter.stride()
    assert torch.equal(laid_out, gradient)
