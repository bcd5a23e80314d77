"""What preflight compiles for a slice is what a worker on it asks for: one key, whatever host either runs on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile.key import CompileKey, reason
from twinstep.worker.compile.shipped import FOLDER, described, slice_key
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.data.batch import BATCH_DIMS, meta_batch
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.embedding.sparsecore.spec import Cores
from twinstep.worker.models.registry import build_meta_model, build_model
from twinstep.worker.train.ahead import slice_name
from twinstep.worker.train.asked import mesh_for, shipped_for, sizes_of, strategies_of
from twinstep.worker.train.engines import Parts
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.sparsecore import GivenBatch, SparseCoreStepper, ahead_parts
from twinstep.worker.train.step import make_train_step

SPEC = {
    "name": "small",
    "model": {"embedding_dim": 8, "transducer_dim": 16, "num_layers": 1, "linear_dim": 8, "attention_dim": 8,
              "hidden_dim": 16},
    "data": {"dataset": "synthetic", "synthetic_events": 1000, "batch_size": 8, "uih_len": 8, "num_candidates": 2},
    "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"},
}  # fmt: skip
OWN = SPEC | {
    "model": {
        "kind": "module", "factory": "ranker:build", "embedding_dim": 8,
        "source": str(Path(__file__).parents[3] / "examples" / "own_model"),
    },
}  # fmt: skip


def key_of(spec: JobSpec, dataset: Dataset, *, there: bool) -> CompileKey:
    """The key of a spec's step, of live tensors as a worker has them, or of the meta device."""
    model = build_model(spec, dataset.schema) if there else build_meta_model(spec, dataset.schema)
    model.train()
    compiler = StepCompiler(
        make_train_step(clip_norm=spec.train.clip_norm),
        model,
        build_optimizers(spec.optimizers, model),
        backend="xla",
        mesh=mesh_for(spec),
        batch_dims=BATCH_DIMS | MULTI_HOT_DIMS,
        strategies=strategies_of(spec.compile, spec.embedding.engine, model),
        ahead=True,
    )
    loader = Loader(dataset, spec.data, seed=spec.train.seed)
    batch = loader.train_batch(0)[0] if there else meta_batch(dataset.schema, spec.data)
    return slice_key(compiler.key(batch, sizes=sizes_of(spec)), "v5p:2x2x1")


@pytest.mark.parametrize(("given", "engine"), [(SPEC, "dense"), (SPEC, "ring"), (OWN, "ring")])
def test_the_key_of_the_meta_device_is_that_of_live_tensors(given: dict[str, Any], engine: str) -> None:
    spec = JobSpec.model_validate({**given, "embedding": {"engine": engine}})
    dataset = load_dataset(spec.data)
    assert isinstance(dataset, Dataset)
    ahead, here = key_of(spec, dataset, there=False), key_of(spec, dataset, there=True)
    assert ahead == here, reason(ahead, here)


@pytest.mark.parametrize(("given", "pipeline"), [(SPEC, "off"), (SPEC, "full"), (OWN, "full")])
def test_the_key_of_tables_on_sparsecores_is_that_of_a_run(given: dict[str, Any], pipeline: str) -> None:
    spec = JobSpec.model_validate(
        {
            **given,
            "accelerator": "cpu",
            "compile": {"backend": "xla"},
            "embedding": {
                "engine": "sparsecore",
                "pipeline": pipeline,
                "limits": {"batches": 2},
                "id_bound_check": "drop",
            },
        }
    )  # fmt: skip
    dataset = load_dataset(spec.data)
    assert isinstance(dataset, Dataset)
    ahead, here = sparsecore_key_ahead(spec, dataset), sparsecore_key_of_a_run(spec, dataset)
    assert ahead.around == here.around
    assert ahead == here, reason(ahead, here)


def sparsecore_key_ahead(spec: JobSpec, dataset: Dataset) -> CompileKey:
    from twinstep.worker.embedding.sparsecore.device.around import device_mesh

    model = build_meta_model(spec, dataset.schema)
    model.train()
    batch = meta_batch(dataset.schema, spec.data)
    cores = Cores(devices=1, per_device=1)
    parts = ahead_parts(
        spec, dataset, model, build_optimizers(spec.optimizers, model), batch, cores, backend="portable"
    )
    compiler = StepCompiler(
        parts.train_step,
        parts.model,
        parts.optimizers,
        backend="xla",
        mesh=mesh_for(spec),
        batch_dims=parts.batch_dims,
        strategies=strategies_of(spec.compile, spec.embedding.engine, model),
        around=parts.around(device_mesh(1)),
        ahead=True,
    )
    return slice_key(compiler.key(parts.batch, sizes=sizes_of(spec)), "v5p:2x2x1")


def sparsecore_key_of_a_run(spec: JobSpec, dataset: Dataset) -> CompileKey:
    model = build_model(spec, dataset.schema)
    model.train()
    loader = Loader(dataset, spec.data, seed=spec.train.seed)
    stepper = SparseCoreStepper(
        Parts(
            spec=spec, model=model, optimizers=build_optimizers(spec.optimizers, model), loader=loader,
            on_start=print, on_event=print, on_warning=print, tell=lambda *_: None,
            together=Together(Process(rank=0, count=1)),
        )
    )  # fmt: skip
    batch = stepper.prepare(loader.train_batch(0)[0])
    stepper._around.prepare(batch.buffers, None, 0)
    key = stepper._compiler.key(GivenBatch(batch.batch, stepper._activations), sizes=sizes_of(spec))
    stepper.close()
    return slice_key(key, "v5p:2x2x1")


def test_a_slice_spreads_the_step_over_all_its_devices_and_looks_into_its_own_folder(tmp_path: Path) -> None:
    spec = JobSpec.model_validate({**SPEC, "compile": {"cache_dir": str(tmp_path)}})
    mesh, shipped = mesh_for(spec), shipped_for(spec)
    assert mesh is not None
    assert shipped is not None
    assert mesh.size == parse_slice("v5p:2x2x1").devices == 4
    assert shipped.target == "v5p:2x2x1"
    assert shipped._store.directory == tmp_path / FOLDER
    assert shipped_for(JobSpec.model_validate({**SPEC, "compile": {"cache": False}})) is None
    assert shipped_for(JobSpec(name="a")) is None
    assert mesh_for(JobSpec(name="a")) is None


def test_several_slices_are_compiled_for_and_looked_for_as_several() -> None:
    spec = JobSpec.model_validate({**SPEC, "data": SPEC["data"] | {"batch_size": 16}, "accelerator": {
        "kind": "tpu", "generation": "v5p", "topology": "2x2x2", "slices": 2}})  # fmt: skip
    mesh, shipped = mesh_for(spec), shipped_for(spec)
    assert mesh is not None
    assert shipped is not None
    assert shipped.target == slice_name(spec) == "v5p:2x2x2 × 2"
    assert mesh.size == parse_slice(shipped.target).devices == 16
    one, other = (SimpleNamespace(device_kind="TPU", coords=(0, 0, 0), slice_index=each) for each in (0, 1))
    assert described([one]) != described([other])
