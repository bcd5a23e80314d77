"""Scores of a model's tasks: over a whole evaluation, or over a window of training steps; in all processes together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed

from twinstep.worker.data.metrics import BinaryMetrics, BinaryScores
from twinstep.worker.data.multi_hot import AnyBatch, AnySchema
from twinstep.worker.data.squared_error import RegressionMetrics, RegressionScores

# Shapes: Q tasks, B rows, K candidate slots.


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of all tasks over the same examples."""

    tasks: dict[str, BinaryScores | RegressionScores]
    """By task; the first is the one a summary speaks of."""

    @property
    def first(self) -> BinaryScores | RegressionScores:
        """Scores of the first task."""
        return next(iter(self.tasks.values()))

    @property
    def examples(self) -> int:
        """Candidates scored for the first task."""
        return self.first.examples

    def values(self) -> dict[str, float | None]:
        """Return AUC, NE, calibration and log loss of binary tasks, squared error of others, by name.

        Those of tasks after the first carry the task's name.
        """
        found: dict[str, float | None] = {}
        for index, (task, scores) in enumerate(self.tasks.items()):
            end = f"/{task}" if index else ""
            names = ("auc", "ne", "calibration", "log_loss") if isinstance(scores, BinaryScores) else ("mse",)
            found |= {f"{name}{end}": getattr(scores, name) for name in names}
        return found

    def words(self) -> str:
        """Return the scores in words; what is undefined says why."""
        said = [f"{name} {value:.4f}" for name, value in self.values().items() if value is not None]
        for index, (task, scores) in enumerate(self.tasks.items()):
            if scores.undefined is not None:
                name = "auc" if isinstance(scores, BinaryScores) else "mse"
                said.append(f"{name}{f'/{task}' if index else ''} undefined: {scores.undefined}")
        return ", ".join(said)


class TaskMetrics:
    """Collects what a model said of batches, task by task. Dummy rows and empty slots weigh 0 and never count."""

    def __init__(self, schema: AnySchema) -> None:
        self._tasks: dict[str, BinaryMetrics | RegressionMetrics] = {
            task.name: BinaryMetrics() if task.kind == "binary" else RegressionMetrics() for task in schema.tasks
        }

    def update(self, logits_QBK: Tensor, batch: AnyBatch) -> None:
        """Add a batch: logits of binary tasks, predictions of regressions."""
        parts = (part.detach().cpu() for part in (logits_QBK, batch.labels, batch.weights))
        for each, *numbers in zip(self._tasks.values(), *parts, strict=True):
            each.update(*numbers)

    def gather(self, *, stopped: bool = False) -> bool:
        """Add what the other processes collected, where there are any; say whether none of them was stopped.

        All processes of the group must call it at the same place.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return not stopped
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(
            found, None if stopped else {name: each.collected() for name, each in self._tasks.items()}
        )
        if any(each is None for each in found):
            return False
        own = distributed.get_rank()
        for name, each in self._tasks.items():
            each.merge(other[name] for rank, other in enumerate(found) if rank != own)
        return True

    def compute(self) -> Scores:
        """Score what was collected."""
        return Scores(tasks={name: each.compute() for name, each in self._tasks.items()})


class Window:
    """Scores of training batches, each as it was predicted before its step, over so many steps at a time.

    Args:
        steps: of a window; 0: there are none.
    """

    def __init__(self, schema: AnySchema, steps: int) -> None:
        self._schema, self._steps = schema, steps
        self._metrics = TaskMetrics(schema)

    def add(self, logits_QBK: Tensor, batch: AnyBatch, *, step: int) -> dict[str, float | None]:
        """Count the batch of step number `step`, from 1; return the window's scores by metric where it ends a window.

        A run that goes on from a checkpoint begins its first window there.
        """
        if not self._steps:
            return {}
        self._metrics.update(logits_QBK, batch)
        if step % self._steps:
            return {}
        whole, self._metrics = self._metrics, TaskMetrics(self._schema)
        whole.gather()
        return {f"window/{name}": value for name, value in whole.compute().values().items()}
