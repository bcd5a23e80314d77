"""What the loop counts as its time, and when it listens to a wish to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from twinstep.spec.errors import CompileError, TrainError
from twinstep.spec.parse import validate_spec
from twinstep.spec.report import TIME_PARTS, RunSummary
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.train.evaluate import evaluate
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.stop import EXIT_STOPPED, StopSignal

SMALL = {"embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1}
DATA = {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2}


class Notes:
    """A reporter that keeps what it is told, as slowly as asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.metrics: list[tuple[int, dict[str, float | None]]] = []
        self.events: list[str] = []
        self.phases: list[str] = []
        self.accounts: list[dict[str, Any]] = []
        self.on_event: Callable[[str], None] = lambda name: None

    def metric(self, step: int, values: Mapping[str, float | None]) -> None:
        self.metrics.append((step, dict(values)))
        time.sleep(self.seconds)

    def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None:
        self.events.append(name)
        self.on_event(name)

    def progress(self, phase: str, step: int, total_steps: int, **more: Any) -> None:
        self.phases.append(phase)
        self.accounts.append(more)
        self.on_event(phase)

    def result(self, summary: RunSummary) -> None:
        raise AssertionError("the loop returns its summary")

    def close(self) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [float(values[name] or 0.0) for _, values in self.metrics if name in values]


def trainer(notes: Notes, stop: StopSignal | None = None, *, backend: str = "eager", **train: Any) -> Trainer:
    spec = validate_spec(
        {"name": "t", "model": SMALL, "data": DATA, "compile": {"backend": backend, "cache": False}, "train": train}
    )
    return Trainer(spec, reporter=notes, view=ProgressView(None, 1), stop=stop or StopSignal(), run_dir=None)


