"""Run by test_ring_steps.py in a process of its own: JAX must be told of its devices before it is imported.

Arguments: names of cases. Prints one line of JSON a case: its name and what was found.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from jax.experimental.pallas import tpu as pltpu
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.spec.parse import validate_spec
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.lower import layout, xla_ring
from twinstep.worker.compile.strategies import DEFAULT_STRATEGIES, RingEmbedding
from twinstep.worker.data.batch import BATCH_DIMS
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS
from twinstep.worker.embedding.optim import RowWiseAdagrad, build_optimizers
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.asked import strategies_of
from twinstep.worker.train.step import make_train_step

DLRMV3 = {
    "model": {
        "embedding_dim": 16, "transducer_dim": 32, "num_layers": 1, "num_heads": 2, "linear_dim": 16,
        "attention_dim": 16, "hidden_dim": 32,
    },
    "data": {
        "dataset": "synthetic", "synthetic_events": 1000, "batch_size": 16, "uih_len": 16, "num_candidates": 4,
    },
}  # fmt: skip
DLRM = {
    "model": {"kind": "dlrm", "embedding_dim": 16, "bottom_dims": [32], "over_dims": [32], "num_cross_layers": 1},
    "data": {
        "dataset": "synthetic-clicks",
        "synthetic_events": 1000,
        "batch_size": 32,
        "synthetic": {"table_rows": [50, 8, 1000, 301], "max_ids": 3},
    },
}
OWN = DLRMV3 | {
    "model": {
        "kind": "module", "factory": "ranker:build", "embedding_dim": 16, "arguments": {"hidden": 16},
        "source": str(Path(__file__).parents[3] / "examples" / "own_model"),
    },
}  # fmt: skip

PLAIN = """
import torch
from torch import nn

