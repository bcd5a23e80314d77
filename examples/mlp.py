"""The smallest use of `twinstep.compile`: a plain MLP on a regression, AdamW and a learning rate that falls.

python examples/mlp.py [--backend inductor|xla] [--steps N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import twinstep

FEATURES, BATCH = 16, 128


def train_step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Forward, backward, update."""
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer from a fixed seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield seeded batches of a smooth function of the features, with noise."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(BATCH, FEATURES, generator=generator)
        y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(BATCH, generator=generator)
        yield x, y


def main() -> None:
    """Train and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("inductor", "xla"), default="inductor")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(options.steps, 1))
    runner = twinstep.compile(train_step, model, optimizer, next(batches(1)), target=options.backend)
    for number, batch in enumerate(batches(options.steps), start=1):
        loss = runner(batch)
        schedule.step()  # a learning rate is an input of the program: nothing compiles again
        if number % 20 == 0 or number in (1, options.steps):
            print(f"step {number}: loss {float(loss):.4f}", flush=True)
    runner.pull()


if __name__ == "__main__":
    main()
