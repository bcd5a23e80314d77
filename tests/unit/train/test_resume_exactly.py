"""A run that stops and goes on is the run that never stopped: bit for bit, on every backend; and across backends."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.spec.errors import TrainError
from twinstep.spec.parse import validate_spec
from twinstep.spec.report import RunSummary
from twinstep.worker.checkpoint.errors import MisfitError
from twinstep.worker.checkpoint.manifest import Manifest
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.data.loader import Loader
from twinstep.worker.train.goodput import Goodput
from twinstep.worker.train.guard import LossGuard
from twinstep.worker.train.heartbeat import Heartbeat
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.saving import check_same_job, run_tensors
from twinstep.worker.train.step import make_train_step
from twinstep.worker.train.stop import StopSignal

SMALL = {
    "embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
    "dropout": 0.2,
}  # fmt: skip
BATCH_SIZE = 4
DATA = {"dataset": "synthetic", "synthetic_events": 400, "batch_size": BATCH_SIZE, "uih_len": 8, "num_candidates": 2}
Spec = dict[str, Any]
BACKENDS = ["eager", pytest.param("xla", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.slow)]


class Notes:
    """A reporter that keeps metrics and events, and may stop the run after a step."""

    def __init__(self, stop: StopSignal, at: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.evals: dict[int, Any] = {}
        self.events: list[tuple[str, str]] = []
        self._stop, self._at = stop, at

    def metric(self, step: int, values: Any) -> None:
        if "loss" in values:
            self.losses[step] = values["loss"]
            self._stop.asked = self._stop.asked or step == self._at
        else:
            self.evals[step] = values

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
    """One attempt: its numbers, and the state it ended with."""

    def __init__(self, spec: dict[str, Any], *, stop_at: int | None = None) -> None:
        stop = StopSignal()
        self.notes = Notes(stop, stop_at)
        self.trainer = Trainer(
            validate_spec(spec), reporter=self.notes, view=ProgressView(None, 1), stop=stop, run_dir=None
        )
        try:
            self.summary = self.trainer.train()
            self.code = None if self.summary is not None else self.trainer.leave()
        finally:
            self.trainer.close()
        self.trainer._stepper.pull()
        self.state: dict[str, Tensor] = {
            path: tensor.clone()
            for path, tensor in run_tensors(
                self.trainer.spec, self.trainer._model, self.trainer._optimizers, self.trainer._stepper
            ).items()
        }


def spec_of(
    backend: str = "eager", *, path: Path | None = None, checkpoint: Any = None, **train: Any
) -> dict[str, Any]:
    return {
        "name": "t",
        "model": SMALL,
        "data": DATA,
        "compile": {"backend": backend, "cache": False},
        "train": {"steps": 12, "eval_every": 4, "eval_batches": 2, **train},
        "checkpoint": {"path": None if path is None else str(path), **(checkpoint or {})},
    }


def test_a_run_that_is_done_is_evaluated_again_and_saved_no_more(tmp_path: Path) -> None:
    for wanted in ({"every_steps": 5}, {"keep_best": 2}):
        where = tmp_path / next(iter(wanted))
        first = Run(spec_of(path=where, checkpoint=wanted))
        saved = sorted(each.name for each in where.glob("0*"))
        again = Run(spec_of(path=where, checkpoint=wanted))
        assert sorted(each.name for each in where.glob("0*")) == saved
        assert again.notes.of("resumed")[0].startswith("all 12 steps are done already")
        assert not again.notes.losses
        assert first.summary is not None
        assert again.summary is not None
        assert again.summary.auc == first.summary.auc


def assert_same(first: Run, second: Run) -> None:
    for path in {**first.state, **second.state}:
        one, other = first.state.get(path), second.state.get(path)
        if one is None or other is None:  # of a parameter without gradients, an optimizer keeps nothing, or zeros
            assert path.startswith("optimizer:"), path
            assert not (other if one is None else one).any(), path
        else:
            assert torch.equal(one, other), path


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_and_go_is_no_stop_bit_for_bit(tmp_path: Path, backend: str) -> None:
    straight = Run(spec_of(backend))
    parts = [Run(spec_of(backend, path=tmp_path), stop_at=at) for at in (3, 8, None)]
    assert [part.code for part in parts] == [75, 75, None]
    assert [min(part.notes.losses) for part in parts] == [1, 4, 9]
    together = {step: loss for part in parts for step, loss in part.notes.losses.items()}
    assert together == straight.notes.losses
    evaluated = [step for part in parts for step in part.notes.evals]
    assert evaluated == [4, 8, 12], "each once, also the one at the step of the stop"
    assert {step: each for part in parts for step, each in part.notes.evals.items()} == straight.notes.evals
    assert_same(straight, parts[-1])
    first, last = straight.summary, parts[-1].summary
    assert first is not None
    assert last is not None
    assert (first.examples, first.final_loss, first.auc, first.steps) == (
        last.examples, last.final_loss, last.auc, last.steps,
    )  # fmt: skip
    assert parts[1].notes.of("resumed") == ["goes on after step 3 of 12"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_dies_goes_on_from_its_last_checkpoint(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Run(spec_of(backend))
    whole = Loader.train_batch

    def dies(loader: Loader, step: int) -> Any:
        if step == 7:
            raise RuntimeError("the host went away")
        return whole(loader, step)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "train_batch", dies)
        with pytest.raises(RuntimeError, match="went away"):
            Run(spec_of(backend, path=tmp_path, checkpoint={"every_steps": 3}))
    again = Run(spec_of(backend, path=tmp_path, checkpoint={"every_steps": 3}))
    assert min(again.notes.losses) == 7
    assert all(straight.notes.losses[step] == loss for step, loss in again.notes.losses.items())
    assert_same(straight, again)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["eager", "xla", "inductor"])
@pytest.mark.parametrize("first", ["eager", "xla", "inductor"])
def test_a_checkpoint_of_one_backend_goes_on_with_another(tmp_path: Path, first: str, second: str) -> None:
    if first == second:
        pytest.skip("the same backend is held bit for bit above")

    def without_dropout(backend: str, **more: Any) -> dict[str, Any]:
        return {**spec_of(backend, **more), "model": {**SMALL, "dropout": 0.0}}

    straight = Run(without_dropout("eager"))
    Run(without_dropout(first, path=tmp_path), stop_at=6)
    other = Run(without_dropout(second, path=tmp_path))
    assert min(other.notes.losses) == 7
    for path, tensor in straight.state.items():
        if path.startswith(("parameter:", "optimizer:")):
            torch.testing.assert_close(other.state[path], tensor, rtol=2e-4, atol=2e-5)


def test_a_spec_that_does_not_fit_is_refused_by_tensor(tmp_path: Path) -> None:
    Run(spec_of(path=tmp_path), stop_at=2)
    other = {**spec_of(path=tmp_path), "model": {**SMALL, "hidden_dim": 16}}
    with pytest.raises(MisfitError) as refused:
        Run(other)
    assert any("[16" in fault.problem and "[8" in fault.problem for fault in refused.value.faults)
    assert Run(spec_of(path=tmp_path)).summary is not None, "the checkpoint is as it was"


OTHER_JOBS = [
    ("model.dropout", 0.3),
    ("model.max_attn_len", 3),
    ("data.label_threshold", 3.0),
    ("data.split.by", "user"),
    ("data.synthetic.zipf", 1.5),
    ("data.uih_len", 7),
    ("optimizers.dense.kind", "adamw"),
]


@pytest.mark.parametrize(("field", "value"), OTHER_JOBS)
def test_another_job_with_tensors_of_the_same_shapes_is_refused_by_field(
    tmp_path: Path, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(spec_of(path=tmp_path, eval_every=0), stop_at=2)
    other = changed(spec_of(path=tmp_path, eval_every=0), field, value)
    loaded: list[Any] = []
    monkeypatch.setattr("twinstep.worker.checkpoint.saver.load_tensors", lambda *given: loaded.append(given))
    with pytest.raises(MisfitError, match=re.escape(f"{field} is {value!r}, in the checkpoint")) as refused:
        Run(other)
    assert [fault.field for fault in refused.value.faults] == [field]
    assert not loaded, "nothing was changed"


SAME_JOB = [
    ("data.batch_size", 8),
    ("data.uih_budget", 6),
    ("data.eval_candidates", 1),
    ("data.on_bad_row", "skip"),
    ("optimizers.dense.lr", 0.01),
    ("optimizers.dense.weight_decay", 0.1),
    ("train.steps", 3),
    ("train.clip_norm", 1.0),
    ("model.action_init_std", 0.2),
    ("name", "another"),
]


@pytest.mark.parametrize(("field", "value"), SAME_JOB)
def test_what_may_change_goes_on(tmp_path: Path, field: str, value: Any) -> None:
    Run(spec_of(path=tmp_path, eval_every=0, steps=3), stop_at=2)
    run = Run(changed(spec_of(path=tmp_path, eval_every=0, steps=3), field, value))
    assert list(run.notes.losses) == [3]


def test_fields_that_the_writers_version_did_not_know_are_no_difference() -> None:
    spec = validate_spec(spec_of())
    before = spec.model_dump(mode="json")
    del before["data"]["synthetic"]["zipf"], before["model"]["dropout"]
    before["data"]["long_gone"] = 1
    manifest = Manifest(number=1, step=1, written_at=0, about={"spec": before}, files={}, tensors={})
    check_same_job(spec, manifest)
    check_same_job(spec, manifest.model_copy(update={"about": {}}))
    before["model"]["kind"] = "dlrm"
    with pytest.raises(MisfitError, match=r"model\.kind is 'dlrmv3', in the checkpoint 'dlrm'"):
        check_same_job(spec, manifest)


def changed(spec: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a spec with another value of one field."""
    first, _, rest = field.partition(".")
    return {**spec, first: changed(spec.get(first, {}), rest, value) if rest else value}