class Ranker(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rows = nn.Embedding(config.tables[0].rows, config.tables[0].dim)
        self.out = nn.Linear(config.tables[0].dim, 1)

    def forward(self, batch):
        return self.out(self.rows(batch.cand_ids[0])).squeeze(-1).expand(batch.labels.shape)
"""


def errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(
        float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs if theirs[name].numel()
    )


def of_a_spec(base: dict[str, Any], devices: int, kind: str, steps: int = 4) -> Any:
    """Train a spec's own step around a ring and eagerly, from one state on the same batches."""
    spec = validate_spec(
        {
            "name": "ring",
            **base,
            "optimizers": {"sparse": {"kind": kind, "lr": 0.05}, "dense": {"kind": "sgd", "lr": 0.01}},
            "accelerator": {"kind": "cpu", "devices": devices},
            "compile": {"backend": "xla"},
            "embedding": {"engine": "ring"},
        }
    )
    dataset = load_dataset(spec.data)
    loader = Loader(dataset, spec.data, seed=0)
    model = build_model(spec, dataset.schema)
    model.train()
    theirs = copy.deepcopy(model)
    step = make_train_step(clip_norm=1.0)
    compiled = StepCompiler(
        step, model, build_optimizers(spec.optimizers, model), backend="xla", mesh={"data": devices},
        batch_dims=BATCH_DIMS | MULTI_HOT_DIMS, strategies=strategies_of(spec.compile, spec.embedding.engine, model),
    )  # fmt: skip
    eager = StepCompiler(step, theirs, build_optimizers(spec.optimizers, theirs), backend="eager")
    outputs = []
    for number in range(steps):
        batch, _ = loader.train_batch(number)
        found, wanted = compiled(batch), eager(batch)
        outputs += [float((found.loss - wanted.loss).abs()), float((found.logits - wanted.logits).abs().max())]
    return {"outputs": max(outputs), **looked_at(compiled, batch, model, theirs)}


def without_a_collection(devices: int, kind: str) -> Any:
    """Train a user's module that looks rows up in an nn.Embedding of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plain_ranker.py").write_text(PLAIN)
        model = {"kind": "module", "factory": "plain_ranker:Ranker", "embedding_dim": 16, "source": folder}
        return of_a_spec({**DLRMV3, "model": model}, devices, kind)


def looked_at(compiled: StepCompiler, batch: Any, model: nn.Module, theirs: nn.Module) -> dict[str, Any]:
    runner = compiled.runner(batch)
    text = runner.graph("lowered")
    backend: Any = compiled._lifted.backend  # type: ignore[union-attr]
    split = {
        slot.name: str(array.sharding.spec)
        for slot, array in zip(compiled.state.slots, backend.arrays, strict=True)
        if slot.role == "parameter" and str(array.sharding.spec).startswith("P('data'")
    }
    return {
        "state": errors(model.state_dict(), theirs.state_dict()),
        "split": sorted(split),
        "tables": sorted(
            name for name, _ in model.named_parameters() if "embeddings." in name or name.startswith("table")
        ),
        "lines": sum(backend.layout.lines),
        "permutes": len(re.findall(r"collective-permute(-start)?\(", text)),
        "explained": str(runner.explain()),
    }


class Small(nn.Module):
    """Two tables, one that devices do not divide; one is looked up by what the other gave."""

    def __init__(self, odd: int, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.table_too = nn.Embedding(40 + odd, 4)
        self.head = nn.Linear(width + 4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        more = (rows.detach()[..., :8].sum(-1).abs() * 1000).to(torch.int64) % 40
        return self.head(torch.cat([rows.sum(1), self.table_too(more).sum(1)], dim=-1)).squeeze(-1)


def small_step(model: nn.Module, optimizers: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    for each in optimizers.values():
        each.zero_grad()
    scores = model(batch["ids"])
    loss = nn.functional.mse_loss(scores, batch["y"])
    loss.backward()
    for each in optimizers.values():
        each.step()
    return {"loss": loss, "scores": scores}


MAKERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rowwise_adagrad": lambda params: RowWiseAdagrad(params, lr=0.05, weight_decay=0.01),
}


def by_kernel(kind: str, devices: int) -> Any:
    """Train the small model as on a TPU: its first table's rows in lines, which the kernel looks up, interpreted."""
    plain, called = xla_ring.RingOn.of, []

    def of(*given: Any) -> Any:
        made = plain(*given)
        lined = frozenset(slot for slot in made.by_rows if given[0].example[slot].shape == (64, 64))
        return dataclasses.replace(made, one_line=lined, lined=lined, interpret=pltpu.InterpretParams())

    def look_up(*given: Any, **more: Any) -> Any:
        called.append(given)
        return kernel(*given, **more)

    kernel, xla_ring.kernel.look_up = xla_ring.kernel.look_up, look_up
    xla_ring.RingOn.of, layout.LINED = of, "cpu"  # type: ignore[method-assign]
    return {**small(kind, 0, devices, width=64), "kernels": len(called)}


def small(kind: str, odd: int, devices: int, width: int = 8) -> Any:
    """Train the small model; or say why it is refused."""
    torch.manual_seed(0)
    model = Small(odd, width)
    theirs = copy.deepcopy(model)
    steppers = []
    for backend, each in (("xla", model), ("eager", theirs)):
        optimizers = {
            "tables": MAKERS[kind]([each.table.weight, each.table_too.weight]),
            "dense": torch.optim.SGD(each.head.parameters(), lr=0.1),
        }
        more: Any = {}
        if backend == "xla":
            more = {
                "mesh": {"data": devices},
                "strategies": [*DEFAULT_STRATEGIES, RingEmbedding(parameters=("table*",))],
            }
        steppers.append(StepCompiler(small_step, each, optimizers, backend=backend, **more))  # type: ignore[arg-type]
    compiled, eager = steppers
    outputs = []
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        batch = {
            "ids": torch.randint(10 + 18 * number, (16, 3), generator=generator),
            "y": torch.randn(16, generator=generator),
        }
        try:
            found = compiled(batch)
        except CompileError as error:
            return {"refused": str(error)}
        wanted = eager(batch)
        outputs += [float((found[name] - wanted[name]).abs().max()) for name in wanted]
    return {"outputs": max(outputs), **looked_at(compiled, batch, model, theirs)}


def run(name: str) -> Any:
    what, devices, kind = name.split("/")[:3]
    if what in (specs := {"dlrmv3": DLRMV3, "dlrm": DLRM, "own": OWN}):
        return of_a_spec(specs[what], int(devices), kind)
    if what == "plain":
        return without_a_collection(int(devices), kind)
    if what == "kernel":
        return by_kernel(kind, int(devices))
    return small(kind, int(name.split("/")[3]), int(devices))


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps([case, run(case)]), flush=True)
