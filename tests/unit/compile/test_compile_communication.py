"""Two ranks over gloo train what one process trains on the joint batch; a rank that dies takes nobody with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import ranks_child

from twinstep.spec.errors import CompileError
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.strategies import Communication

CHILD = Path(__file__).with_name("ranks_child.py")


def start(directory: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(directory), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks_child.RANKS)
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """Wait for all, and end whoever is late."""
    end = time.monotonic() + seconds
    found = []
    try:
        for process in processes:
            said, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
            found.append((process.returncode, said))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    for code, said in finish(start(directory), 500):
        assert code == 0, said[-3000:]
    return [
        torch.load(directory / f"rank{rank}.pt", weights_only=True)
        | json.loads((directory / f"rank{rank}.json").read_text())
        for rank in range(ranks_child.RANKS)
    ]


@pytest.mark.inductor
def test_two_ranks_learn_what_one_process_learns_from_the_joint_batch(two_ranks: list[dict[str, Any]]) -> None:
    model, optimizers = ranks_child.build()
    joint = []
    for seed in range(ranks_child.STEPS):
        joint.append(float(ranks_child.step(model, optimizers, ranks_child.batch_of(seed))["loss"].detach()))
    for rank in two_ranks:
        assert rank["losses"] == pytest.approx(joint, rel=1e-5, abs=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert two_ranks[0]["losses"] == two_ranks[1]["losses"]
    assert two_ranks[0]["devices"] == 2


@pytest.mark.inductor
def test_a_big_tables_rows_are_gathered_and_the_rest_goes_in_buckets(two_ranks: list[dict[str, Any]]) -> None:
    notes = two_ranks[0]["notes"]["communication"]
    assert notes["ranks"] == 2
    assert notes["gathered by rows"] == ["table.weight"]
    assert len(notes["buckets"]) > 1
    trained = sum(p.numel() * 4 for name, p in ranks_child.Model().named_parameters() if "frozen" not in name)
    assert sum(notes["buckets"]) == trained - ranks_child.ROWS * ranks_child.DIM * 4
    assert (
        "sparse"
        in two_ranks[0]["notes"]["sparse_embedding"]["parameter:table.weight, optimizer:tables/sum/table.weight"]
    )


@pytest.mark.inductor
def test_a_bucket_starts_before_the_backward_pass_ends_and_is_waited_for_after(two_ranks: list[dict[str, Any]]) -> None:
    lines = two_ranks[0]["graph"].splitlines()
    started = [index for index, line in enumerate(lines) if re.search(r"_c10d_functional\.all_reduce\.default\(", line)]
    waited = [index for index, line in enumerate(lines) if "wait_tensor.default(" in line]
    assert len(started) == len(two_ranks[0]["notes"]["communication"]["buckets"]) + 1  # and the loss
    products = [index for index, line in enumerate(lines) if "aten.mm.default(" in line]
    assert started[0] < products[-1] < waited[0]  # something is computed while the first bucket travels


@pytest.mark.inductor
def test_a_rank_that_dies_leaves_the_other_with_an_error_in_time(tmp_path: Path) -> None:
    (survivor, said), (gone, _) = finish(start(tmp_path, "2"), 400)
    assert gone == 9
    assert survivor not in (0, 9), said[-2000:]


def test_without_a_process_group_the_strategy_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompileError, match="needs a process group"):
        StepCompiler(ranks_child.step, model, optimizer, backend="inductor", strategies=[Communication()])
    with pytest.raises(CompileError, match="xla backend does not take"):
        StepCompiler(ranks_child.step, model, optimizer, backend="xla", strategies=["communication"])
