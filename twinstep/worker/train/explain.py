"""The compiler's view of a job spec's step: captured, annotated and transformed, and lowered only when asked.

`twinstep explain` calls `look_at`. Nothing is trained, and no run is started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.worker.train.environment import prepare_environment, usable_processors

if TYPE_CHECKING:
    from twinstep.worker.compile.inspection import Inspectable


def look_at(
    spec: JobSpec,
    *,
    backend: Literal["inductor", "xla"] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Inspectable:
    """Return the step that `spec` trains, captured for `backend` (the spec's own where none is named).

    Args:
        say: is told what is being done, since each may take many seconds.

    Raises:
        SpecError: the spec's backend is eager, which compiles nothing.
        TwinstepError: the spec asks for what is not here, data is missing, or the step cannot be captured.
    """
    if backend is None and spec.compile.backend == "eager":
        raise SpecError(
            "compile.backend is eager, which compiles nothing", remedy="--backend inductor, or --backend xla"
        )
    chosen = spec.compile.model_copy(update={"backend": backend or spec.compile.backend, "cache": False})
    spec = spec.model_copy(update={"compile": chosen})
    prepare_environment(spec)
    say("loading PyTorch")
    import torch

    from twinstep.worker.compile import StepCompiler
    from twinstep.worker.data.batch import BATCH_DIMS
    from twinstep.worker.data.datasets import load_dataset
    from twinstep.worker.data.loader import Loader
    from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS
    from twinstep.worker.embedding.optim import build_optimizers
    from twinstep.worker.models.registry import build_model
    from twinstep.worker.train.asked import mesh_for, strategies_of
    from twinstep.worker.train.step import make_train_step

    torch.set_num_threads(spec.runtime.threads or usable_processors())
    torch.manual_seed(spec.train.seed)
    say("reading data")
    dataset = load_dataset(spec.data)
    batch, _ = Loader(dataset, spec.data, seed=spec.train.seed).train_batch(0)
    model = build_model(spec, dataset.schema)
    model.train()
    compiler = StepCompiler(
        make_train_step(clip_norm=spec.train.clip_norm),
        model,
        build_optimizers(spec.optimizers, model),
        backend=chosen.backend,
        batch_dims=BATCH_DIMS | MULTI_HOT_DIMS,
        mesh=mesh_for(spec),
        strategies=strategies_of(chosen, spec.embedding.engine, model),
    )
    say("capturing the step")
    return compiler.look(batch, sizes={"batch_size": spec.data.batch_size, "uih_len": spec.data.uih_len})