@pytest.fixture
def slow_data(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let each training batch take longer to pack than a step takes."""
    seconds, whole = 0.1, Loader.train_batch
    monkeypatch.setattr(Loader, "train_batch", lambda *args: (time.sleep(seconds), whole(*args))[1])
    return seconds


def speed(notes: Notes, **train: Any) -> tuple[RunSummary, float]:
    """Train, and return the summary and the seconds that a clock outside saw."""
    work = trainer(notes, **train)
    started = time.perf_counter()
    summary = work.train()
    assert summary is not None
    return summary, time.perf_counter() - started


def test_waiting_for_data_is_in_the_speed_and_told_apart_from_the_step(slow_data: float) -> None:
    notes = Notes()
    summary, _ = speed(notes, steps=12, eval_batches=1)
    assert summary.train_s > 8 * slow_data  # some are packed during the first step, which is long
    assert summary.examples_per_s == pytest.approx(summary.examples / summary.train_s)
    assert sum(notes.of("data_wait_ms")) > 1000 * 3 * slow_data
    assert sum(notes.of("data_wait_ms")) + sum(notes.of("step_ms")) < 1000 * summary.train_s
    assert notes.of("examples_per_s")[-1] < 8 / slow_data, (
        "4 samples of 2 candidates at most, a batch each tenth of a second"
    )


def test_reporting_is_in_the_speed_and_in_the_time_that_is_left() -> None:
    notes = Notes(0.03)
    summary, _ = speed(notes, steps=10, eval_batches=1)
    assert summary.train_s > 10 * 0.03
    assert sum(notes.of("step_ms")) < 1000 * (summary.train_s - 9 * 0.03)


@pytest.mark.parametrize("backend", ["eager", pytest.param("xla", marks=pytest.mark.slow)])
def test_training_compiling_and_evaluating_are_all_the_time_there_is(slow_data: float, backend: str) -> None:
    summary, wall = speed(Notes(0.01), backend=backend, steps=8, eval_every=3, eval_batches=2)
    assert (summary.compile_s > 0) == (backend == "xla")
    told = summary.train_s + summary.compile_s + summary.eval_s
    assert told <= wall
    assert told == pytest.approx(wall, rel=0.05, abs=0.15)  # less the end of a thread and the baselines


def test_a_run_by_hand_ends_at_its_time_limit(slow_data: float) -> None:
    spec = {"name": "t", "model": SMALL, "data": DATA, "compile": {"backend": "eager"}, "train": {"steps": 10_000}}
    started = time.monotonic()
    work = trainer(Notes())
    work.spec = validate_spec(spec | {"runtime": {"max_seconds": 1}})
    with pytest.raises(TrainError, match=r"time limit after step \d+: runtime\.max_seconds is 1"):
        work.train()
    assert time.monotonic() - started > 1
    assert work.step < 100


def test_a_wish_to_stop_before_the_first_step_compiles_nothing() -> None:
    notes, stop = Notes(), StopSignal()
    work = trainer(notes, stop, backend="xla", steps=5)
    stop.asked = True
    assert work.train() is None
    assert "compiling" not in notes.phases
    assert work.step == 0


def test_a_wish_that_comes_as_a_compile_begins_ends_the_run_there() -> None:
    notes, stop = Notes(), StopSignal()
    notes.on_event = lambda what: setattr(stop, "asked", what == "compiling")
    work = trainer(notes, stop, backend="xla", steps=5)
    with pytest.raises(SystemExit) as ended:
        work.train()
    assert ended.value.code == EXIT_STOPPED
    assert "compiled" not in notes.events


@pytest.mark.parametrize("error", [CompileError("no", remedy="yes"), RuntimeError("a bug")])
def test_a_compile_that_fails_leaves_the_end_of_the_run_to_the_loop(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    notes, stop = Notes(), StopSignal()
    work = trainer(notes, stop, backend="xla", steps=5)
    monkeypatch.setattr("twinstep.worker.compile.capture.capture", fail)
    with pytest.raises(type(error)):
        work.train()
    stop._on_signal(15, None)  # ends nothing: the failure is being reported
    assert stop.asked


def test_an_evaluation_that_was_cut_short_reports_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, stop = Notes(), StopSignal()
    drawn, whole = [], Prefetch.__next__

    def counted(self: Any) -> Any:
        item = whole(self)
        drawn.append(item)
        stop.asked = len(drawn) >= 2 + 3  # in the middle of the first evaluation
        return item

    monkeypatch.setattr(Prefetch, "__next__", counted)
    work = trainer(notes, stop, steps=9, eval_every=2)
    assert work.train() is None
    assert work.step == 2
    assert notes.phases[-1] == "evaluating"
    assert "evaluated" not in notes.events
    assert not notes.of("eval/auc")


def test_an_evaluation_is_scored_whole_or_not_at_all() -> None:
    stop = StopSignal()
    work = trainer(Notes(), stop, steps=1)
    arguments = (work._model, work._loader, work._dataset.schema)
    scores = evaluate(*arguments, max_batches=None, stop=stop)
    assert scores is not None
    assert scores.examples == int(work._dataset.held_out.sum())
    stop.asked = True
    assert evaluate(*arguments, max_batches=None, stop=stop) is None
    assert work._model.training


def test_a_step_that_is_done_again_has_the_learning_rate_it_had() -> None:
    job = trainer(Notes(), steps=4, lr_final=0.1)
    rates = []
    for number in (3, 1, 3):
        job._again(number)
        rates.append(float(job._optimizers["dense"].param_groups[0]["lr"]))
    assert rates[0] == rates[2] < rates[1] < 5e-4
    job.close()


def test_progress_tells_where_the_time_went_and_all_of_it(slow_data: float) -> None:
    notes = Notes()
    work = trainer(notes, steps=8, eval_batches=1)
    started = time.perf_counter()
    summary = work.train()
    wall = time.perf_counter() - started
    assert summary is not None
    told = notes.accounts[-1]
    assert set(told["time_s"]) <= set(TIME_PARTS)
    assert told["time_s"]["input_wait"] > 0.5 * slow_data
    assert 0 < told["goodput"] < 1
    assert sum(told["time_s"].values()) == pytest.approx(told["chip_hours"] * 3600, rel=0.02), "one device"
    assert told["tokens_per_s"] > 0
    assert notes.of("tokens_per_s")
    assert sum(summary.time_s.values()) == pytest.approx(wall, rel=0.3, abs=0.5)
    assert summary.goodput == pytest.approx(summary.time_s["step"] / sum(summary.time_s.values()), rel=0.05)
    assert summary.tokens == sum(notes.of("real_tokens"))
    assert summary.tokens_per_s == pytest.approx(summary.tokens / summary.train_s)
