"""One step over eight devices: the same numbers, tables split by rows, refusals before anything is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twinstep.spec.errors import CompileError
from twinstep.spec.placement import Mesh, Placed, place

CHILD = Path(__file__).with_name("mesh_child.py")
TABLE = Placed(name="t", role="table", shape=(64, 8), itemsize=4)
STATE = Placed(name="o/sum/t", role="optimizer", shape=(64, 8), itemsize=4, of="t")
ROW_SUMS = Placed(name="o/row/t", role="optimizer", shape=(64,), itemsize=4, of="t")
COUNT = Placed(name="o/step/t", role="optimizer", shape=(), itemsize=4, of="t")
DENSE = Placed(name="w", role="parameter", shape=(64, 64), itemsize=4)
LEAF = Placed(name="ids", role="batch", shape=(2, 16), itemsize=8, batch_dim=1)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(CHILD)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_eight_devices_give_one_devices_numbers(found: dict[str, Any]) -> None:
    assert found["outputs"] <= 1e-5
    assert found["state"] <= 1e-5


def test_tables_and_their_state_are_split_by_rows_and_never_gathered(found: dict[str, Any]) -> None:
    assert found["specs"]["table.weight"] == "P('data', None)"
    assert found["specs"]["tables/sum/table.weight"] == "P('data', None)"
    sizes = {kind: [shape.split(",") for _, shape, what in found["collectives"] if what == kind] for kind in
             {what for *_, what in found["collectives"]}}  # fmt: skip
    assert found["collectives"], "a split batch needs some"
    assert not any("4096" in shape for shapes in sizes.values() for shape in shapes), sizes


def test_what_an_optimizer_keeps_of_a_whole_parameter_is_split_and_the_parameter_is_not(found: dict[str, Any]) -> None:
    assert found["specs"]["dense/exp_avg/body.0.weight"] == found["specs"]["dense/exp_avg_sq/body.0.weight"]
    assert found["specs"]["dense/exp_avg/body.0.weight"] == "P('data', None)"
    small = ("body.0.weight", "dense/exp_avg/body.0.bias", "dense/exp_avg/body.3.weight", "dense/step/body.0.weight")
    assert not any("data" in found["specs"][name] for name in small)


def test_rows_that_do_not_divide_are_padded_and_explain_says_so(found: dict[str, Any]) -> None:
    assert found["specs"]["odd.weight"] == "P('data', None)"
    assert found["specs"]["tables/sum/odd.weight"] == "P('data', None)"
    assert found["rows"]["odd.weight"] == found["rows"]["tables/sum/odd.weight"] == 4104
    assert "odd.weight is padded by 7 rows, so that 8 divide them" in found["explained"]
    assert "placement on data 8" in found["explained"]
    assert "all-reduce (sum)" in found["explained"]


def test_a_table_that_is_read_whole_is_not_padded_and_explain_says_so(found: dict[str, Any]) -> None:
    assert found["specs"]["read_whole.weight"] in ("P(None, None)", "P()")
    assert found["rows"]["read_whole.weight"] == 4095
    assert "read_whole.weight is on every device: 4095 rows do not divide by 8" in found["explained"]


def test_a_step_that_reads_a_padded_table_whole_sees_no_row_that_was_added(found: dict[str, Any]) -> None:
    assert found["other_program"] <= 1e-5


def test_what_a_mesh_cannot_do_is_refused_before_anything_changes(found: dict[str, Any]) -> None:
    assert "the mesh does not divide the batch: ['ids'] has 12" in found["uneven"]
    assert found["unchanged"]
    assert "has 16 devices, JAX sees 8" in found["too_many"]


def test_state_that_is_gone_is_refused_instead_of_crashing_the_process(found: dict[str, Any]) -> None:
    assert "the state on the device went with a step that failed" in found["gone"]
    assert found["goes_on"]


def test_the_mesh_is_part_of_the_key(found: dict[str, Any]) -> None:
    assert found["key"]["data"] == "8"
    assert found["key"]["batch dimensions"] == "leading"


def test_placement_splits_a_table_and_what_is_kept_of_each_row() -> None:
    mesh = Mesh.of({"data": 8}, shard_bytes=1)
    specs = place((TABLE, STATE, ROW_SUMS, COUNT, DENSE, LEAF), mesh).specs
    assert specs == (("data", None), ("data", None), ("data",), (), (None, None), (None, "data"))


def test_placement_over_two_axes_splits_rows_over_both_and_the_batch_over_data() -> None:
    mesh = Mesh.of({"slice": 2, "data": 4}, shard_bytes=1)
    specs = place((TABLE, LEAF), mesh).specs
    assert specs == ((("slice", "data"), None), (None, "data"))


def test_a_small_table_is_on_every_device_and_so_is_what_an_optimizer_keeps_of_it() -> None:
    mesh = Mesh.of({"data": 8}, state_bytes=1)
    assert place((TABLE, STATE), mesh).specs == ((None, None), (None, None))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 64), ("data", None)),
        ((3, 64), (None, "data")),
        ((3, 5), (None, None)),
        ((0, 64), (None, "data")),
        ((64,), ("data",)),
        ((), ()),
    ],
)
def test_what_an_optimizer_keeps_of_a_parameter_is_split_where_the_devices_divide_it(
    shape: tuple[int, ...], spec: tuple[str | None, ...]
) -> None:
    weight = Placed(name="w", role="parameter", shape=shape, itemsize=4)
    kept = Placed(name="o/exp_avg/w", role="optimizer", shape=shape, itemsize=4, of="w")
    whole = (None,) * len(shape)
    assert place((weight, kept), Mesh.of({"data": 8}, state_bytes=0)).specs == (whole, spec)
    assert place((weight, kept), Mesh.of({"data": 1}, state_bytes=0)).specs == (whole, whole)
    assert place((weight, kept), Mesh.of({"data": 8})).specs == (whole, whole)  # too small to be worth it


@pytest.mark.parametrize("axes", [{}, {"data": 0}])
def test_a_mesh_without_devices_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(CompileError, match="a mesh needs axes"):
        Mesh.of(axes)
