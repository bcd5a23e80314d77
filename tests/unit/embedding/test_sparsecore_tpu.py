"""Lookups and updates through the real TPU compiler, what lowers, where it runs, what memory it takes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twinstep.preflight.engines import UPDATE_COPIES
from twinstep.spec.sparsecore import GENERATIONS, SparseCoreFlags, libtpu_arguments
from twinstep.spec.sparsecore_memory import StackShape, device_bytes
from twinstep.spec.topology import TPUS
from twinstep.worker.compile.aot import ENVIRONMENT

HERE = Path(__file__).parent
CASES = ("adagrad", "adam_minibatches", "packed_sgd", "rowwise", "ftrl_quantized")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_tpu_embedding") is None, reason="jax-tpu-embedding is not installed"
    ),
]


def compiled(topology: str, per_device: int, *cases: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    paths = [str(HERE.parents[2]), str(HERE.parents[1] / "stand_ins")]
    environment = {**os.environ, **ENVIRONMENT, "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, str(HERE / "sparsecore_tpu_child.py"), topology, str(per_device), *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


def found(run: subprocess.CompletedProcess[str]) -> Any:
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(line) for line in run.stdout.splitlines())


LARGE = {"dim": 64, "samples": 128, "max_ids": 64, "max_unique": 64, "rows": 400_000}


def test_every_way_of_updating_compiles_for_v5p_and_tables_are_updated_in_place() -> None:
    large = {kind: json.dumps({**LARGE, "kind": kind}) for kind in ("adagrad", "rowwise")}
    report = found(compiled("v5p:2x2x1", 4, *CASES, *large.values()))
    in_lanes = LARGE["rows"] // 4 * 128 * 4
    assert report.pop(large["adagrad"])["backward"]["temp"] < 0.1 * in_lanes
    # What preflight counts beside: rows that may be named, in whole lanes; no copy of a table, nor of its sums.
    of_rows = UPDATE_COPIES * 16 * 4 * LARGE["max_unique"] * 128 * 4
    assert report.pop(large["rowwise"])["backward"]["temp"] < of_rows < 0.3 * in_lanes
    assert set(report) == set(CASES)
    for case in report.values():
        assert case["forward"]["on_sparsecores"]
        assert case["backward"]["on_sparsecores"]
        # Donated tables come back where they were: no copy of a table's size.
        assert case["backward"]["alias"] >= case["backward"]["tables"]
    assert report["packed_sgd"]["stacks"] == [[16, 5]]


GRID: tuple[dict[str, Any], ...] = (
    {"dim": 16, "samples": 128, "max_ids": 64, "max_unique": 64},
    {"dim": 64, "samples": 512, "max_ids": 256, "max_unique": 256},
    {"dim": 40, "samples": 512, "max_ids": 1024, "max_unique": 1024, "rows": 400_000, "kind": "adam"},
)


@pytest.mark.parametrize(
    ("topology", "generation", "devices"), [("v5p:2x2x1", "v5p", 4), ("v6e:2x2", "v6e", 4), ("tpu7x:2x2x1", "v7x", 8)]
)
def test_the_memory_model_holds_against_the_compiler(topology: str, generation: Any, devices: int) -> None:
    cores = TPUS[generation].sparse_cores_per_device
    flags = libtpu_arguments(SparseCoreFlags(detect_nan=True, serialized_tables=1)) if generation == "v6e" else ""
    grid = GRID if generation == "v5p" else GRID[1:]
    report = found(compiled(topology, cores, *map(json.dumps, grid), flags=flags))
    for case in grid:
        there = report[json.dumps(case)]
        shape = StackShape(
            rows=case.get("rows", 20_000),
            slots=2 if "kind" in case else 0,
            width=case["dim"],
            samples_per_core=case["samples"],
            max_ids=case["max_ids"],
            max_unique=case["max_unique"],
            devices=devices,
        )
        ours = device_bytes(generation, [shape])
        assert ours.tables == there["forward"]["tables"]
        assert 0 <= ours.forward - there["forward"]["temp"] <= ours.margin
        assert 0 <= ours.backward - there["backward"]["temp"] <= ours.margin
        # A copy of a table beside the rest would show.
        assert there["forward"]["temp"] < there["forward"]["tables"] * 1.2
        assert ours.fits_tile


def test_one_table_has_the_sparse_cores_that_their_software_knows() -> None:
    from jax._src.pallas.mosaic.tpu_info import ChipVersion
    from jax._src.pallas.mosaic.tpu_info import get_tpu_info_for_chip as facts_of
    from jax_tpu_embedding.sparsecore.utils.utils import NUM_SC_PER_DEVICE_MAP

    theirs = {"v5p": "TPU v5", "v6e": "TPU v6 lite", "v7x": "TPU7x"}
    assert {name: TPUS[name].sparse_cores_per_device for name in theirs} == {
        name: NUM_SC_PER_DEVICE_MAP[kind] for name, kind in theirs.items()
    }
    assert set(GENERATIONS) == set(theirs)
    assert not any("v4" in kind for kind in NUM_SC_PER_DEVICE_MAP)
    assert facts_of(ChipVersion.TPU_V4, 1).sparse_core is None


def test_nobody_can_program_the_sparse_cores_of_a_v4() -> None:
    run = compiled("v4:2x2x1", TPUS["v4"].sparse_cores_per_device, "packed_sgd")
    assert run.returncode != 0
    assert "mixed device type computations" in run.stderr


def test_a_flag_that_libtpu_does_not_know_is_noticed() -> None:
    assert compiled("v6e:2x2", 2, "packed_sgd", flags="--xla_sc_no_such_flag=true").returncode != 0
