"""A run that moves from 4 devices to 8 and back: the same samples, the same numbers, tables cut anew, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinstep.worker.compile.key import CompileKey, reason_after, told

CHILD, ROOT = Path(__file__).parent / "resize_child.py", Path(__file__).parents[3]


@pytest.mark.timeout(900)
def test_a_run_that_moves_from_4_devices_to_8_and_back_is_the_run_that_stayed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    straight, *moved = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert [sorted(map(int, each["losses"])) for each in moved] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    samples = [sample for each in moved for sample in each["samples"]]
    assert samples == straight["samples"], "in the same order, none twice and none left out"
    assert len(set(samples)) == 12
    losses = {step: loss for each in moved for step, loss in each["losses"].items()}
    assert losses == pytest.approx(straight["losses"], rel=1e-5)
    assert [each["pieces"] for each in moved] == [4, 8, 4], "the plan is that of the devices"
    compiles = [[said for name, said in each["events"] if name in ("compiled", "recompiled")] for each in moved]
    assert [len(each) for each in compiles] == [1, 1, 1]
    assert [each[0].split(":")[0] for each in compiles] == ["first compile", "devices 4 → 8", "devices 8 → 4"]
    assert [[name for name, _ in each["events"] if name == "resumed"] for each in moved] == [
        [],
        ["resumed"],
        ["resumed"],
    ]


def key_of(**changes: object) -> CompileKey:
    fields: dict[str, object] = dict.fromkeys(("state", "batch", "hyperparameters", "modules", "ambient", "around"), ())
    fields |= {"structure": "", "backend": "xla", "step": "", "threads": 2, "strategies": ("a",), "mesh": ()}
    fields |= {"sizes": (("batch_size", 4),), "devices": 4, "versions": (("jax", "1"),)}
    return CompileKey(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "first compile"),
        ({"devices": 8, "mesh": (("data", "8"),)}, "devices 4 → 8"),
        ({"sizes": (("batch_size", 8),), "devices": 8}, "batch_size 4 → 8"),
        ({"backend": "inductor", "versions": (("torch", "2"),)}, "backend xla → inductor"),
        ({"versions": (("jax", "2"),)}, "jax 1 → 2"),
        ({"step": "changed"}, "first compile"),  # not told: a digest says nothing to anybody
    ],
)
def test_a_run_that_goes_on_says_what_its_program_was_made_for_before(changes: dict[str, object], why: str) -> None:
    before = json.loads(json.dumps(told(key_of())))  # as a checkpoint has it
    assert reason_after(before, key_of(**changes)) == why
    assert reason_after({}, key_of(**changes)) == "first compile"
    assert reason_after({"devices": "many"}, key_of(**changes)) == "first compile", "another version's"
