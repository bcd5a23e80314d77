"""The parts of the GPU script, on a CPU and tiny: that they run, count and compare. No number here is of use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from twinstep.worker.ops import hstu_attention

ROOT = Path(__file__).parents[3]


def test_facts_say_what_is_installed_and_the_ceilings() -> None:
    found = gpu.facts("cpu", "tiny")
    assert found["versions"]["torch"] == torch.__version__.split("+")[0] or found["versions"]["torch"] is not None
    assert all(rate > 0 for each in found["ceilings"].values() for rate in each.values())
    assert json.loads(json.dumps(found)) == found


def test_attention_is_held_to_the_reference_and_its_roofline() -> None:
    found = gpu.attention("cpu", "tiny")
    assert found["equal"]
    for each in found["batches"]:
        assert len(each["gaps"]) == 4
        assert each["forward"]["share_of_roofline"] > 0
        assert each["blocks"] == {}, "other cuts are tried on a GPU alone"


def test_attention_that_is_wrong_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hstu_attention.reference
    monkeypatch.setattr(hstu_attention, "reference", lambda *inputs: right(*inputs) * 1.1)
    assert not gpu.attention("cpu", "tiny")["equal"]


def test_work_counts_the_pairs_that_are_seen() -> None:
    rows = gpu.Rows(batch=2, prefix=3, num_targets=1, heads=2, width=8)
    rest = (torch.tensor([1, 3]), torch.tensor([1, 1]), torch.tensor(4.0))
    # Causal, a target sees itself and the prefix: 1 + 2 pairs, and 1 + 2 + 3 + 4.
    forward, backward = (gpu._work(rows, rest, torch.float32)[name] for name in ("forward", "backward"))
    assert forward == (2 * 2.0 * 13 * 2 * 8, 4.0 * 6 * 2 * 8 * 4)
    assert backward == (5 * 2.0 * 13 * 2 * 8, 7.0 * 6 * 2 * 8 * 4)


def test_without_a_gpu_the_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert gpu.main(["facts"]) == 1
    assert "DEVICE=cpu" in capsys.readouterr().err


@pytest.mark.bench
@pytest.mark.inductor
@pytest.mark.timeout(1200)
def test_the_script_runs_every_part_and_writes_its_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "bench/gpu.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "SIZE": "tiny", "PATIENCE": "3"},
        capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in gpu.PARTS}
    assert all(each.get("equal", True) for each in found.values())
    assert set(found["step"]["variants"]) == set(gpu.VARIANTS)
    assert all(each["ms"] > 0 for each in found["step"]["variants"].values())
