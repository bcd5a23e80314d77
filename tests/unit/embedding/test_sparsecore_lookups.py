"""Lookups and updates over meshes of CPU devices, against numpy in float64; what must be the same bits, is.

The child looks at stacked tables of two widths, a packed narrow one, a quantized one; at mini-batches, sample blocks,
hot ids, empty bags; and moves tables from one mesh to the next, stacked to unstacked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MESHES = ("1x4", "8x1", "4x2", "3x2")
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # compiling is nearly all of the time
    "--xla_llvm_disable_expensive_passes=true",
)
SPLIT = MESHES[:2]  # mini-batches and sample blocks are looked at too

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(FLAGS),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "stand_ins")]),
    }
    run = subprocess.run(
        [sys.executable, str(HERE / "sparsecore_child.py"), ",".join(SPLIT), *MESHES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("mesh", MESHES)
def test_lookup_and_update_equal_numpy_and_leave_other_rows_alone(found: Any, mesh: str) -> None:
    here = found[mesh]
    assert here["activations"] < 1e-5
    assert max(here[name] for name in "abnq") < 2e-5
    assert here["untouched_keep_their_bits"]


@pytest.mark.parametrize("mesh", SPLIT)
def test_how_a_batch_was_split_changes_no_bit(found: Any, mesh: str) -> None:
    assert found[mesh]["minibatches_are_exact"]
    assert found[mesh]["blocks_are_exact"]


@pytest.mark.parametrize("mesh", MESHES)
def test_first_values_depend_on_no_plan(found: Any, mesh: str) -> None:
    assert found[mesh]["starts_alike"]


@pytest.mark.parametrize("mesh", SPLIT)
def test_processes_that_hold_a_part_each_read_the_same_rows(found: Any, mesh: str) -> None:
    assert found[mesh]["processes_read_the_same"]


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_tables_and_slots_move_between_meshes_and_stackings(found: Any, mesh: str) -> None:
    assert found[mesh]["moves"]
