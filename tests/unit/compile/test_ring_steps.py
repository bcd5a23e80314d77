"""Whole steps whose tables go around a ring of CPU devices: eager PyTorch's numbers, rows split, bad input refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from twinstep.spec.errors import SpecError
from twinstep.spec.job import CompileSpec
from twinstep.spec.parse import validate_spec
from twinstep.spec.placement import Mesh, Placed, place
from twinstep.worker.compile.lower.ring_on import RingOn
from twinstep.worker.compile.strategies import RingEmbedding, resolve
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.train.asked import strategies_of

pytestmark = pytest.mark.timeout(960)
CHILD = Path(__file__).with_name("ring_step_child.py")
QUICK = ("small/8/sgd/0", "small/4/adagrad/3", "small/8/rowwise_adagrad/0", "small/4/adam/0", "small/4/adam/3")
KERNEL = "kernel/2/adagrad"
PLAIN = "plain/4/rowwise_adagrad"
SPECS = ("dlrmv3/4/rowwise_adagrad", "dlrm/8/adagrad")
# DLRMv3 takes no element-wise Adagrad: its first update of a gradient near 0 is the sign of rounding, times the rate.
MORE = ("own/4/rowwise_adagrad", "dlrmv3/8/rowwise_adagrad", "dlrm/4/sgd", "dlrmv3/4/sgd", "dlrm/8/rowwise_adagrad")


def run(*cases: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "16",  # interpreted kernels wait for each other on threads of a pool of this size
        "PYTHONPATH": str(CHILD.parents[3]),
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), *cases], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run(*QUICK, *SPECS, KERNEL, PLAIN)


def holds(case: dict[str, Any]) -> None:
    assert case["outputs"] <= 5e-5
    assert case["state"] <= 2e-5
    assert set(case["tables"]) == set(case["split"]), "every table is split by rows, and nothing else"
    assert case["permutes"] >= 2


@pytest.mark.parametrize("name", [each for each in QUICK if not each.endswith("adam/3")])
def test_steps_around_a_ring_are_eager_steps(found: dict[str, Any], name: str) -> None:
    holds(found[name])


@pytest.mark.parametrize("name", SPECS)
def test_a_specs_step_around_a_ring_is_its_eager_step(found: dict[str, Any], name: str) -> None:
    holds(found[name])
    assert "looked up and updated around the ring" in found[name]["explained"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_specs_steps_around_a_ring_are_eager_steps(name: str) -> None:
    holds(run(name)[name])


def test_a_module_of_its_own_tables_alone_trains_where_a_spec_has_a_ring(found: dict[str, Any]) -> None:
    case = found[PLAIN]
    assert case["outputs"] <= 5e-5
    assert case["state"] <= 2e-5
    assert case["split"] == [], "an nn.Embedding outside of a collection is a parameter like any other"


def test_a_step_whose_rows_are_lines_looks_them_up_by_the_kernel(found: dict[str, Any]) -> None:
    assert found[KERNEL]["kernels"] == 1
    assert found[KERNEL]["lines"] == 2, "the table of 64 columns, and what Adagrad keeps of it"
    holds(found[KERNEL])


def test_tables_are_updated_where_they_are(found: dict[str, Any]) -> None:
    assert found["small/8/sgd/0"]["explained"].count("looked up and updated around the ring") == 2
    assert "looked up around the ring, all rows updated on their devices" in found["small/4/adam/0"]["explained"]


def test_a_table_that_cannot_be_split_is_refused_with_what_would_do(found: dict[str, Any]) -> None:
    said = found["small/4/adam/3"]["refused"]
    assert "table_too.weight cannot be passed around a ring: 4 devices do not divide its 43 rows" in said
    assert "give it 44 rows" in said


def test_a_table_in_a_ring_is_split_whatever_its_size() -> None:
    small = Placed(name="t", role="table", shape=(6, 8), itemsize=4, by_rows=True, ring=True)
    kept = Placed(name="o/sum/t", role="optimizer", shape=(6, 1), itemsize=4, of="t", by_rows=True)
    found = place((small, kept), Mesh.of({"data": 8}))
    assert found.specs == (("data", None), ("data", None))
    assert found.extra == (2, 2)


class Named(nn.Module):
    """A collection, and a plain layer whose parameters are called as a table's are."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection({"type": (6, 8), "items[0]": (6, 8)})
        self.embeddings = nn.ModuleList([nn.Linear(8, 6)])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_ring_is_for_the_tables_of_a_model_and_for_no_layer_of_such_a_name(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(Named())
    ring = resolve(strategies_of(CompileSpec(), "ring", model))["ring_embedding"]
    assert isinstance(ring, RingEmbedding)
    tables = {"0.tables.embeddings.type~.weight", "0.tables.embeddings.items[0].weight"}
    assert {name for name, _ in model.named_parameters() if ring.names(name)} == tables


def test_a_ring_of_a_model_without_tables_names_none() -> None:
    found = resolve(strategies_of(CompileSpec(), "ring", nn.Linear(2, 2)))
    assert found["ring_embedding"] == RingEmbedding(parameters=())


def test_on_a_tpu_kernels_take_rows_of_whole_words_alone() -> None:
    """Of a bfloat16 table no row can be named by itself: the compiler copied the whole table for them."""
    state = [torch.empty(8, width, dtype=torch.bfloat16) for width in (128, 64)] + [torch.empty(8, 64)]
    slots = [SimpleNamespace(role="parameter", name=f"t{number}") for number in range(3)]
    context = SimpleNamespace(strategy=lambda _: RingEmbedding(parameters=("t*",)), slots=slots)
    captured: Any = SimpleNamespace(context=context, num_state=3, example=state)
    chips = np.array([SimpleNamespace(platform="tpu")] * 4)
    mesh: Any = SimpleNamespace(size=4, axis_names=("data",), devices=chips)
    on = RingOn.of(captured, mesh, [("data", None)] * 3, (False, True, True))
    assert on is not None
    assert (on.by_rows, on.one_line, on.lined) == ({0, 1, 2}, {2}, {2})


def test_a_ring_always_has_row_updates() -> None:
    for given in (CompileSpec(), CompileSpec(strategies=()), CompileSpec(strategies=("sparse_embedding",))):
        assert {"sparse_embedding", "ring_embedding"} <= set(resolve(strategies_of(given, "ring", Named())))
    assert strategies_of(CompileSpec(), "dense") is None
    assert RingEmbedding(parameters=("*.weight",)).names("a.weight")
    assert not RingEmbedding(parameters=("*.weight",)).names("a.bias")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"compile": {"backend": "inductor"}, "accelerator": {"kind": "cpu", "devices": 1}}, "compile.backend: xla"),
        ({"compile": {"backend": "xla"}}, "needs devices to pass rows to"),
        ({"accelerator": {"kind": "gpu", "model": "h100", "count": 8}}, "compile.backend: xla"),
    ],
)
def test_a_spec_without_a_ring_of_devices_is_refused_by_field(more: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec({"name": "a", "embedding": {"engine": "ring"}, **more})
    (fault,) = caught.value.faults
    assert fault.field == "embedding.engine"
    assert says in fault.problem + str(fault.remedy)
    assert fault.remedy is not None
    assert "dense" in fault.remedy
