"""Scores by window: those of the window's examples and no others, exact however they are divided."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from twinstep.spec.parse import validate_spec
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.events import DataSchema, TaskSchema
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.squared_error import RegressionMetrics
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.scores import TaskMetrics, Window
from twinstep.worker.train.stop import StopSignal

SPEC: dict[str, Any] = {
    "name": "t",
    "model": {
        "embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 3},
    "compile": {"backend": "eager", "cache": False},
}  # fmt: skip
NUMBERS = st.floats(-1e6, 1e6, width=32)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, st.sampled_from([0.0, 1.0, 0.25])), max_size=30)


def sums(rows: list[tuple[float, float, float]]) -> RegressionMetrics:
    metrics = RegressionMetrics()
    metrics.update(*np.array(rows, dtype=float).reshape(-1, 3).T)
    return metrics


@given(ROWS, st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_a_mean_squared_error_is_exact_and_the_same_bits_however_divided(
    rows: list[tuple[float, float, float]], owner: list[int]
) -> None:
    parts = [sums([row for row, who in zip(rows, owner, strict=False) if who == part]) for part in range(3)]
    parts[0].merge(each.collected() for each in parts[1:])
    found = parts[0].compute()
    assert found == sums(rows).compute() == sums(rows[::-1]).compute()
    kept = [row for row in rows if row[2]]
    assert found.examples == len(kept)
    if not kept:
        assert found.mse is None
        assert found.undefined == "no examples"
        return
    errors = [Fraction(w * (p - y) ** 2) for p, y, w in kept]
    assert found.mse == float(sum(errors) / sum(Fraction(w) for _, _, w in kept))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_a_prediction_that_is_no_finite_number_has_no_mean(bad: float) -> None:
    found = sums([(1.0, 0.0, 1.0), (bad, 0.0, 1.0)]).compute()
    assert (found.mse, found.finite, found.undefined) == (None, False, "a prediction is no finite number")
    assert sums([(1.0, 0.0, 1.0), (bad, 0.0, 0.0)]).compute().mse == 1.0


class Notes:
    """A reporter that keeps metrics."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, dict[str, float | None]]] = []

    def metric(self, step: int, values: dict[str, float | None]) -> None:
        found = {name: value for name, value in values.items() if name.startswith("window/")}
        if found:
            self.windows.append((step, found))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_a_run_scores_each_window_of_its_training_batches_and_nothing_else() -> None:
    spec = validate_spec({**SPEC, "train": {"steps": 11, "window_steps": 4, "eval_batches": 1, "log_every": 7}})
    notes = Notes()
    trainer = Trainer(spec, reporter=notes, view=ProgressView(None, 1), stop=StopSignal(), run_dir=None)
    seen: list[tuple[torch.Tensor, Any]] = []
    compiler: Any = trainer._stepper._compiler  # type: ignore[attr-defined]
    program = compiler.program

    def watched(batch: Any, **sizes: Any) -> Any:
        step = program(batch, **sizes)

        def run(given: Any) -> Any:
            output = step(given)
            seen.append((output.logits.clone(), given))
            return output

        return run

    compiler.program = watched
    assert trainer.train() is not None
    assert [step for step, _ in notes.windows] == [4, 8]
    for (_, found), part in zip(notes.windows, (seen[:4], seen[4:8]), strict=True):
        kept = [batch.weights[0] > 0 for _, batch in part]
        logit = np.concatenate([logits[0][real].numpy() for (logits, _), real in zip(part, kept, strict=True)]).astype(
            float
        )
        label = np.concatenate([batch.labels[0][real].numpy() for (_, batch), real in zip(part, kept, strict=True)])
        assert found["window/auc"] == pytest.approx(roc_auc_score(label, logit), abs=1e-12)
        assert found["window/log_loss"] == pytest.approx(log_loss(label, 1 / (1 + np.exp(-logit))), rel=1e-9)


def test_tasks_have_their_own_scores_and_one_class_has_no_auc_by_name() -> None:
    spec = validate_spec(SPEC)
    dataset = load_dataset(spec.data)
    batch, _ = Loader(dataset, spec.data, seed=0).train_batch(0)
    schema = DataSchema(
        tables=(), contextual=(), item_features=dataset.schema.item_features, action_bits=1,
        tasks=(TaskSchema(name="liked"), TaskSchema(name="watched", kind="regression")),
    )  # fmt: skip
    two = batch._replace(
        labels=torch.cat((torch.ones_like(batch.labels), batch.labels + 3)), weights=batch.weights.repeat(2, 1, 1)
    )
    logits = torch.stack((batch.labels[0], torch.full_like(batch.labels[0], 3.0)))
    logits[1][batch.weights[0] == 0] = float("nan")  # of no meaning there
    metrics = TaskMetrics(schema)
    metrics.update(logits, two)
    scores = metrics.compute()
    labels = batch.labels[0][batch.weights[0] > 0]
    assert scores.values()["mse/watched"] == pytest.approx(float((labels**2).mean()))
    assert scores.values()["auc"] is None
    assert "auc undefined: all labels are 1" in scores.words()
    window = Window(schema, 2)
    assert window.add(logits, two, step=5) == {}
    assert window.add(logits, two, step=6)["window/mse/watched"] == scores.values()["mse/watched"]
    assert Window(schema, 0).add(logits, two, step=2) == {}
