"""Two processes whose large table no host has whole: the numbers of eager PyTorch, which has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from hybrid_child import train
from own_rows_child import resident
from test_two_processes import free_port

from twinstep.spec.parse import validate_spec
from twinstep.spec.placement import SHARD_BYTES
from twinstep.worker.embedding.declared import Declared, FirstRows, untouched
from twinstep.worker.embedding.initial import Normal
from twinstep.worker.train.processes import NAMES

HERE = Path(__file__).parent
DIM = 64
ROWS = SHARD_BYTES // (4 * DIM)  # from this size a dense step splits a table over devices


def spec_of(engine: str, steps: int, checkpoints: Path | None, **compile: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "model": {
            "kind": "dlrm", "embedding_dim": DIM, "bottom_dims": [8], "over_dims": [8], "num_cross_layers": 1,
            "cross_rank": 4,
        },
        "data": {
            "dataset": "synthetic-clicks", "synthetic_events": 400, "batch_size": 16,
            "synthetic": {"table_rows": [50, ROWS], "max_ids": 3},
        },
        "accelerator": {"kind": "cpu", **({"devices": 8} if checkpoints else {})},
        "compile": {"backend": "xla", "cache": False, **compile},
        "optimizers": {"dense": {"kind": "adam", "lr": 0.01}, "sparse": {"kind": "adagrad", "lr": 0.1, "eps": 0.01}},
        "embedding": {"engine": engine},
        "train": {"steps": steps, "eval_batches": 2, "log_every": 1},
        **({"checkpoint": {"path": str(checkpoints), "every_steps": 2}} if checkpoints else {}),
    }  # fmt: skip


def in_two_processes(folder: Path, specs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    where, running = f"127.0.0.1:{free_port()}", []
    for rank in range(2):
        environment = {
            **os.environ,
            **dict(zip(NAMES, ("1", "2", "0", str(rank), where), strict=True)),
            "PYTHONPATH": os.pathsep.join((str(HERE.parents[2]), str(HERE))),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, str(HERE / "own_rows_child.py"), str(folder / f"out{rank}"), json.dumps(specs)]
        log = (folder / f"log{rank}").open("w")
        running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    try:
        codes = [each.wait(timeout=500) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert codes == [0, 0], "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(2))
    return [torch.load(folder / f"out{rank}") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["dense", "sparsecore"])
def test_two_processes_without_a_whole_table_train_as_eager_pytorch_does(tmp_path: Path, engine: str) -> None:
    eager = train(validate_spec(spec_of("dense", 4, None, backend="eager")))
    specs = [spec_of(engine, steps, tmp_path / "checkpoints") for steps in (3, 4, 4)]
    for rank, (first, more, over) in enumerate(in_two_processes(tmp_path, specs)):
        assert more["first"] == 3
        if rank == 0:
            assert [*first["losses"], *more["losses"]] == pytest.approx(eager["losses"], rel=1e-5)
        assert (over["first"], over["losses"]) == (4, [])  # only its evaluation was left
        for run in (more, over):
            assert run["ne"] == pytest.approx(eager["scores"]["ne"], rel=1e-5)
            for path, value in run["values"].items():
                assert torch.allclose(value.double(), eager["tensors"][path].double(), rtol=1e-4, atol=1e-5), path
        for run in (first, more, over):
            assert len(run["resident"]) == 2  # a table, and what Adagrad keeps of it
            # Rows of held-out samples alone: its own are on devices, and where they are saved from.
            assert all(share < 0.01 for share in run["resident"].values()), run["resident"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is in memory")
def test_a_table_larger_than_memory_takes_what_is_written() -> None:
    rows = 1 << 34  # 4 TiB with 64 columns
    table = untouched(rows, 64)
    assert resident(table) < 1 << 20
    known = Declared(table, FirstRows(how=Normal(std=1.0), seed=0, table="t", dim=64))
    assert known.rows(2**31 - 3, 2**31 - 1).shape == (2, 64)
    table[rows - 1] = 1.0
    table[123_456_789] = 2.0
    assert resident(table) <= 1 << 20
    assert float(table[rows - 2].sum()) == 0
    assert table[rows - 1].tolist() == [1.0] * 64