def test_a_finished_run_that_is_started_again_only_evaluates_and_more_steps_go_on(tmp_path: Path) -> None:
    wanted = {"every_steps": 5}
    first = Run(spec_of(path=tmp_path, checkpoint=wanted))
    again = Run(spec_of(path=tmp_path, checkpoint=wanted))
    assert not again.notes.losses
    assert again.summary is not None
    assert first.summary is not None
    assert (again.summary.auc, again.summary.final_loss) == (first.summary.auc, first.summary.final_loss)
    longer = Run(spec_of(path=tmp_path, checkpoint=wanted, steps=14))
    assert list(longer.notes.losses) == [13, 14]
    assert_same(longer, Run(spec_of(steps=14)))


def test_the_best_are_kept_with_their_scores(tmp_path: Path) -> None:
    wanted = {"keep_best": 1, "keep_last": 1, "best_by": "auc"}
    run = Run(spec_of(path=tmp_path, checkpoint=wanted))
    scores = {step: values["eval/auc"] for step, values in run.notes.evals.items()}
    best = max(scores, key=lambda step: scores[step])
    from twinstep.worker.checkpoint.place import open_place

    found = [Reader(open_place(tmp_path), each.name).manifest for each in tmp_path.glob("*-step-*")]
    assert {manifest.step for manifest in found} == {best, 12}
    assert {manifest.step: manifest.scores["auc"] for manifest in found} == {step: scores[step] for step in {best, 12}}


