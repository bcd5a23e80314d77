"""Two processes of HybridParallel against one process of the dense engine: losses, parameters, optimizer state, scores.

The processes are real and meet over gloo. The oracle is the plain model, which knows nothing of them.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import hybrid_child

from twinstep.spec.parse import validate_spec
from twinstep.worker.train.launch import launch

CHILD = Path(__file__).with_name("hybrid_child.py")
STEPS = 50
pytestmark = pytest.mark.timeout(1500)
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel", "auto")
DLRM: dict[str, Any] = {
    "name": "dlrm",
    "model": {"kind": "dlrm", "embedding_dim": 8, "bottom_dims": [16], "over_dims": [16], "interaction": "dot"},
    "data": {
        "dataset": "synthetic-clicks",
        "synthetic_events": 900,
        "batch_size": 30,
        "synthetic": {"table_rows": [70, 40, 5], "max_ids": 4, "dense": 3},
    },
}
DLRMV3: dict[str, Any] = {
    "name": "dlrmv3",
    "model": {
        "embedding_dim": 8, "transducer_dim": 8, "num_layers": 1, "num_heads": 2, "linear_dim": 4, "attention_dim": 4,
        "dropout": 0.0, "hidden_dim": 16,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 700, "batch_size": 6, "uih_len": 8, "num_candidates": 3},
}  # fmt: skip


def spec_of(base: dict[str, Any], **parts: Any) -> dict[str, Any]:
    spec = copy.deepcopy(base)
    spec |= {"compile": {"backend": "eager"}, "train": {"steps": STEPS, "lr_final": 0.1, **parts.pop("train", {})}}
    return spec | parts


def divided(spec: dict[str, Any], sharding: str, tables: list[str], **more: Any) -> dict[str, Any]:
    return spec | {"embedding": {"engine": "torchrec", "sharding": dict.fromkeys(tables, sharding), **more}}


def in_processes(folder: Path, specs: list[dict[str, Any]], processes: int = 2) -> list[dict[str, Any]]:
    out = folder / "found.pt"
    assert launch([sys.executable, str(CHILD), str(out), json.dumps(specs)], processes, say=print) == 0
    found: list[dict[str, Any]] = torch.load(out, weights_only=True)
    return found


def alone(spec: dict[str, Any]) -> dict[str, Any]:
    return hybrid_child.train(validate_spec(spec))


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance, abs=tolerance)
    assert found["examples"] == wanted["examples"]
    assert found["eval_examples"] == wanted["eval_examples"]
    assert found["scores"] == pytest.approx(wanted["scores"], abs=1e-3)  # two of 9,000 pairs may change places
    assert set(found["tensors"]) >= set(wanted["tensors"])  # it makes state of parameters that are never stepped too
    for path, value in wanted["tensors"].items():
        torch.testing.assert_close(found["tensors"][path], value, rtol=1e-4, atol=1e-4, msg=path)


TABLES = {"dlrm": ["cat_0", "cat_1", "cat_2"], "dlrmv3": ["item_id", "user_id"]}
ROWWISE = {"kind": "rowwise_adagrad", "lr": 0.05}
COLUMNS = {"dlrm": {"kind": "adagrad", "lr": 0.05}, "dlrmv3": {"kind": "sgd", "lr": 0.5}}
"""Optimizers of column-wise tables. Adagrad's first update of a value is its rate times its gradient's sign, so where
DLRMv3 has gradients that are zero but for rounding, no two orders of a sum agree."""


@pytest.mark.parametrize("base", [DLRM, DLRMV3], ids=lambda base: str(base["name"]))
def test_two_processes_learn_what_one_learns_however_tables_are_divided(base: dict[str, Any], tmp_path: Path) -> None:
    tables = TABLES[base["name"]]

    def spec(sparse: dict[str, Any]) -> dict[str, Any]:
        return spec_of(base, optimizers={"sparse": sparse}, train={"clip_norm": 0.5})

    usual, columns = spec(ROWWISE), spec(COLUMNS[base["name"]])
    cases = [divided(columns if kind == "column_wise" else usual, kind, tables) for kind in SHARDINGS]
    cases.append(divided(usual, "row_wise", tables, overlap=False))
    found = in_processes(tmp_path, cases)
    oracles = {"usual": alone(usual), "column_wise": alone(columns)}
    for case, result in zip(cases, found, strict=True):
        asked = case["embedding"]["sharding"]
        kinds = {name: "data_parallel" if kind == "auto" else kind for name, kind in asked.items()}  # they are small
        assert result["plans"] | kinds == result["plans"]
        assert_equal(result, oracles["column_wise" if "column_wise" in asked.values() else "usual"])
    assert found[1]["losses"] == found[-1]["losses"]  # overlap changes no bit


@pytest.mark.inductor
def test_the_compiled_dense_step_learns_the_same(tmp_path: Path) -> None:
    eager = spec_of(DLRM, optimizers={"sparse": ROWWISE}, train={"clip_norm": 0.5})
    compiled = eager | {"compile": {"backend": "inductor", "cache_dir": str(tmp_path / "cache")}}
    sharding = {"cat_0": "row_wise", "cat_1": "table_wise", "cat_2": "data_parallel"}
    case = compiled | {"embedding": {"engine": "torchrec", "sharding": sharding}}
    (found,) = in_processes(tmp_path, [case])
    assert found["plans"] == sharding
    assert_equal(found, alone(eager))
