"""A two-tower retrieval model on `twinstep.compile`: in-batch softmax over the items of the batch.

    python examples/two_tower.py [--backend inductor|xla|eager] [--steps N]

Every other row's item is a negative for a row (sampled softmax with the logQ correction for how often an item comes up:
Yi et al. 2019, "Sampling-bias-corrected neural modeling for large corpus item recommendations").
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twinstep

USERS, ITEMS, WIDTH, BATCH = 2_000, 500, 16, 64
TEMPERATURE = 0.1


class Tower(nn.Module):
    """Ids → unit vectors, [B] → [B, WIDTH]."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        """Return one unit vector per id."""
        return F.normalize(self.body(self.table(ids)), dim=-1)


class TwoTower(nn.Module):
    """Users and items in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the scores of every row's user with every row's item, [B, B]; the right ones on the diagonal."""
        scores = self.user(batch["user"]) @ self.item(batch["item"]).T / TEMPERATURE
        same = batch["item"][:, None] == batch["item"][None, :]
        accidental = same & ~torch.eye(len(batch["item"]), dtype=torch.bool)
        return torch.where(accidental, -1e4, scores - batch["log_q"][None, :])


def train_step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Forward, backward, update."""
    optimizer.zero_grad()
    scores = model(batch)
    right = torch.arange(scores.shape[0])
    loss = F.cross_entropy(scores, right)
    loss.backward()
    optimizer.step()
    return {"loss": loss, "hits": (scores.argmax(dim=1) == right).float().mean()}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer from a fixed seed."""
    torch.manual_seed(0)
    model = TwoTower()
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Yield seeded batches: a user likes the items whose number ends as the user's own does; few items are popular."""
    generator = torch.Generator().manual_seed(1)
    popularity = 1.0 / torch.arange(1, ITEMS // 10 + 1)
    chance = popularity / popularity.sum()
    for _ in range(count):
        user = torch.randint(USERS, (BATCH,), generator=generator)
        rank = torch.multinomial(chance, BATCH, replacement=True, generator=generator)
        yield {"user": user, "item": rank * 10 + user % 10, "log_q": torch.log(chance[rank] / 10)}


def main() -> None:
    """Train and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("inductor", "xla", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    model, optimizer = make()
    step = twinstep.StepCompiler(train_step, model, optimizer, backend=options.backend)
    for number, batch in enumerate(batches(options.steps), start=1):
        result = step(batch)
        if number % 20 == 0 or number in (1, options.steps):
            print(f"step {number}: loss {float(result['loss']):.4f}, hits {float(result['hits']):.2f}", flush=True)
    step.pull()


if __name__ == "__main__":
    main()
