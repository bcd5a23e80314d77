"""Run by test_compile_mesh.py in a process of its own: JAX must be told of eight devices before it is imported."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.spec.placement import Mesh
from twinstep.worker.compile import StepCompiler

ROWS, DIM, BATCH = 4096, 8, 16


class Model(nn.Module):
    """A table that eight devices divide, two that they do not, of which one is read whole; a body."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.odd = nn.Embedding(ROWS + 1, DIM)
        self.read_whole = nn.Embedding(ROWS - 1, DIM)
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.LayerNorm(DIM), nn.Linear(DIM, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.table(ids).sum(1) + self.odd(ids + 1).sum(1)).squeeze(-1) + self.whole(ids)

    def whole(self, ids: Tensor) -> Tensor:
        """Read all rows of a table."""
        return self.read_whole(ids - ids).mean((1, 2)) + self.read_whole.weight.mean()


def step(model: nn.Module, optimizers: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    scores = model(batch["ids"])
    loss = nn.functional.mse_loss(scores, batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers.values():
        optimizer.step()
    return {"loss": loss, "scores": scores}


def batch_of(seed: int, rows: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(ROWS, (rows, 3), generator=generator),
        "y": torch.randn(rows, generator=generator),
    }


def build() -> tuple[Model, dict[str, Any]]:
    torch.manual_seed(0)
    model = Model()
    tables = [model.table.weight, model.odd.weight, model.read_whole.weight]
    return model, {
        "tables": torch.optim.Adagrad(tables, lr=1e-2),
        "dense": torch.optim.Adam(model.body.parameters(), lr=1e-2),
    }


def refused(run: Any) -> str:
    try:
        run()
    except CompileError as error:
        return str(error)
    return ""


def other_program() -> float:
    """Return the error of a step that reads and writes all of a table which the step before it had padded."""
    errors = []
    states: list[Any] = []
    for mesh in (Mesh.of({"data": 8}, shard_bytes=1 << 10), None):
        model, optimizers = build()
        dense = {"on": False}

        def switched(model: Any, optimizers: Any, batch: Any, dense: dict[str, bool] = dense) -> Any:
            if not dense["on"]:
                return step(model, optimizers, batch)
            optimizers["tables"].zero_grad()
            loss = model.odd.weight.square().sum(1).softmax(0).square().sum() + model(batch["ids"]).mean()
            loss.backward()
            optimizers["tables"].step()
            optimizers["tables"].zero_grad()
            return {"loss": loss, "scores": model.odd.weight.detach().sum(1)}

        compiler = StepCompiler(switched, model, optimizers, backend="xla", mesh=mesh)
        outputs = []
        for number in range(4):
            dense["on"] = number in (1, 2)
            outputs.append(compiler(batch_of(number)))
        states.append((model.state_dict(), outputs))
    (ours, found), (theirs, wanted) = states
    errors += [float((ours[name] - theirs[name]).abs().max()) for name in theirs]
    errors += [float((a[name] - b[name]).abs().max()) for a, b in zip(found, wanted, strict=True) for name in b]
    return max(errors)


def main() -> None:
    """Train with and without a mesh; print what was found as one line of JSON."""
    model, optimizers = build()
    single, mesh = build(), Mesh.of({"data": 8}, shard_bytes=1 << 10, state_bytes=4 * DIM * DIM)
    compiled = StepCompiler(step, model, optimizers, backend="xla", mesh=mesh)
    alone = StepCompiler(step, *single, backend="xla")
    errors = []
    for seed in range(5):
        if seed == 3:  # a write to the live tensors is picked up, spread as it was
            for each, compiler in ((model, compiled), (single[0], alone)):
                compiler.pull()
                with torch.no_grad():
                    each.table.weight.mul_(0.5)
                    each.odd.weight.mul_(0.5)
        found, wanted = compiled(batch_of(seed)), alone(batch_of(seed))
        errors += [float((found[name] - wanted[name]).abs().max()) for name in wanted]
    compiled.pull()
    alone.pull()
    ours, theirs = model.state_dict(), single[0].state_dict()
    state = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    moments = [
        [kept for each in side.state_dict()["state"].values() for kept in each.values()]
        for side in (optimizers["dense"], single[1]["dense"])
    ]
    state = max([state] + [float((a - b).abs().max()) for a, b in zip(*moments, strict=True)])
    runner = compiled.runner(batch_of(0))
    text = runner.graph("lowered")
    backend: Any = compiled._lifted.backend  # type: ignore[union-attr]
    specs = {
        slot.name: str(array.sharding.spec)
        for slot, array in zip(compiled.state.slots, backend.arrays, strict=True)
        if any(part in slot.name for part in ("table", "odd", "read_whole", "body"))
    }
    rows = {
        slot.name: len(array) for slot, array in zip(compiled.state.slots, backend.arrays, strict=True) if array.ndim
    }
    before = model.table.weight.clone()
    uneven = refused(lambda: compiled(batch_of(0, rows=12)))
    unchanged = bool(torch.equal(before, model.table.weight))
    for array in backend.arrays:  # what a step that failed while it ran leaves behind
        array.delete()
    gone = refused(lambda: compiled(batch_of(0)))
    compiled.push()
    after = compiled(batch_of(7))
    json.dump(
        {
            "outputs": max(errors),
            "state": state,
            "collectives": re.findall(
                r"= \(?(\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-\w+)", text
            ),
            "specs": specs,
            "rows": rows,
            "other_program": other_program(),
            "uneven": uneven,
            "unchanged": unchanged,
            "too_many": refused(lambda: StepCompiler(step, *build(), backend="xla", mesh={"data": 16})),
            "gone": gone,
            "goes_on": bool(torch.isfinite(after["loss"])),
            "explained": str(runner.explain()),
            "key": dict(runner.key.mesh),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
