"""The loop: batches through the compiled step, numbers out, an evaluation where the spec wants one."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import BaselineScore, RunSummary
from twinstep.worker.compile import CompileEvent, CompileWarning, Runner, StepCompiler
from twinstep.worker.data.baselines import baseline_aucs
from twinstep.worker.data.batch import BATCH_DIMS, BatchStats
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, AnyBatch
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.asked import strategies_of
from twinstep.worker.train.environment import cache_directory, mesh_axes
from twinstep.worker.train.evaluate import Scores, evaluate
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.report import Reporter
from twinstep.worker.train.step import make_train_step
from twinstep.worker.train.stop import StopSignal
from twinstep.worker.train.versions import software_versions

PROGRESS_EVERY = 1.0  # seconds between progress records
SOURCES = {"none": "anew", "disk": "from disk", "backend": "traced anew, from the backend's cache"}
SPEED_WINDOW = 20  # steps that the reported speed is averaged over


class Trainer:
    """One run's data, model, optimizers and compiled step.

    Args:
        stop: asked between steps; a run that is asked to stop ends without a summary.
        run_dir: where the captured graph goes when the spec wants it saved.

    Raises:
        DataError: the dataset is missing or broken.
        TrainError: from `train`, where the loss is not finite, or `runtime.max_seconds` are over.
    """

    def __init__(
        self, spec: JobSpec, *, reporter: Reporter, view: ProgressView, stop: StopSignal, run_dir: Path | None
    ) -> None:
        self.spec = spec
        self.step = 0
        self._begun = time.monotonic()
        self._reporter, self._view, self._stop, self._run_dir = reporter, view, stop, run_dir
        torch.manual_seed(spec.train.seed)
        self._dataset = load_dataset(spec.data)
        self._report_left_out()
        self._loader = Loader(self._dataset, spec.data, seed=spec.train.seed)
        self._model = build_model(spec, self._dataset.schema)
        self._optimizers = build_optimizers(spec.optimizers, self._model)
        self._compiler = StepCompiler(
            make_train_step(clip_norm=spec.train.clip_norm),
            self._model,
            self._optimizers,
            backend=spec.compile.backend,
            batch_dims=BATCH_DIMS | MULTI_HOT_DIMS,
            mesh=mesh_axes(spec),
            strategies=strategies_of(spec.compile),
            cache_dir=cache_directory(spec),
            check_finite=spec.debug.stop_on_nonfinite,
            on_start=self._compiling,
            on_event=self._compiled,
            on_warning=self._warned,
        )
        self._sizes = {
            "batch_size": spec.data.batch_size,
            "uih_len": spec.data.uih_len,
            "uih_budget": spec.data.uih_budget or spec.data.uih_len,
            "num_candidates": spec.data.num_candidates,
        }
        self._eval_seconds = 0.0
        self._last_loss = math.nan
        self._saved_graphs: set[str] = set()
        self._speed = _Speed()
        self._last_progress = 0.0

    def train(self) -> RunSummary | None:
        """Run all steps and the last evaluation. Return the summary, or None when the run was asked to stop."""
        total, every = self.spec.train.steps, self.spec.train.eval_every
        self._model.train()
        self._speed.start()
        with Prefetch(self._loader.train_batches()) as batches:
            while self.step < total:
                if every and self.step and self.step % every == 0:
                    self._evaluate()
                if self._stop.asked:
                    return None
                self._check_time()
                asked = time.perf_counter()
                batch, stats = next(batches)
                if self._stop.asked:
                    return None
                self._one_step(batch, stats, waited=time.perf_counter() - asked)
        self._speed.end()
        scores = self._evaluate()
        return None if scores is None else self._summary(scores)

    def _report_left_out(self) -> None:
        bad = self._dataset.left_out
        if bad.count:
            self._view.say(bad.summary())
            first = [str(row) for row in bad.first]
            self._reporter.event("rows_left_out", bad.summary(), {"count": bad.count, "kept": bad.kept, "first": first})

    def _check_time(self) -> None:
        """End a run by hand at its time limit. Under a control plane the supervisor, which started before, is first."""
        limit = self.spec.runtime.max_seconds
        if limit is not None and time.monotonic() - self._begun > limit:
            raise TrainError(
                f"stopped at its time limit after step {self.step}: runtime.max_seconds is {limit:g}",
                remedy="raise runtime.max_seconds, or lower train.steps",
            )

    def _one_step(self, batch: AnyBatch, stats: BatchStats, *, waited: float) -> None:
        started, compiled = time.perf_counter(), self._compiler.compile_seconds
        try:
            program = self._compiler.program(batch, sizes=self._sizes)
        finally:
            self._stop.end_between_steps()  # `_compiling` made it otherwise, and a compile that failed says no word
        if self.spec.debug.save_graph and self.spec.compile.backend != "eager":
            self._save_graph(self._compiler.runner(batch, sizes=self._sizes))
        output = program(batch)
        loss = float(output.loss)  # waits for the step
        compiling = self._compiler.compile_seconds - compiled
        seconds = time.perf_counter() - started - compiling
        self.step += 1
        self._last_loss = loss
        self._speed.leave_out(compiling)
        self._speed.lap(stats.examples)
        if self.spec.debug.stop_on_nonfinite and not math.isfinite(loss):
            raise TrainError(
                f"the loss of step {self.step} is {loss}",
                remedy="lower optimizers.dense.lr, set train.clip_norm, or set debug.stop_on_nonfinite: false",
            )
        self._tell(output, stats, step_ms=seconds * 1e3, data_wait_ms=waited * 1e3)

    def _save_graph(self, program: Runner) -> None:
        """Write the captured graph as text, named by its key, beside the run's files, or here for a run by hand."""
        if program.key.digest in self._saved_graphs:
            return
        self._saved_graphs.add(program.key.digest)
        path = (self._run_dir or Path.cwd()) / f"graph-{program.key.digest}.txt"
        try:
            path.write_text(program.captured.text, encoding="utf-8")
        except OSError as error:  # a wish for looking closer, no reason to end a run
            self._view.say(f"the captured graph cannot be written to {path}: {error.strerror}")
            return
        self._reporter.event("graph_saved", f"the captured graph is in {path.name}", {"file": path.name})
        self._view.say(f"captured graph: {path}")

    def _tell(self, output: Any, stats: BatchStats, *, step_ms: float, data_wait_ms: float) -> None:
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
                "data_wait_ms": data_wait_ms,
                "examples_per_s": self._speed.examples_per_s,
                "real_tokens": float(stats.real_tokens),
                "dummy_tokens": float(stats.dummy_tokens),
                "events_cut": float(stats.events_cut),
            }
            self._reporter.metric(step, values)
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY or step == total:
            self._last_progress = now
            self._reporter.progress("training", step, total, examples_per_s=self._speed.examples_per_s, eta_s=eta)
        self._view.step(step, loss=self._last_loss, examples_per_s=self._speed.examples_per_s, eta_s=eta)

    def _evaluate(self) -> Scores | None:
        """Score held-out data and report it; None, and not a word, where a stop was asked for meanwhile."""
        started = time.perf_counter()
        self._view.evaluating()
        self._reporter.progress(
            "evaluating", self.step, self.spec.train.steps, examples_per_s=self._speed.examples_per_s, eta_s=None
        )
        self._compiler.pull()
        scores = evaluate(
            self._model, self._loader, self._dataset.schema, max_batches=self.spec.train.eval_batches, stop=self._stop
        )
        if scores is None:
            return None
        seconds = time.perf_counter() - started
        self._reporter.metric(self.step, {f"eval/{name}": value for name, value in scores.values().items()})
        said = ", ".join(f"{name} {value:.4f}" for name, value in scores.values().items() if value is not None)
        details = {"step": self.step, "seconds": round(seconds, 3), **scores.values()}
        self._reporter.event("evaluated", f"step {self.step}: {said}", details)
        self._view.say(f"evaluated after step {self.step}: {said} ({scores.examples:,} held-out examples)")
        seconds = time.perf_counter() - started
        self._eval_seconds += seconds
        self._speed.leave_out(seconds)
        return scores

    def _compiling(self, reason: str) -> None:
        self._view.compiling(reason)
        self._reporter.progress("compiling", self.step, self.spec.train.steps, examples_per_s=None, eta_s=None)
        self._stop.end_at_once()

    def _compiled(self, event: CompileEvent) -> None:
        self._stop.end_between_steps()
        source = SOURCES[event.cache]
        text = f"{event.reason}: {event.seconds:.1f} s on {event.backend} ({event.nodes} nodes, {source})"
        self._reporter.event(event.name, text, {"step": self.step, **dataclasses.asdict(event)})
        self._view.say(f"{event.name}: {text}")

    def _warned(self, warning: CompileWarning) -> None:
        self._reporter.event(warning.name, warning.text, {"step": self.step, **warning.data})
        self._view.say(f"{warning.name}: {warning.text}")

    def _summary(self, scores: Scores) -> RunSummary:
        first = next(iter(scores.tasks.values()))
        return RunSummary(
            backend=self.spec.compile.backend,
            steps=self.step,
            examples=self._speed.examples,
            examples_per_s=self._speed.examples_per_s_overall,
            compile_s=self._compiler.compile_seconds,
            train_s=self._speed.seconds,
            eval_s=self._eval_seconds,
            final_loss=self._last_loss if math.isfinite(self._last_loss) else None,
            auc=first.auc,
            ne=first.ne,
            eval_examples=scores.examples,
            baselines={name: BaselineScore(auc=auc) for name, auc in baseline_aucs(self._dataset).items()},
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            versions=software_versions(),
        )


class _Speed:
    """Speed of whole iterations: from the moment a step's loss is known to the next step's.

    Reporting, waiting for data and looking up the program count; what is left out (compiling, evaluating) does not.
    Over the last few iterations for people, over all for the summary.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW)
        self._mark = 0.0
        self._left_out = 0.0
        self.seconds = 0.0
        self.examples = 0

    def start(self) -> None:
        """Begin the first iteration."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Take `seconds` of the current iteration for none of it."""
        self._left_out += seconds

    def lap(self, examples: int) -> None:
        """End an iteration that trained on `examples`, and begin the next."""
        seconds = self._since()
        self._recent.append((seconds, examples))
        self.examples += examples

    def end(self) -> None:
        """Count what followed the last step's loss: its report."""
        self._since()

    def _since(self) -> float:
        now = time.perf_counter()
        seconds = max(now - self._mark - self._left_out, 1e-9)
        self._mark, self._left_out = now, 0.0
        self.seconds += seconds
        return seconds

    @property
    def step_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._recent) / len(self._recent)

    @property
    def examples_per_s(self) -> float:
        return sum(examples for _, examples in self._recent) / sum(seconds for seconds, _ in self._recent)

    @property
    def examples_per_s_overall(self) -> float:
        return self.examples / self.seconds
