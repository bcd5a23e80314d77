"""Steps captured for a GPU that is not here, on fake tensors of a device that stands for it.

What this shows: a whole step of either model, forward to update, mixes no devices; attention stays one node, for
Triton's kernel; which updates run as fused kernels; and that Inductor is given nothing to compute on the host. Not that
a GPU runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from twinstep.worker.compile.lower import fused_updates
from twinstep.worker.compile.passes import fused_attention
from twinstep.worker.ops import rows

CHILD, ROOT = Path(__file__).parent / "gpu_child.py", Path(__file__).parents[3]


def captured(case: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHILD), case],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("case", "attention"), [("dlrmv3", 4), pytest.param("dlrm", 0, marks=pytest.mark.slow)])
def test_a_step_for_a_gpu_computes_all_of_it_there(case: str, attention: int) -> None:
    found = captured(case)
    assert found["attention"] == attention, found["attention note"]
    assert found["rows"], "large tables get row updates"
    assert found["fused"] == ["adam"], found["left"]
    for piece in found["computed"]:
        assert set(piece) <= {"pretend"}, f"a kernel for the host in the midst of a GPU's step: {piece['cpu']}"


@pytest.mark.parametrize(
    ("devices", "triton", "lacks"),
    [
        ({"cuda"}, True, ""),
        ({"cuda"}, False, "the kernel needs Triton, which is not installed"),
        ({"cuda", "cpu"}, True, "there is no kernel for cuda"),
        ({"xpu"}, True, "there is no kernel for xpu"),
    ],
)
def test_attention_is_plain_where_there_is_no_kernel_and_says_why(
    devices: set[str], triton: bool, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    assert fused_attention._lacks(devices) == lacks


@pytest.mark.slow
def test_an_optimizer_without_a_kernel_for_every_gpu_is_inductors() -> None:
    found = captured("dlrm with adagrad")
    assert found["fused"] == ["adam"]
    assert any("has no fused kernel for pretend" in why for why in found["left"]), found["left"]


def test_step_counts_are_where_the_kernel_reads_them() -> None:
    """On the host they are taken as they are, and written in place; a device elsewhere gets copies of its own."""
    steps = [torch.tensor(4.0), torch.tensor(7.0)]
    assert fused_updates._beside(torch.zeros(3), steps) is steps
    there = fused_updates._beside(torch.zeros(3, device="meta"), steps)
    assert [(each.device.type, each.shape) for each in there] == [("meta", ()), ("meta", ())]


@pytest.mark.parametrize("ids", [[3, 1, 3], [9, 9, 12], [0, 8, 9], []])
def test_rows_are_written_without_a_count_whatever_is_named(ids: list[int]) -> None:
    """As on a device that a count would be waited for; a row past the table's end would end a CUDA process."""
    table = torch.arange(9.0 * 2).view(9, 2)
    slots, _, _ = rows.unique_rows(torch.tensor(ids, dtype=torch.int64), 9)
    values = torch.randn(len(ids), 2)
    want = table.clone()
    for slot, value in zip(slots.tolist(), values, strict=True):
        if slot < 9:
            want[slot] = value
    rows._write_without_count(table, slots, values)
    assert torch.equal(table, want)