def test_a_stop_in_the_last_evaluation_costs_the_last_state_no_scores(tmp_path: Path) -> None:
    from twinstep.worker.checkpoint.place import open_place

    wanted = {"keep_best": 1, "keep_last": 1}
    stopped = Run(spec_of(path=tmp_path, checkpoint=wanted), stop_at=12)
    assert stopped.summary is None
    assert 12 not in stopped.notes.evals
    again = Run(spec_of(path=tmp_path, checkpoint=wanted))
    newest = open_place(tmp_path), max(each.name for each in tmp_path.glob("*-step-12"))
    assert Reader(*newest).manifest.scores["auc"] == again.notes.evals[12]["eval/auc"]
    Run(spec_of(path=tmp_path, checkpoint=wanted))
    assert max(each.name for each in tmp_path.glob("*-step-12")) == newest[1], "once is enough"


def test_another_batch_size_goes_on_at_the_exact_sample(tmp_path: Path) -> None:
    Run(spec_of(path=tmp_path), stop_at=6)
    run = Run({**spec_of(path=tmp_path), "data": {**DATA, "batch_size": 8}, "train": {"steps": 7, "eval_batches": 1}})
    straight = Run(spec_of(steps=1))
    position = run.trainer._loader.position(1)
    assert position == straight.trainer._loader.position(8), "6 × 4 samples, then 8"


