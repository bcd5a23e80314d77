"""Every supported optimizer in every setting that changes its formula, against eager on both backends.

Each optimizer has a little net of its own inside one step, so that one compile tests them all; a divergence names the
optimizer. Beside the optimizers' own settings: clipping by norm and by value, gradients of two halves of a batch added
up, learning rates that change between steps, two parameter groups, a frozen parameter, tied weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import twinstep
from twinstep.worker.embedding.optim import RowWiseAdagrad

Groups = Iterable[Any]

MATRIX: dict[str, Callable[[Groups], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05),
    "sgd_decay": lambda p: SGD(p, lr=0.05, weight_decay=0.1),
    "sgd_momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "sgd_nesterov_decay": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampening": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd_maximize": lambda p: SGD(p, lr=0.05, momentum=0.5, maximize=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam_amsgrad_decay": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam_betas": lambda p: Adam(p, lr=0.01, betas=(0.5, 0.9), eps=1e-3),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_amsgrad": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
    "adagrad_lr_decay": lambda p: Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01),
    "rmsprop_centered": lambda p: RMSprop(p, lr=0.01, centered=True),
    "rmsprop_momentum": lambda p: RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1, alpha=0.9),
    "rmsprop_both": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class Net(nn.Module):
    """One optimizer's own: tied weights (the middle matrix is used twice), a frozen scale, a bias per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(3, 4), nn.Linear(4, 4)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full((4,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.middle(torch.tanh(self.first(x)))))) * self.scale
        return self.last(hidden).squeeze(-1)


class Line(nn.Module):
    """The least that has a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).squeeze(-1)


class Nets(nn.Module):
    """A net per optimizer, and tables of row-wise Adagrad, with and without decay."""

    def __init__(self, net: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nets = nn.ModuleDict({name: net() for name in MATRIX})
        self.tables = nn.ModuleDict({name: nn.Embedding(9, 3) for name in ("rows", "rows_decay")})

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        losses = {f"loss_{name}": (net(batch["x"]) - batch["y"]).square().mean() for name, net in self.nets.items()}
        for name, table in self.tables.items():
            losses[f"loss_{name}"] = (table(batch["ids"]).sum(-1) - batch["y"]).square().mean()
        return losses


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices and biases apart; the frozen scale is with the biases."""
    named = dict(net.named_parameters())
    return [
        {"params": [each for name, each in named.items() if name.endswith("weight")]},
        {"params": [each for name, each in named.items() if not name.endswith("weight")]},
    ]


def make(net: Callable[[], nn.Module] = Net) -> tuple[Nets, dict[str, Optimizer]]:
    model = Nets(net)
    optimizers: dict[str, Optimizer] = {name: MATRIX[name](groups(net)) for name, net in model.nets.items()}
    optimizers["rows"] = RowWiseAdagrad(model.tables["rows"].parameters(), lr=0.1)
    optimizers["rows_decay"] = RowWiseAdagrad(model.tables["rows_decay"].parameters(), lr=0.1, weight_decay=0.1)
    return model, optimizers


def schedule(number: int, model: nn.Module, optimizers: Any) -> None:
    """Learning rates that differ by group and change at every step; nothing compiles again for them."""
    for optimizer in optimizers.values():
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = optimizer.defaults["lr"] * 0.9**number / (1 + index)


def clip_norm(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def clip_value(net: nn.Module) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.05)


def unclipped(net: nn.Module) -> None:
    pass


def net_by_net(clip: Callable[[nn.Module], None]) -> Callable[[Nets], None]:
    """Clip each net by itself."""

    def all_of_them(model: Nets) -> None:
        for net in (*model.nets.values(), *model.tables.values()):
            clip(net)

    return all_of_them


def train_step(clip: Callable[[Any], None], *, parts: int = 1) -> Callable[..., dict[str, Tensor]]:
    """Return a step that adds up the gradients of `parts` parts of a batch, and clips them."""

    def step(model: Any, optimizers: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for part in range(parts):
            losses = model({name: leaf.chunk(parts)[part] for name, leaf in batch.items()})
            (sum(losses.values()) / parts).backward()
        clip(model)
        for optimizer in optimizers.values():
            optimizer.step()
        return dict(losses)

    return step


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, 3, generator=generator),
            "y": torch.randn(8, generator=generator),
            "ids": torch.randint(9, (8,), generator=generator),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("backend", "clip", "parts", "net"),
    [
        ("xla", net_by_net(clip_norm), 1, Net),
        ("xla", net_by_net(clip_value), 2, Net),
        # Whole nets, each with a norm of its own, would be minutes of g++.
        pytest.param("inductor", clip_norm, 2, Line, marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
)
def test_every_optimizer_in_every_setting_follows_eager(
    backend: Any, clip: Callable[[Any], None], parts: int, net: Callable[[], nn.Module]
) -> None:
    model, optimizers = make(net)
    report = twinstep.parity(
        train_step(clip, parts=parts),
        model,
        optimizers,
        batches(6),
        backends=[backend],
        steps=20,
        gradients=None,
        between=schedule,
        bisect=False,
    )
    over = [
        (each.kind, each.name, each.first_over, each.worst.max_rel)
        for each in report.backends[0].tensors
        if not each.ok
    ]
    assert not over
    trained = {each.name for each in report.backends[0].of_kind("parameter")}
    assert {f"nets.{name}.last.weight" for name in MATRIX} <= trained
    frozen = [each for each in report.backends[0].of_kind("parameter") if each.name.endswith("scale")]
    assert all(each.worst.max_abs == 0.0 for each in frozen)


def test_the_matrix_tests_what_it_says() -> None:
    """Every clip bites, every setting changes what is learned, so that a formula that is left out would show."""
    found = {}
    for clip in (clip_norm, clip_value, unclipped):
        model, optimizers = make()
        step = train_step(net_by_net(clip), parts=2)
        for number, batch in enumerate(batches(6)):
            schedule(number, model, optimizers)
            step(model, optimizers, batch)
        found[getattr(clip, "__name__", "")] = {name: net.first.weight.detach() for name, net in model.nets.items()}
    for name in MATRIX:
        values = [each[name] for each in found.values()]
        assert not torch.allclose(values[0], values[1], rtol=1e-3), name
        assert not torch.allclose(values[0], values[2], rtol=1e-3), name
