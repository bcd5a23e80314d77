"""The compiler is for any model: DLRM with both interactions, a two-tower and an MLP train and hold parity."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import twinstep
from twinstep.worker.compile import ParityReport
from twinstep.worker.data.batch import MultiHotBatch
from twinstep.worker.data.synthetic import make_multi_hot
from twinstep.worker.embedding.optim import RowWiseAdagrad, split_parameters
from twinstep.worker.models.config import DLRMConfig, TableConfig
from twinstep.worker.models.dlrm import DLRM, init_dlrm

EXAMPLES = Path(__file__).parents[3] / "examples"
ROWS = (50, 400, 7)


def example(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def dlrm(interaction: Any) -> DLRM:
    config = DLRMConfig(
        num_dense=4,
        tables=tuple(TableConfig(name=f"t{index}", rows=rows, dim=8) for index, rows in enumerate(ROWS)),
        bottom_dims=(16,),
        top_dims=(16,),
        interaction=interaction,
        num_cross_layers=2,
        cross_rank=4,
    )
    model = DLRM(config)
    init_dlrm(model, generator=torch.Generator().manual_seed(0))
    return model


def multi_hot(count: int, batch_size: int = 32) -> list[MultiHotBatch]:
    return list(make_multi_hot(rows=ROWS, num_dense=4, hot=3, batch_size=batch_size, num_batches=count))


def optimizers(model: DLRM) -> dict[str, torch.optim.Optimizer]:
    dense, tables = split_parameters(model)
    return {
        "dense": torch.optim.Adam([parameter for _, parameter in dense], lr=3e-3),
        "sparse": RowWiseAdagrad([parameter for _, parameter in tables], lr=0.05),
    }


def dlrm_step(model: Any, optimizers: Any, batch: MultiHotBatch) -> Any:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    output = model(batch)
    output.loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return output


def assert_held(report: ParityReport) -> None:
    assert report.ok, report.summary()
    for backend in report.backends:
        losses = backend.of_kind("loss")
        assert losses
        assert max(each.worst.max_rel for each in losses) <= 1e-5
        sound = [each for each in backend.of_kind("parameter") if not any(step.weighed for step in each.steps)]
        assert sound
        assert max(each.worst.max_rel for each in sound) <= 1e-4


@pytest.mark.inductor
@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_dlrm_trains_and_holds_parity_on_both_backends(interaction: str) -> None:
    model = dlrm(interaction)
    report = twinstep.parity(dlrm_step, model, optimizers(model), multi_hot(20), gradients=None)
    assert_held(report)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["two_tower", "mlp"])
def test_the_examples_hold_parity_on_both_backends(name: str) -> None:
    module = example(name)
    model, optimizer = module.make()
    assert_held(twinstep.parity(module.train_step, model, optimizer, module.batches(20), gradients=None))


@pytest.mark.parametrize("name", ["two_tower", "mlp"])
def test_the_examples_run_and_learn(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--backend", "xla", "--steps", "150"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert losses[-1] < 0.8 * losses[0]


def test_dlrm_learns_what_dense_features_explain() -> None:
    model = dlrm("dot")
    made = optimizers(model)
    losses = [float(dlrm_step(model, made, batch).loss.detach()) for batch in multi_hot(150, batch_size=128)]
    assert sum(losses[-10:]) / 10 < 0.8 * sum(losses[:5]) / 5


def test_dot_interaction_is_every_pair_once() -> None:
    vectors = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    found = dlrm("dot")._interaction(vectors)
    want = [[float(row[i] @ row[j]) for i in range(4) for j in range(i)] for row in vectors]
    torch.testing.assert_close(found[:, :3], vectors[:, 0])
    torch.testing.assert_close(found[:, 3:], torch.tensor(want))


def test_low_rank_cross_is_the_papers_formula() -> None:
    model = dlrm("dcn")
    vectors = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    first = x = vectors.flatten(1)
    cross = model._interaction
    for down, up in zip(cross._down, cross._up, strict=True):
        x = first * (x @ (up.weight @ down.weight).T + up.bias) + x
    torch.testing.assert_close(cross(vectors), x)


def test_an_empty_slot_changes_nothing_and_gives_no_gradient() -> None:
    model = dlrm("dot")
    (batch,) = multi_hot(1)
    other = batch._replace(ids=torch.where(batch.valid, batch.ids, 3))
    results = []
    for each in (batch, other):
        model.zero_grad()
        output = model(each)
        output.loss.backward()
        results.append((output.loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_dummy_row_weighs_nothing() -> None:
    model = dlrm("dot")
    (batch,) = multi_hot(1)
    weights = batch.weights.clone()
    weights[20:] = 0
    short = MultiHotBatch(*(each[:20] for each in batch))
    torch.testing.assert_close(model(batch._replace(weights=weights)).loss, model(short).loss)


def test_embedding_sums_match_torchs_embedding_bag() -> None:
    model = dlrm("dot")
    (batch,) = multi_hot(1)
    table = model._embedding_collection.embeddings["t1"].weight
    ids = [batch.ids[row, 1][batch.valid[row, 1]] for row in range(32)]
    offsets = torch.tensor([0, *(len(each) for each in ids[:-1])]).cumsum(0)
    want = torch.nn.functional.embedding_bag(torch.cat(ids), table, offsets, mode="sum")
    got = model._embedding_collection("t1", batch.ids[:, 1], batch.valid[:, 1]).sum(dim=1)
    torch.testing.assert_close(got, want)
