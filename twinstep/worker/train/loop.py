"""The loop: batches through the compiled step, numbers out, an evaluation where the spec wants one."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import torch

from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import BaselineScore, RunSummary
from twinstep.worker.compile import CompileEvent, Runner, StepCompiler
from twinstep.worker.data.baselines import baseline_aucs
from twinstep.worker.data.batch import Batch, BatchStats
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.environment import cache_directory
from twinstep.worker.train.evaluate import Scores, evaluate
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.report import Reporter
from twinstep.worker.train.step import make_train_step
from twinstep.worker.train.versions import software_versions

PROGRESS_EVERY = 1.0  # seconds between progress records
SPEED_WINDOW = 20  # steps that the reported speed is averaged over


class Stop(Protocol):
    """Tells the loop that somebody wants it to end."""

    asked: bool
    at_once: bool


class Trainer:
    """One run's data, model, optimizers and compiled step.

    Args:
        stop: asked between steps; a run that is asked to stop ends without a summary.
        run_dir: where the captured graph goes when the spec wants it saved.

    Raises:
        DataError: the dataset is missing or broken.
    """

    def __init__(
        self, spec: JobSpec, *, reporter: Reporter, view: ProgressView, stop: Stop, run_dir: Path | None
    ) -> None:
        self.spec = spec
        self.step = 0
        self._reporter, self._view, self._stop, self._run_dir = reporter, view, stop, run_dir
        torch.manual_seed(spec.train.seed)
        self._dataset = load_dataset(spec.data)
        self._loader = Loader(self._dataset, spec.data, seed=spec.train.seed)
        self._model = build_model(spec, self._dataset.schema)
        self._optimizers = build_optimizers(spec.optimizers, self._model)
        self._compiler = StepCompiler(
            make_train_step(clip_norm=spec.train.clip_norm),
            self._model,
            self._optimizers,
            backend=spec.compile.backend,
            cache_dir=cache_directory(spec),
            on_start=self._compiling,
            on_event=self._compiled,
        )
        self._sizes = {
            "batch_size": spec.data.batch_size,
            "uih_len": spec.data.uih_len,
            "uih_budget": spec.data.uih_budget or spec.data.uih_len,
            "num_candidates": spec.data.num_candidates,
        }
        self._examples, self._tokens = 0, 0
        self._last_loss = math.nan
        self._saved_graphs: set[str] = set()
        self._speed = _Speed()
        self._last_progress = 0.0

    def train(self) -> RunSummary | None:
        """Run all steps and the last evaluation. Return the summary, or None when the run was asked to stop."""
        total, every = self.spec.train.steps, self.spec.train.eval_every
        eval_seconds = 0.0
        self._model.train()
        with Prefetch(self._loader.train_batches()) as batches:
            for batch, stats in batches:
                self._one_step(batch, stats)
                if self.step == total:
                    break
                if self._stop.asked:
                    return None
                if every and self.step % every == 0:
                    eval_seconds += self._evaluate().seconds
        scores = self._evaluate()
        return None if self._stop.asked else self._summary(scores, eval_seconds + scores.seconds)

    def _one_step(self, batch: Batch, stats: BatchStats) -> None:
        program = self._compiler.program(batch, sizes=self._sizes)
        if self.spec.debug.save_graph and isinstance(program, Runner) and program.key.digest not in self._saved_graphs:
            self._save_graph(program)
        started = time.perf_counter()
        output = program(batch)
        loss = float(output.loss)  # waits for the step
        seconds = time.perf_counter() - started
        self.step += 1
        self._last_loss = loss
        self._examples += stats.examples
        self._tokens += stats.real_tokens
        self._speed.add(seconds, stats.examples)
        if self.spec.debug.stop_on_nonfinite and not math.isfinite(loss):
            raise TrainError(
                f"the loss of step {self.step} is {loss}",
                remedy="lower optimizers.dense.lr, set train.clip_norm, or set debug.stop_on_nonfinite: false",
            )
        self._tell(output, stats, seconds)

    def _save_graph(self, program: Runner) -> None:
        """Write the captured graph as text, named by its key, beside the run's files, or here for a run by hand."""
        path = (self._run_dir or Path.cwd()) / f"graph-{program.key.digest}.txt"
        path.write_text(program.captured.text, encoding="utf-8")
        self._saved_graphs.add(program.key.digest)
        self._reporter.event("graph_saved", f"the captured graph is in {path.name}", {"file": path.name})
        self._view.say(f"captured graph: {path}")

    def _tell(self, output: Any, stats: BatchStats, seconds: float) -> None:
        """Report a step's numbers and where the run is."""
        step, total = self.step, self.spec.train.steps
        eta = self._speed.step_seconds * (total - step)
        if step % self.spec.train.log_every == 0 or step in (1, total):
            tasks = self._dataset.schema.tasks
            losses = {f"loss/{task.name}": float(each) for task, each in zip(tasks, output.task_losses, strict=True)}
            values = {
                "loss": self._last_loss,
                **(losses if len(tasks) > 1 else {}),
                "step_ms": seconds * 1e3,
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

    def _evaluate(self) -> Scores:
        self._view.evaluating()
        self._reporter.progress(
            "evaluating", self.step, self.spec.train.steps, examples_per_s=self._speed.examples_per_s, eta_s=None
        )
        self._compiler.pull()
        scores = evaluate(
            self._model, self._loader, self._dataset.schema, max_batches=self.spec.train.eval_batches, stop=self._stop
        )
        self._reporter.metric(self.step, {f"eval/{name}": value for name, value in scores.values().items()})
        said = ", ".join(f"{name} {value:.4f}" for name, value in scores.values().items() if value is not None)
        details = {"step": self.step, "seconds": round(scores.seconds, 3), **scores.values()}
        self._reporter.event("evaluated", f"step {self.step}: {said}", details)
        self._view.say(f"evaluated after step {self.step}: {said} ({scores.examples:,} held-out examples)")
        return scores

    def _compiling(self, reason: str) -> None:
        self._stop.at_once = True
        self._view.compiling(reason)
        self._reporter.progress("compiling", self.step, self.spec.train.steps, examples_per_s=None, eta_s=None)

    def _compiled(self, event: CompileEvent) -> None:
        self._stop.at_once = False
        source = "from cache" if event.from_cache else "anew"
        text = f"{event.reason}: {event.seconds:.1f} s on {event.backend} ({event.nodes} nodes, {source})"
        self._reporter.event(event.name, text, {"step": self.step, **dataclasses.asdict(event)})
        self._view.say(f"{event.name}: {text}")

    def _summary(self, scores: Scores, eval_seconds: float) -> RunSummary:
        first = next(iter(scores.tasks.values()))
        return RunSummary(
            backend=self.spec.compile.backend,
            steps=self.step,
            examples=self._examples,
            examples_per_s=self._speed.examples_per_s_overall,
            compile_s=self._compiler.compile_seconds,
            train_s=self._speed.seconds,
            eval_s=eval_seconds,
            final_loss=self._last_loss if math.isfinite(self._last_loss) else None,
            auc=first.auc,
            ne=first.ne,
            eval_examples=scores.examples,
            baselines={name: BaselineScore(auc=auc) for name, auc in baseline_aucs(self._dataset).items()},
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            versions=software_versions(),
        )


class _Speed:
    """Speed of the steps: over the last few for people, over all for the summary. Compiling is not in it."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW)
        self.seconds = 0.0
        self._examples = 0

    def add(self, seconds: float, examples: int) -> None:
        self._recent.append((seconds, examples))
        self.seconds += seconds
        self._examples += examples

    @property
    def step_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._recent) / len(self._recent)

    @property
    def examples_per_s(self) -> float:
        return sum(examples for _, examples in self._recent) / sum(seconds for seconds, _ in self._recent)

    @property
    def examples_per_s_overall(self) -> float:
        return self._examples / self.seconds if self.seconds else 0.0
