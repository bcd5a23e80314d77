"""Run by test_compile_communication.py, one process a rank: trains its share of every batch, writes what it got."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.strategies import DEFAULT_STRATEGIES, Communication

ROWS, DIM, BATCH, STEPS, RANKS = 400, 8, 8, 20, 2


class Model(nn.Module):
    """A table whose gradient goes by rows, one whose gradient goes whole, a body, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.small = nn.Embedding(5, DIM)
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.LayerNorm(DIM), nn.Linear(DIM, 1))
        self.frozen = nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).sum(1) + self.table(ids.flip(1) // 2).mean(1) + self.small(ids % 5).sum(1)
        return self.body(self.frozen(hidden)).squeeze(-1)


def step(model: nn.Module, optimizers: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    scores = model(batch["ids"])
    loss = nn.functional.mse_loss(scores, batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in optimizers.values():
        optimizer.step()
    return {"loss": loss, "scores": scores}


def batch_of(seed: int, rank: int | None = None) -> dict[str, Tensor]:
    """Return a joint batch, or a rank's share of it."""
    shares = []
    for each in range(RANKS) if rank is None else [rank]:
        generator = torch.Generator().manual_seed(1000 * seed + each)
        ids = torch.randint(ROWS, (BATCH // RANKS, 3), generator=generator)
        shares.append({"ids": ids, "y": torch.randn(BATCH // RANKS, generator=generator)})
    return {name: torch.cat([share[name] for share in shares]) for name in shares[0]}


def build() -> tuple[Model, dict[str, Any]]:
    torch.manual_seed(0)
    model = Model()
    tables = [model.table.weight, model.small.weight]
    return model, {
        "tables": torch.optim.Adagrad(tables, lr=5e-2),
        "dense": torch.optim.Adam(model.body.parameters(), lr=1e-2),
    }


def main(rank: int, directory: Path, fails_at: int | None) -> None:
    """Train as one rank; with `fails_at`, rank 1 dies before that step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    model, optimizers = build()
    strategies = [Communication(bucket_bytes=100), *DEFAULT_STRATEGIES]
    compiled = StepCompiler(step, model, optimizers, backend="inductor", strategies=strategies)
    losses = []
    for seed in range(STEPS):
        if fails_at == seed and rank == 1:
            sys.exit(9)
        losses.append(float(compiled(batch_of(seed, rank))["loss"]))
    runner = compiled.runner(batch_of(0, rank))
    torch.save({"losses": losses, "state": model.state_dict()}, directory / f"rank{rank}.pt")
    notes = runner.captured.context.notes
    found = {"notes": notes, "graph": runner.graph("transformed"), "devices": runner.key.devices}
    (directory / f"rank{rank}.json").write_text(json.dumps(found, default=str))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
