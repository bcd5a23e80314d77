"""One training job built for measuring: data, model, optimizers and step, as `twinstep.worker.train` builds them.

The children of the benchmarks import it; it loads torch, so the parent never does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bench.measure import threads
from twinstep.spec.job import JobSpec
from twinstep.worker.compile.events import CompileEvent
from twinstep.worker.compile.lifted import BackendName
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.compile.strategies import Strategy
from twinstep.worker.data.batch import Batch
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.step import make_train_step


class Subject:
    """A model and its optimizers, freshly made, and batches to train them on.

    Raises:
        DataError: the dataset is missing or broken.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(threads())
        self.spec = JobSpec.model_validate(spec)
        torch.manual_seed(self.spec.train.seed)
        self.dataset = cast(Dataset, load_dataset(self.spec.data))
        self.model: nn.Module = build_model(self.spec, self.dataset.schema)
        self.model.train()
        self.optimizers = build_optimizers(self.spec.optimizers, self.model)

    def batches(self, count: int, **changes: Any) -> list[Batch]:
        """Return the first `count` training batches, with fields of the data spec changed."""
        data = self.spec.data.model_copy(update=changes)
        loader = Loader(self.dataset, data, seed=self.spec.train.seed)
        return [cast(Batch, loader.train_batch(number)[0]) for number in range(count)]

    def compiler(
        self,
        backend: str,
        *,
        cache_dir: Path | None,
        on_event: Callable[[CompileEvent], None] | None = None,
        strategies: Sequence[Strategy] | None = None,
    ) -> StepCompiler:
        """Return the job's step on one of our backends."""
        return StepCompiler(
            make_train_step(clip_norm=self.spec.train.clip_norm),
            self.model,
            self.optimizers,
            backend=cast(BackendName, backend),
            cache_dir=cache_dir,
            on_event=on_event,
            strategies=strategies,
        )
