"""The SparseCore engine in training: the dense engine's numbers, through stops and moves."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.spec.errors import DataError, SpecError
from twinstep.spec.parse import validate_spec
from twinstep.spec.report import RunSummary
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.saving import run_tensors
from twinstep.worker.train.stop import StopSignal

DLRMV3 = {
    "embedding_dim": 8, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
    "dropout": 0.0,
}  # fmt: skip
DLRM = {
    "kind": "dlrm",
    "embedding_dim": 8,
    "bottom_dims": [8],
    "over_dims": [8],
    "num_cross_layers": 1,
    "cross_rank": 4,
}
HISTORIES = {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 8, "uih_len": 8, "num_candidates": 2}
CLICKS = {
    "dataset": "synthetic-clicks", "synthetic_events": 800, "batch_size": 16,
    "synthetic": {"table_rows": [50, 300], "max_ids": 3},
}  # fmt: skip
CACHE = tempfile.TemporaryDirectory(prefix="twinstep-test-")


class Notes:
    def __init__(self, stop: StopSignal, at: int | None) -> None:
        self.losses: list[float] = []
        self.numbers: list[dict[str, Any]] = []
        self.events: list[tuple[str, str]] = []
        self._stop, self._at = stop, at

    def metric(self, step: int, values: Any) -> None:
        if "loss" in values:
            self.losses.append(values["loss"])
            self.numbers.append(dict(values))
            self._stop.asked = self._stop.asked or step == self._at

    def event(self, name: str, reason: str, data: Any = None) -> None:
        self.events.append((name, reason))

    def progress(self, *_: Any, **__: Any) -> None:
        pass

    def result(self, summary: RunSummary) -> None:
        pass

    def close(self) -> None:
        pass

    def of(self, name: str) -> list[str]:
        return [reason for each, reason in self.events if each == name]


class Run:
    def __init__(self, spec: dict[str, Any], *, stop_at: int | None = None) -> None:
        stop = StopSignal()
        self.notes = Notes(stop, stop_at)
        self.trainer = Trainer(
            validate_spec(spec), reporter=self.notes, view=ProgressView(None, 1), stop=stop, run_dir=None
        )
        try:
            self.summary = self.trainer.train()
            if self.summary is None:
                self.trainer.leave()
            trainer = self.trainer
            trainer._stepper.pull()
            self.state: dict[str, Tensor] = {
                path: tensor.clone()
                for path, tensor in run_tensors(
                    trainer.spec, trainer._model, trainer._optimizers, trainer._stepper
                ).items()
            }
        finally:
            self.trainer.close()


def spec_of(
    model: dict[str, Any] = DLRM,
    *,
    steps: int = 6,
    sparse: str = "rowwise_adagrad",
    path: Path | None = None,
    data: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **embedding: Any,
) -> dict[str, Any]:
    kind = HISTORIES if model is DLRMV3 else CLICKS
    return {
        "name": "t",
        "model": model,
        "data": {**kind, **(data or {})},
        "optimizers": {"dense": {"kind": "sgd", "lr": 0.05}, "sparse": {"kind": sparse, "lr": 0.05}},
        "accelerator": "cpu",
        "compile": {"backend": "xla", "cache_dir": CACHE.name},
        "embedding": {"engine": "sparsecore", **embedding},
        "train": {"steps": steps, "eval_batches": 2, **(train or {})},
        "checkpoint": {"path": None if path is None else str(path)},
    }


def assert_near(one: Run, other: Run, *, losses: float = 1e-5, values: float = 1e-4) -> None:
    assert one.notes.losses == pytest.approx(other.notes.losses, rel=losses)
    assert one.state.keys() == other.state.keys()
    for path, tensor in one.state.items():
        torch.testing.assert_close(tensor, other.state[path], rtol=values, atol=values, msg=path)


@pytest.mark.parametrize(
    ("model", "sparse"),
    [
        pytest.param(DLRM, "rowwise_adagrad", id="dlrm"),
        pytest.param(DLRMV3, "adagrad", id="dlrmv3", marks=pytest.mark.slow),
        pytest.param(DLRM, "sgd", id="dlrm-sgd", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_the_dense_engine(model: dict[str, Any], sparse: str) -> None:
    spec = spec_of(model, sparse=sparse, steps=20, train={"lr_final": 0.1})
    dense = Run({**spec, "embedding": {"engine": "dense"}})
    assert_near(Run(spec), dense)


def test_a_run_goes_on_bit_for_bit_and_moves_between_engines_and_stacks(tmp_path: Path) -> None:
    straight = Run(spec_of(sparse="adam"))
    first = Run(spec_of(sparse="adam", path=tmp_path), stop_at=3)
    assert first.summary is None
    second = Run(spec_of(sparse="adam", path=tmp_path))
    assert first.notes.losses + second.notes.losses == straight.notes.losses
    assert all(torch.equal(tensor, straight.state[path]) for path, tensor in second.state.items())

    there = tmp_path / "moving"
    straight = Run(spec_of())
    parts = [
        Run({**spec_of(path=there), "embedding": {"engine": "dense"}}, stop_at=2),
        Run(spec_of(path=there, disable_table_stacking=True), stop_at=4),
        Run(spec_of(path=there)),
    ]
    assert [loss for part in parts for loss in part.notes.losses] == pytest.approx(straight.notes.losses, rel=1e-5)
    assert_near_state(parts[-1], straight)


def assert_near_state(one: Run, other: Run) -> None:
    for path, tensor in one.state.items():
        torch.testing.assert_close(tensor, other.state[path], rtol=1e-4, atol=1e-4, msg=path)


@pytest.mark.slow
def test_limits_follow_the_batches_with_one_recompile_that_says_why() -> None:
    limits = {"batches": 1, "headroom": 1.0, "every_steps": 3}
    run = Run(spec_of(steps=12, limits=limits))
    assert len(run.notes.of("compiled")) == 1
    recompiled = run.notes.of("recompiled")
    assert recompiled, run.notes.events
    assert any("limits of" in reason and "→" in reason for reason in recompiled)
    assert run.notes.of("limits_changed")
    still = Run(spec_of(steps=12, limits={"source": "data"}))
    assert run.notes.losses == pytest.approx(still.notes.losses, rel=1e-6)


def tables_of(spec: dict[str, Any]) -> list[str]:
    trainer = Trainer(
        validate_spec(spec),
        reporter=Notes(StopSignal(), None),
        view=ProgressView(None, 1),
        stop=StopSignal(),
        run_dir=None,
    )
    trainer.close()
    collection = trainer._model._embedding_collection
    return list(collection.embeddings)  # type: ignore[union-attr,arg-type]


@pytest.mark.slow
def test_a_batch_over_its_limits_is_split_or_refused_or_loses_what_is_counted() -> None:
    names = tables_of(spec_of())
    given = {name: {"max_ids": 8, "max_unique": 8} for name in names}
    tight = {"limits": {"source": "given", "tables": given}, "disable_table_stacking": True}
    whole = Run(spec_of(steps=3))
    split = Run(spec_of(steps=3, overflow="minibatch", **tight))
    assert split.notes.losses == pytest.approx(whole.notes.losses, rel=1e-6)
    assert max(each["sample_blocks"] for each in split.notes.numbers) > 1
    with pytest.raises(DataError, match="are allowed"):
        Run(spec_of(steps=3, overflow="error", **tight))
    dropped = Run(spec_of(steps=3, overflow="drop", **tight))
    assert sum(each["ids_dropped"] for each in dropped.notes.numbers) > 0
    assert all(math.isfinite(loss) for loss in dropped.notes.losses)


def test_a_pipeline_lacks_one_update_and_ends_with_none_left_out() -> None:
    off = Run(spec_of(steps=8))
    full = Run(spec_of(steps=8, pipeline="full"))
    assert full.notes.losses[0] == pytest.approx(off.notes.losses[0], rel=1e-6)
    assert full.notes.losses[1] != pytest.approx(off.notes.losses[1], rel=1e-6), "its rows lack the first update"
    assert full.notes.losses == pytest.approx(off.notes.losses, rel=0.05)
    table = next(path for path in off.state if "embeddings" in path and path.startswith("parameter"))
    changed = (off.state[table] != full.state[table]).any()
    assert changed
    # One step has nothing before it to lack.
    assert_near(Run(spec_of(steps=1, pipeline="full")), Run(spec_of(steps=1)), losses=1e-6, values=1e-6)


def test_what_an_engine_does_not_look_at_or_cannot_do_is_refused_by_field() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"embedding": {"engine": "dense", "pipeline": "full"}}, "embedding.pipeline"),
        ({"embedding": {"engine": "dense", "limits": {"source": "data"}}}, "embedding.limits"),
        ({"compile": {"backend": "eager"}}, "embedding.engine"),
        ({"optimizers": {"sparse": {"kind": "adamw"}}}, "embedding.engine"),
        ({"optimizers": {"sparse": {"kind": "sgd", "momentum": 0.9}}}, "embedding.engine"),
        ({"embedding": {"engine": "sparsecore", "limits": {"source": "given"}}}, "embedding.limits.source"),
        (
            {"embedding": {"engine": "sparsecore", "quantize": {"low": 1.0, "high": -1.0}}},
            "embedding.quantize.high",
        ),
        ({"embedding": {"engine": "sparsecore", "stacks": [["a", "a"]]}}, "embedding.stacks"),
    ]
    for change, field in cases:
        with pytest.raises(SpecError) as caught:
            validate_spec({**spec_of(), **change})
        assert [fault.field for fault in caught.value.faults] == [field]
        assert caught.value.faults[0].remedy
    with pytest.raises(SpecError, match="names 'nobody'"):
        tables_of(spec_of(limits={"source": "given", "tables": {"nobody": {"max_ids": 8, "max_unique": 8}}}))
