"""The loop: batches through the compiled step, numbers out, an evaluation where the spec wants one."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch

from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import BaselineScore, RunSummary
from twinstep.spec.words import EXIT_PREEMPTED
from twinstep.worker.compile import CompileEvent, CompileWarning
from twinstep.worker.data.badrows import varying_features
from twinstep.worker.data.baselines import baseline_aucs
from twinstep.worker.data.batch import BatchStats
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.meter import LoaderMeter
from twinstep.worker.data.packers import packed_ahead
from twinstep.worker.train.asked import sizes_of, tell_of_loading
from twinstep.worker.train.declared import build
from twinstep.worker.train.engines import Parts, Prepared, make_stepper
from twinstep.worker.train.environment import grace_seconds, previous_worker
from twinstep.worker.train.evaluate import evaluate
from twinstep.worker.train.goodput import Goodput, chips_of
from twinstep.worker.train.graphs import SavedGraphs
from twinstep.worker.train.guard import MOST, SPAN, LossGuard, remedy_of
from twinstep.worker.train.heartbeat import Heartbeat
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.profiling import Profiling
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.report import Phase, Reporter
from twinstep.worker.train.rewind import Interrupted, Rewind
from twinstep.worker.train.saving import Saving, begins, last_words, place_of, run_tensors
from twinstep.worker.train.schedule import Schedule
from twinstep.worker.train.scores import Scores, Window
from twinstep.worker.train.shared import in_evaluation, loaded_as, make_loaders, shared_stop
from twinstep.worker.train.shared_saving import SharedSaving
from twinstep.worker.train.speed import Speed, told_of
from twinstep.worker.train.stop import EXIT_STOPPED, StopSignal
from twinstep.worker.train.versions import software_versions

PROGRESS_EVERY = 1.0  # seconds between progress records
SOURCES = {
    "none": "anew",
    "disk": "from disk",
    "backend": "traced anew, from the backend's cache",
    "ahead": "as preflight compiled it",
}
GRACE_SHARE = 0.9  # of the grace that the last checkpoint may take: the rest is for reports


class Trainer:
    """One run's data, model, optimizers and compiled step.

    Args:
        stop: asked between steps; a run that is asked to stop ends without a summary.
        run_dir: where the captured graph goes when the spec wants it saved.
        together: the run's processes; None: this is the only one.

    Raises:
        DataError: the dataset is missing or broken.
        TrainError: from `train`, where the loss is not finite, or `runtime.max_seconds` are over.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        reporter: Reporter,
        view: ProgressView,
        stop: StopSignal,
        run_dir: Path | None,
        together: Together | None = None,
    ) -> None:
        self.spec = spec
        self.step = 0
        self._begun = time.monotonic()
        self._goodput = Goodput(chips=chips_of(spec), begun=self._begun)
        self._together = together or Together(Process())
        self._reporter, self._view, self._run_dir = reporter, view, run_dir
        self._stop = shared_stop(stop, self._together)
        torch.manual_seed(spec.train.seed)
        self._dataset = load_dataset(spec.data)
        self._report_left_out()
        self._loader, self._eval_loader = make_loaders(self._dataset, spec, self._together)
        self._loading = loaded_as(spec, self._together)
        self._meter = LoaderMeter(self._loading.loader_workers or 1)
        tell_of_loading(spec.data, self._loading, self._event)
        self._window = Window(self._dataset.schema, spec.train.window_steps)
        view.starting("building the model")
        self._model, self._optimizers = build(spec, self._dataset.schema, self._together)
        self._schedule = Schedule(spec, self._optimizers)
        self._stepper = make_stepper(
            Parts(
                spec=spec,
                model=self._model,
                optimizers=self._optimizers,
                loader=self._loader,
                on_start=self._compiling,
                on_event=self._compiled,
                on_warning=self._warned,
                tell=self._event,
                together=self._together,
            )
        )
        self._sizes = sizes_of(spec)
        self._eval_seconds = 0.0
        self._compiled_before = 0.0
        self._last_loss = math.nan
        self._graphs = SavedGraphs(run_dir, tell=self._event)
        self._speed = Speed()
        self._last_progress = 0.0
        self._heart = Heartbeat(run_dir)
        self._profiling = Profiling(spec, run_dir, tell=self._event, wanted=self._together.first)
        self._since_copy: dict[int, float] = {}  # seconds of each step that a rewind may make vain
        self._guard = LossGuard(spike=spec.train.loss_spike)
        self._evaluated, self._first = -1, 0
        self._saving = self._open_saving()
        self._rewind = self._open_rewind()
        self._resume()

    def _open_saving(self) -> Saving | SharedSaving | None:
        where = place_of(self.spec.checkpoint)
        if where is None:
            return None
        self._view.starting("looking for checkpoints")
        state: dict[str, Any] = {"model": self._model, "optimizers": self._optimizers, "stepper": self._stepper}
        if self._together.several:
            return SharedSaving(self.spec, where, self._together, tell=self._event, **state)
        return Saving(self.spec, where, tell=self._event, **state)

    def _open_rewind(self) -> Rewind | None:
        if self.spec.train.on_nan == "stop":
            return None
        return Rewind(
            self.spec,
            model=self._model,
            optimizers=self._optimizers,
            stepper=self._stepper,
            tensors=lambda: run_tensors(self.spec, self._model, self._optimizers, self._stepper),
        )

    def _resume(self) -> None:
        """Go on from the newest checkpoint, where there is one."""
        try:
            manifest = None if self._saving is None else self._saving.restore()
        except BaseException:
            self.close()  # another may write there
            raise
        if manifest is None:
            before = previous_worker()
            self._goodput.carry({}, gap=0.0 if before is None else before.seconds)  # nothing of it is left
            self._event_of_restart(0)
            return
        about = manifest.about
        self._stepper.restore(about.get("engine", {}))
        self._loader.seek(about["loader"])
        self.step = self._first = manifest.step
        self._speed.restore(about["speed"])
        self._guard.restore(about["losses"])
        self._last_loss = math.nan if about["loss"] is None else about["loss"]
        self._eval_seconds, self._evaluated = about["eval_seconds"], about["evaluated"]
        self._compiled_before = about["compile_seconds"]
        gap = 0.0 if about["stopped"] else time.time() - manifest.written_at - (time.monotonic() - self._begun)
        self._goodput.carry(about["goodput"], gap=gap)
        self._event_of_restart(manifest.step)

    def _event_of_restart(self, step: int) -> None:
        """Say from where the run goes on, and what it lost; nothing for one that simply begins."""
        before = previous_worker()
        if before is None and not step:
            return
        text = begins(step, self.spec.train.steps)
        data: dict[str, Any] = {"step": step}
        if before is not None:
            text, data = f"{before.reason}; {text}", data | {"restart": before.count}
            if before.step is not None:
                data["lost_steps"] = lost = max(0, before.step - step)
                text += f"; {lost} steps since the last checkpoint are done again"
        self._event("resumed", text, data)

    def state(self, *, stopped: bool = False) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors; `stopped`: the run ends here because it is told to."""
        return {
            "loader": self._loader.position(self.step - self._first),
            "speed": self._speed.state(),
            "losses": self._guard.state(),
            "loss": self._last_loss if math.isfinite(self._last_loss) else None,
            "eval_seconds": self._eval_seconds,
            "evaluated": self._evaluated,
            "compile_seconds": self._compile_seconds,
            "goodput": self._goodput.seconds(),
            "engine": self._stepper.state(),
            "stopped": stopped,
        }

    @property
    def _compile_seconds(self) -> float:
        return self._compiled_before + self._stepper.compile_seconds

    def leave(self, *, together: bool = True) -> int:
        """Save what there is, where all processes are at the same point; return the exit code of a stopped run."""
        if self._saving is not None and (together or not self._together.several):
            grace = GRACE_SHARE * grace_seconds(self.spec)
            if not self._saving.save_last(self.step, self.state(stopped=True), within=grace):
                good = self._saving.last_good or 0
                told = f"the {self.step - good} steps after step {good} are lost"
                self._event("steps_lost", told, {"step": self.step})
        self._view.end(last_words(self.step, None if self._saving is None else self._saving.kept))
        return EXIT_STOPPED if self._saving is None else EXIT_PREEMPTED

    def close(self, *, wait: bool = True) -> None:
        """Wait for the last checkpoint, or give it up, and let others write where this run did."""
        self._heart.close()
        self._stepper.close()
        self._profiling.close()
        if self._saving is not None:
            self._saving.close() if wait else self._saving.give_up()

    def train(self) -> RunSummary | None:
        """Run all steps and the last evaluation. Return the summary, or None when the run was asked to stop."""
        total, every = self.spec.train.steps, self.spec.train.eval_every
        self._model.train()
        self._speed.start()
        self._goodput.add("start", time.monotonic() - self._begun)
        while self.step < total:
            # Batches are drawn anew where steps were left out.
            start = self.step - self._first
            with packed_ahead(self._loader, self._loading, start, self._stepper.prepared) as ahead:
                batches = self._stepper.drawn(ahead)
                while self.step < total:
                    scores = self._evaluate() if every and self.step and self.step % every == 0 else None
                    self._save_where_due(scores)
                    if self._stop.asked:
                        return None
                    self._check_time()
                    with self._profiling.step(self.step + 1):
                        asked, ready = time.perf_counter(), ahead.ready
                        with self._profiling.waiting():
                            batch, stats = next(batches)
                        if self._stop.asked:
                            return None
                        waited = time.perf_counter() - asked
                        self._meter.add(stats, waited=waited, ready=ready)
                        if not self._one_step(batch, stats, waited=waited):
                            break
        self._speed.end()
        new, best = self.step > self._first, self.spec.checkpoint.keep_best  # an old last step is saved already
        if self._saving is not None and new and not best and self._saving.due(self.step, ends=True):
            self._save()
        scored = self._evaluated == self.step  # it is saved with its scores then
        scores = self._evaluate()
        if scores is None:
            return None
        if best and not scored:
            self._save(scores)
        if self._saving is not None:
            with self._goodput.during("checkpoint"):
                self._saving.finish()
        else:
            self._view.say("the model is not kept: checkpoint.path names no place for it")
        return self._summary(scores)

    def _report_left_out(self) -> None:
        bad = self._dataset.left_out
        if bad.count:
            self._view.say(bad.summary())
            first = [str(row) for row in bad.first]
            self._reporter.event("rows_left_out", bad.summary(), {"count": bad.count, "kept": bad.kept, "first": first})
        if bad.varying:
            said = varying_features(bad.varying)
            self._view.say(said)
            self._reporter.event("features_vary", said, {"features": bad.varying})

    def _save_where_due(self, scores: Scores | None) -> None:
        if self._rewind is not None and self._rewind.due(self.step):
            with self._goodput.during("checkpoint"):
                self._rewind.take(self.step)
            if self._rewind.step == self.step:
                self._since_copy.clear()
        if self._saving is not None:
            self._saving.look()
            if self._saving.due(self.step, scored=scores is not None):
                self._save(scores)

    def _save(self, scores: Scores | None = None) -> None:
        if self._saving is not None:
            started = time.perf_counter()
            with self._goodput.during("checkpoint"):
                self._saving.save(self.step, self.state(), scores=None if scores is None else scores.values())
            self._speed.leave_out(time.perf_counter() - started)

    def _check_time(self) -> None:
        """End a run by hand at its time limit. Under a control plane the supervisor, which started before, is first."""
        limit = self.spec.runtime.max_seconds
        if limit is not None and self._together.any(time.monotonic() - self._begun > limit):
            raise TrainError(
                f"stopped at its time limit after step {self.step}: runtime.max_seconds is {limit:g}",
                remedy="raise runtime.max_seconds, or lower train.steps",
            )

    def _one_step(self, batch: Prepared, stats: BatchStats, *, waited: float) -> bool:
        """Run a step and report it; False where batches were dropped and others come next than were drawn ahead."""
        started, compiled = time.perf_counter(), self._stepper.compile_seconds
        self._schedule.set(self.step)
        try:
            program = self._stepper.program(batch, sizes=self._sizes, step=self.step)
        finally:
            self._stop.end_between_steps()  # `_compiling` made it otherwise, and a compile that failed says no word
        if self.spec.debug.save_graph and self._together.first and self.spec.compile.backend != "eager":
            self._graphs.save(self._stepper.runner(batch, sizes=self._sizes))
        with self._profiling.computing():
            output = program()
            loss = float(output.loss)  # waits for the step
        compiling = self._stepper.compile_seconds - compiled
        seconds = time.perf_counter() - started - compiling
        self._goodput.add("input_wait", waited)
        self._goodput.add("compile", compiling)
        self._goodput.add("step", seconds)
        self._speed.leave_out(compiling)
        if self._rewind is not None:
            self._since_copy[self.step] = self._since_copy.get(self.step, 0.0) + seconds
        fault = self._guard.fault(loss)
        if fault is not None and not self._goes_on(fault, loss):
            self._speed.leave_out(seconds + waited)
            self._heart.beat("training", self.step)
            return False
        self.step += 1
        self._last_loss = loss
        self._speed.lap(stats.examples, stats.real_tokens)
        self._heart.beat("training", self.step)
        self._tell(output, stats, step_ms=seconds * 1e3)
        windowed = self._window.add(output.logits, self._stepper.batch_of(batch), step=self.step)
        if windowed:
            self._reporter.metric(self.step, windowed)
        return True

    def _goes_on(self, fault: str, loss: float) -> bool:
        """Answer a loss that is not to be as the spec says; False where its batch was dropped.

        Raises:
            TrainError: the spec wants the run to stop, or too many batches were dropped.
        """
        number = self.step + 1
        if self._rewind is None:
            if not math.isfinite(loss) and not self.spec.debug.stop_on_nonfinite:
                return True
            raise TrainError(f"the loss of step {number} {fault}", remedy=remedy_of(number))
        first = self._rewind.step
        back = self.spec.train.on_nan == "rollback"
        if self._guard.too_many(number, since=first if back else None):
            raise TrainError(
                f"the loss of step {number} {fault}, and more than {MOST} batches were dropped within {SPAN} steps",
                remedy="lower the learning rates, set train.clip_norm, or look at the data",
            )
        started = time.perf_counter()
        vain = first
        if back:
            self._rewind.back()
            self.step += 1
            text = f"the loss of step {number} {fault}: back to the state after step {first}, without the batches since"
            self._event("rolled_back", text, {"step": number, "to": first, "dropped": number - first})
        else:
            try:
                self.step = self._rewind.without(self.step, self._again) + 1
                text = f"the loss of step {number} {fault}: the batch of step {self.step} is left out"
                self._event("batch_skipped", text, {"step": number, "skipped": self.step})
                vain = self.step - 1
            except Interrupted as interrupted:  # whoever goes on from there meets the bad batch again
                self.step = vain = interrupted.number
        for step in [each for each in self._since_copy if each >= vain]:
            self._goodput.move(self._since_copy.pop(step), to="redone")
        self._goodput.add("redone", time.perf_counter() - started)
        self._speed.leave_out(time.perf_counter() - started)
        return False

    def _again(self, number: int) -> None:
        """Run the step of a batch again, counted from 0 since the job's start; nothing is reported.

        Raises:
            Interrupted: a stop was asked for.
            TrainError: the time limit is over.
        """
        self._heart.beat("training", self.step)
        if self._stop.asked:
            raise Interrupted(number)
        self._check_time()
        batch, _ = self._loader.train_batch(number - self._first)
        self._schedule.set(number)
        prepared = self._stepper.prepare(batch)
        float(self._stepper.program(prepared, sizes=self._sizes, step=number)().loss)

    def _tell(self, output: Any, stats: BatchStats, *, step_ms: float) -> None:
        """Report a step's numbers and where the run is."""
        step, total = self.step, self.spec.train.steps
        eta = self._speed.step_seconds * (total - step)
        if step % self.spec.train.log_every == 0 or step in (1, total):
            tasks = self._dataset.schema.tasks
            losses = {f"loss/{task.name}": float(each) for task, each in zip(tasks, output.task_losses, strict=True)}
            values = {
                "loss": self._last_loss,
                **(losses if len(tasks) > 1 else {}),
                "step_ms": step_ms,
                **self._meter.report(),
                "examples_per_s": self._speed.examples_per_s,
                "tokens_per_s": self._speed.tokens_per_s,
                "real_tokens": float(stats.real_tokens),
                "dummy_tokens": float(stats.dummy_tokens),
                "events_cut": float(stats.events_cut),
                "goodput": self._goodput.share,
                "chip_hours": self._goodput.chip_hours,
                **self._stepper.numbers(),
            }
            self._reporter.metric(step, values)
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY or step == total:
            self._last_progress = now
            self._progress("training", eta_s=eta)
        self._view.step(step, loss=self._last_loss, examples_per_s=self._speed.examples_per_s, eta_s=eta)

    def _progress(self, phase: Phase, *, eta_s: float | None = None) -> None:
        step, total = self.step, self.spec.train.steps
        self._reporter.progress(phase, step, total, **told_of(phase, self._speed, self._goodput), eta_s=eta_s)

    def _evaluate(self) -> Scores | None:
        """Score held-out data and report it; None, and not a word, where a stop was asked for meanwhile."""
        if self._evaluated == self.step and self.step < self.spec.train.steps:
            return None  # its scores are in the checkpoint that the run goes on from
        started = time.perf_counter()
        self._heart.beat("evaluating", self.step)
        self._view.evaluating()
        self._progress("evaluating")
        before, stop = self._stepper.pull_to_read(), in_evaluation(self._stop)
        most, schema = self.spec.train.eval_batches, self._dataset.schema
        scores = evaluate(self._model, self._eval_loader, schema, max_batches=most, stop=stop, before=before)
        if scores is None:
            return None
        seconds = time.perf_counter() - started
        self._reporter.metric(self.step, {f"eval/{name}": value for name, value in scores.values().items()})
        said = scores.words()
        details = {"step": self.step, "seconds": round(seconds, 3), **scores.values()}
        self._reporter.event("evaluated", f"step {self.step}: {said}", details)
        self._view.say(f"evaluated after step {self.step}: {said} ({scores.examples:,} held-out examples)")
        seconds = time.perf_counter() - started
        self._eval_seconds += seconds
        self._goodput.add("evaluate", seconds)
        self._speed.leave_out(seconds)
        self._evaluated = self.step
        return scores

    def _compiling(self, reason: str) -> None:
        self._heart.beat("compiling", self.step)
        self._view.compiling(reason)
        self._progress("compiling")
        self._stop.end_at_once()

    def _compiled(self, event: CompileEvent) -> None:
        self._stop.end_between_steps()
        self._view.compiled()
        if self._saving is not None:
            self._saving.key = event.key
        text = f"{event.reason}: {event.seconds:.1f} s on {event.backend} ({event.nodes} nodes, {SOURCES[event.cache]})"
        self._event(event.name, text, dataclasses.asdict(event))

    def _event(self, name: str, text: str, data: dict[str, Any]) -> None:
        self._reporter.event(name, text, {"step": self.step, **data})
        self._view.say(f"{name}: {text}")

    def _warned(self, warning: CompileWarning) -> None:
        self._event(warning.name, warning.text, warning.data)

    def _summary(self, scores: Scores) -> RunSummary:
        first = scores.values()
        return RunSummary(
            backend=self.spec.compile.backend,
            steps=self.step,
            examples=self._speed.examples,
            examples_per_s=self._speed.examples_per_s_overall,
            tokens=self._speed.tokens,
            tokens_per_s=self._speed.tokens_per_s_overall,
            compile_s=self._compile_seconds,
            train_s=self._speed.seconds,
            eval_s=self._eval_seconds,
            final_loss=self._last_loss if math.isfinite(self._last_loss) else None,
            auc=first.get("auc"),
            ne=first.get("ne"),
            eval_examples=scores.examples,
            baselines={name: BaselineScore(auc=auc) for name, auc in baseline_aucs(self._dataset).items()},
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            versions=software_versions(),
            goodput=self._goodput.share,
            chip_hours=self._goodput.chip_hours,
            time_s=self._goodput.seconds(),
        )
