"""Scores of a whole evaluation are those of one process, bit for bit, however its examples were divided."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.metrics import BinaryMetrics
from twinstep.worker.data.order import HostShare
from twinstep.worker.train.stop import StopSignal

CHILD = Path(__file__).with_name("gloo_child.py")
examples = st.lists(
    st.tuples(st.integers(-9, 9).map(lambda x: x / 4), st.integers(0, 1), st.sampled_from([0.0, 1.0, 1.0, 2.0])),
    max_size=60,
)


def collected(rows: list[tuple[float, int, float]]) -> BinaryMetrics:
    metrics = BinaryMetrics()
    metrics.update(*np.array(rows, dtype=float).reshape(-1, 3).T)
    return metrics


@given(examples, st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_merged_scores_are_scikit_learns_of_all_examples(
    rows: list[tuple[float, int, float]], owner: list[int]
) -> None:
    parts = [[row for row, who in zip(rows, owner, strict=False) if who == part] for part in range(4)]
    first, *others = [collected(part) for part in parts]
    first.merge(each.collected() for each in others)
    found = first.compute()
    assert found == collected(rows).compute(), "the order in which examples come must not show"
    logit, label, weight = np.array([row for row in rows if row[2]], dtype=float).reshape(-1, 3).T
    assert found.examples == len(logit)
    if len(set(label)) < 2:
        assert found.auc is None
        assert found.undefined == (f"all labels are {int(label[0])}" if len(label) else "no examples")
        return
    assert found.auc == pytest.approx(roc_auc_score(label, logit, sample_weight=weight), abs=1e-12)
    expected = log_loss(label, 1 / (1 + np.exp(-logit)), sample_weight=weight)
    assert found.log_loss == pytest.approx(expected, rel=1e-9)
    assert found.undefined is None


def test_infinite_logits_keep_their_rank_and_nan_is_said() -> None:
    rows = [(float("inf"), 1, 1.0), (1e9, 0, 1.0), (float("-inf"), 0, 1.0)]
    assert collected(rows).compute().auc == 1.0
    assert collected([*rows, (float("nan"), 1, 1.0)]).compute().undefined == "a logit is NaN"


@pytest.fixture(scope="module")
def child() -> ModuleType:
    """What the processes run, as a module here: one process alone is what they are held to."""
    found = importlib.util.spec_from_file_location("gloo_child", CHILD)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", ["scored", "one_class", "stopped"])
def test_two_processes_come_to_the_scores_of_one(case: str, child: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(CHILD)]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store"), case], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        answers = [json.loads(each.communicate(timeout=240)[0].splitlines()[-1]) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    if case == "stopped":
        assert answers == [None, None]
        return
    dataset = load_dataset(child.SPEC)
    assert isinstance(dataset, Dataset)
    if case == "one_class":
        dataset.labels[:] = 1
    alone = child.scores(dataset, share=HostShare(), stop=StopSignal())
    assert answers == [alone, alone]
    assert alone["examples"] == int(dataset.held_out.sum())
    assert ("auc undefined: all labels are 1" in alone["words"]) == (case == "one_class")
    assert (alone["values"]["auc"] is None) == (case == "one_class")