@pytest.mark.parametrize("backend", ["eager", pytest.param("xla", marks=pytest.mark.slow)])
def test_a_batch_that_is_skipped_leaves_the_state_as_before_it(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    poison(monkeypatch, {5})
    run = Run(spec_of(backend, on_nan="skip", steps=6, eval_every=0))
    assert run.notes.of("batch_skipped") == ["the loss of step 6 is nan: the batch of step 6 is left out"]
    assert_same(run, Run(spec_of(backend, steps=5, eval_every=0)))


def test_training_goes_on_after_a_skipped_batch_and_a_resume_does_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, {5})
    straight = Run(spec_of(on_nan="skip", eval_every=0))
    assert set(straight.notes.losses) == set(range(1, 13)) - {6}
    Run(spec_of(on_nan="skip", eval_every=0, path=tmp_path), stop_at=8)
    assert_same(straight, Run(spec_of(on_nan="skip", eval_every=0, path=tmp_path)))


def test_a_rollback_drops_all_batches_since_the_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = {"every_steps": 3}
    poison(monkeypatch, {7})
    run = Run(spec_of(on_nan="rollback", steps=8, eval_every=0, path=tmp_path, checkpoint=wanted))
    assert run.notes.of("rolled_back") == [
        "the loss of step 8 is nan: back to the state after step 6, without the batches since"
    ]
    assert_same(run, Run(spec_of(steps=6, eval_every=0)))


