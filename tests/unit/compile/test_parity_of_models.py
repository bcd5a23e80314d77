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
from twinstep.spec.job import DataSpec
from twinstep.worker.compile import ParityReport
from twinstep.worker.data.multi_hot import MultiHotBatch, MultiHotDataset, make_multi_hot_dataset
from twinstep.worker.data.synthetic_clicks import make_clicks
from twinstep.worker.embedding.optim import RowWiseAdagrad, split_parameters
from twinstep.worker.models.config import BagConfig, DLRMConfig, TableConfig, TaskConfig
from twinstep.worker.models.dlrm import DLRM, init_dlrm

EXAMPLES = Path(__file__).parents[3] / "examples"
ROWS, MAX_IDS = (50, 400, 7), (3, 1, 2)


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
        features=tuple(BagConfig(name=f"f{i}", table=f"t{i}", max_ids=most) for i, most in enumerate(MAX_IDS)),
        tasks=(TaskConfig(name="clicked"),),
        bottom_dims=(16,),
        over_dims=(16,),
        interaction=interaction,
        num_cross_layers=2,
        cross_rank=4,
    )
    model = DLRM(config)
    init_dlrm(model, seed=0)
    return model


def clicks(num_rows: int) -> MultiHotDataset:
    rows, schema = make_clicks(num_rows, table_rows=ROWS, max_ids=MAX_IDS, num_dense=4)
    return make_multi_hot_dataset(rows, schema, DataSpec())


def multi_hot(count: int, batch_size: int = 32) -> list[MultiHotBatch]:
    data = clicks(2 * count * batch_size)
    return [data.pack(data.train[i * batch_size : (i + 1) * batch_size], batch_size)[0] for i in range(count)]


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