def test_the_step_that_spoiled_the_state_is_the_one_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is infinite shows one step later: in the loss, when the parameters are gone."""
    bad: list[Any] = []

    def noted(loader: Loader, step: int) -> Any:
        batch, stats = _WHOLE(loader, step)
        bad.extend([batch.weights] if step == 4 else [])
        return batch, stats

    def made(**options: Any) -> Any:
        inner = make_train_step(**options)

        def step(model: Any, optimizers: Any, batch: Any) -> Any:
            output = inner(model, optimizers, batch)
            if any(each is batch.weights for each in bad):
                with torch.no_grad():
                    next(model.parameters()).fill_(math.inf)
            return output

        return step

    monkeypatch.setattr(Loader, "train_batch", noted)
    monkeypatch.setattr("twinstep.worker.train.engines.make_train_step", made)
    longer = Run(spec_of(on_nan="skip", steps=9, eval_every=0))
    assert longer.notes.of("batch_skipped") == ["the loss of step 6 is nan: the batch of step 5 is left out"]
    assert set(longer.notes.losses) == set(range(1, 10)), "the one that showed it is done again"
    assert all(math.isfinite(loss) for loss in longer.notes.losses.values())


def test_batches_that_are_all_bad_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, set(range(3, 100)))
    with pytest.raises(TrainError, match="more than 10 batches were dropped"):
        Run(spec_of(on_nan="skip", steps=90, eval_every=0))


def test_a_spike_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**options: Any) -> Any:
        inner, calls = make_train_step(**options), iter(range(1000))

        def step(*arguments: Any) -> Any:
            output = inner(*arguments)
            return output._replace(loss=output.loss * 1e4) if next(calls) == 30 else output

        return step

    monkeypatch.setattr("twinstep.worker.train.engines.make_train_step", made)
    run = Run(spec_of(on_nan="skip", loss_spike=20.0, steps=32, eval_every=0))
    (said,) = run.notes.of("batch_skipped")
    assert "more than 20 × the median" in said
    with pytest.raises(TrainError, match=r"step 31 is .* more than 20 × the median"):
        Run(spec_of(loss_spike=20.0, steps=32, eval_every=0))


def test_steps_that_are_run_again_beat_and_end_at_a_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, {8})
    wanted = {"on_nan": "skip", "eval_every": 4}
    straight = Run(spec_of(**wanted))
    again, beat = Trainer._again, Heartbeat.beat
    beats: list[str] = []
    replayed: list[int] = []

    def noted(heart: Heartbeat, phase: str, step: int) -> None:
        beats.append(phase)
        beat(heart, phase, step)

    def stops(trainer: Trainer, number: int) -> None:
        trainer._stop.asked = number == 5
        before = len(beats)
        try:
            again(trainer, number)
        finally:
            replayed.append(number)
            assert beats[before:] == ["training"]

    with monkeypatch.context() as patch:
        patch.setattr(Heartbeat, "beat", noted)
        patch.setattr(Trainer, "_again", stops)
        stopped = Run(spec_of(path=tmp_path, **wanted))
    assert stopped.code == 75
    assert replayed == [0, 1, 2, 3, 4, 5]
    assert stopped.trainer.step == 5
    resumed = Run(spec_of(path=tmp_path, **wanted))
    assert min(resumed.notes.losses) == 6
    assert_same(straight, resumed)


def test_steps_that_are_run_again_end_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {8})
    again = Trainer._again
    replayed: list[int] = []

    def late(trainer: Trainer, number: int) -> None:
        replayed.append(number)
        trainer._begun -= 400.0
        again(trainer, number)

    monkeypatch.setattr(Trainer, "_again", late)
    with pytest.raises(TrainError, match="time limit"):
        Run({**spec_of(on_nan="skip", eval_every=0), "runtime": {"max_seconds": 1000}})
    assert replayed == [0, 1, 2]


@pytest.mark.parametrize(("on_nan", "stay"), [("skip", [0, 1, 2, 3, 4, 5, 6]), ("rollback", [0, 1, 2, 3, 4, 5])])
def test_time_that_was_thrown_away_is_no_useful_step(monkeypatch: pytest.MonkeyPatch, on_nan: str, stay: Any) -> None:
    """The batch of step 8 is bad, and the copy is that of step 6."""
    poison(monkeypatch, {7})
    monkeypatch.setattr("twinstep.worker.train.rewind.EVERY", 6)
    spent: list[float] = []
    add = Goodput.add

    def noted(goodput: Goodput, part: str, seconds: float) -> None:
        spent.extend([seconds] if part == "step" else [])
        add(goodput, part, seconds)

    monkeypatch.setattr(Goodput, "add", noted)
    run = Run(spec_of(on_nan=on_nan, steps=10, eval_every=0))
    found = run.trainer._goodput.seconds()
    assert len(spent) == 10
    assert found["step"] == pytest.approx(sum(spent[each] for each in (*stay, 8, 9)))
    assert found["redone"] >= sum(spent) - found["step"]


def test_a_rollback_counts_all_that_it_drops() -> None:
    guard = LossGuard(spike=None)
    assert not guard.too_many(90, since=0), "one alone may drop what there is since the copy"
    assert guard.too_many(100, since=0)
    guard = LossGuard(spike=None)
    assert not guard.too_many(6, since=0)
    assert not guard.too_many(8, since=0), "those before were dropped already: 8 in all"
    assert not guard.too_many(10, since=0)
    assert guard.too_many(11, since=0)
    guard = LossGuard(spike=None)
    assert not guard.too_many(50, since=0)
    assert not guard.too_many(151, since=100), "those before are too long ago"
    guard = LossGuard(spike=None)
    assert [guard.too_many(step) for step in range(1, 12)] == [False] * 10 + [True]


def test_rollbacks_that_drop_most_batches_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, set(range(6, 100, 7)))
    with pytest.raises(TrainError, match=r"the loss of step 14 .* more than 10 batches were dropped"):
        Run(spec_of(on_nan="rollback", steps=90, eval_every=0))


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Spoil the losses of the batches of some steps, counted from 0."""
    whole = _WHOLE

    def spoiled(loader: Loader, step: int) -> Any:
        batch, stats = whole(loader, step)
        number = step + loader._origin // BATCH_SIZE
        return (batch._replace(labels=batch.labels * math.nan) if number in steps else batch), stats

    monkeypatch.setattr(Loader, "train_batch", spoiled)


_WHOLE = Loader.train_batch
