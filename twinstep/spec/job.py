"""JobSpec: everything a user says about a job, frozen; what is derived from it lives elsewhere.

Each field states its unit and meaning; unknown keys are refused. `twinstep schema` prints the JSON Schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StrictBool, StrictInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.accelerator import Accelerator, CpuSpec, KubernetesSpec
from twinstep.spec.base import INT32_MAX, MAX_BATCH, MAX_TABLES, Count, FieldName, Number, Spec
from twinstep.spec.columns import ColumnsSpec
from twinstep.spec.devices import BACKENDS, USUAL_BATCH, batch_problem, devices_problem, usual_batch
from twinstep.spec.embedding import (
    EmbeddingSpec,
    divided_problem,
    engine_on_tpu,
    processes_problem,
    rewind_problem,
    ring_problem,
    sparsecore_problem,
)
from twinstep.spec.model import DLRMv3Spec, Model
from twinstep.spec.optimizers import OptimizersSpec
from twinstep.spec.running import DebugSpec, RuntimeSpec
from twinstep.spec.sparsecore import GENERATIONS
from twinstep.spec.synthetic import SyntheticSpec

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX = 40  # leaves room for the suffixes that JobSet and Ray add to a 63-character DNS label
DatasetName = Literal[
    "ml-100k", "ml-1m", "ml-20m", "kuairand-1k", "streaming", "parquet", "synthetic", "synthetic-clicks", "criteo"
]
DATASETS_OF_FILES = ("ml-1m", "ml-20m", "kuairand-1k", "streaming", "parquet", "criteo")
"""Datasets that are read from `data.path`; the others need no files of the user's."""
AT_MOST = {"uih_budget": "uih_len", "eval_candidates": "num_candidates"}  # fields that are no larger than another
DataPath = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
RowsByName = Annotated[dict[FieldName, Annotated[StrictInt, Field(ge=1, le=INT32_MAX)]], Field(max_length=MAX_TABLES)]


class SplitSpec(Spec):
    """How events are divided into training and held-out ones."""

    by: Literal["time", "user"] = "time"
    """`time`: the newest share of all events is held out; `user`: the newest share of each user's events, where the
    dataset has users."""
    eval_fraction: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """Share of the events held out."""


class DataSpec(Spec):
    """Which data, and how it becomes batches."""

    dataset: DatasetName = "ml-100k"
    """`ml-100k`: MovieLens-100K from the installed recbole distribution; `ml-1m`, `ml-20m`, `kuairand-1k`, `streaming`:
    files as published, below `path`; `parquet`: your own, by `columns`; `criteo`: click logs for `dlrm`;
    `synthetic`: seeded histories of zipf ids;
    `synthetic-clicks`: seeded rows of dense and multi-hot features, in the form of the Criteo data, for `dlrm`."""
    path: Annotated[DataPath | None, Field(validate_default=True)] = None
    """Folder of the dataset's files: a whole local path or an fsspec URI; for datasets that are not shipped."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that breaks its format: `error` names it and ends the run; `skip` leaves it out and reports a count."""
    tasks: tuple[FieldName, ...] | None = None
    """What is predicted, of the dataset's tasks; null: all its binary ones."""
    features: tuple[FieldName, ...] | None = None
    """Features that the model sees, of the dataset's; null: all. The item's own id is always one."""
    columns: ColumnsSpec = ColumnsSpec()
    """Columns of the files of `dataset: parquet`."""
    hash_rows: RowsByName = Field(default_factory=dict)
    """Tables of `parquet` whose ids are hashed into so many rows; the others are numbered. Of `criteo` C1 to C26."""
    cache_dir: DataPath | None = None
    """Local folder, by its whole path, that keeps `criteo` as arrays for later runs, 170 bytes a row; null: none is."""
    vocabulary: DataPath | None = None
    """Local folder, by its whole path, of `parquet`'s vocabularies, one file per table: read if there, else written;
    null: numbered anew."""
    unlisted: Literal["row", "error"] = "row"
    """An id that a vocabulary does not list: `row` gives all of them row 0; `error` ends the run."""
    split: SplitSpec = SplitSpec()
    """Training and held-out events."""
    label_threshold: Annotated[Number, Field(ge=0)] = 4.0
    """Ratings from this one up are positive."""
    batch_size: Annotated[StrictInt, Field(ge=1, le=MAX_BATCH)] = USUAL_BATCH
    """B: samples per step, each one user at one moment with its candidates; as many for each device and, with `engine:
    sparsecore`, each SparseCore of a TPU. Where none is given, the least of 32 or more that these divide."""
    uih_len: Annotated[StrictInt, Field(ge=1, le=8192)] = 64
    """U: newest events kept of a user's interaction history (UIH), per sample."""
    uih_budget: Annotated[StrictInt, Field(ge=1, le=8192)] | None = None
    """UIH tokens per sample on average: a batch holds exactly batch_size × uih_budget; null means uih_len."""
    num_candidates: Annotated[StrictInt, Field(ge=1, le=1024)] = 8
    """K: candidate slots per sample."""
    eval_candidates: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Candidates per held-out sample, whose history ends before the first of them; null means num_candidates. With 1
    each held-out event is scored with all that its user did before it, at the price of a history each."""
    prefetch: Annotated[StrictInt, Field(ge=1, le=256)] = 2
    """Batches that lie ready ahead of the step; each packer may hold one more."""
    loader_workers: Annotated[StrictInt, Field(ge=0, le=64)] = 0
    """Processes that pack training batches ahead of the step; 0: a thread of the run's own process does."""
    rows: RowsByName = Field(default_factory=dict)
    """Rows of a table by name, where more are wanted than the dataset needs."""
    synthetic_events: Annotated[StrictInt, Field(ge=100, le=10_000_000)] = 20_000
    """Events, or rows, of a synthetic dataset; other datasets ignore it."""
    synthetic: SyntheticSpec = SyntheticSpec()
    """Sizes, seed and distributions of a synthetic dataset."""

    @field_validator("path")
    @classmethod
    def _path_is_needed(cls, value: str | None, info: ValidationInfo) -> str | None:
        dataset = info.data.get("dataset")  # not there where it is not valid itself
        if value is None and dataset in DATASETS_OF_FILES:
            allowed = "a folder or fsspec URI that holds the files"
            said = {"dataset": dataset, "allowed": allowed, "nearest": f"/data/{dataset}"}
            raise PydanticCustomError("between_fields", "is required with dataset: {dataset}", said)
        if value is not None and dataset is not None and dataset not in DATASETS_OF_FILES:
            said = {"dataset": dataset, "allowed": "null", "nearest": None}
            raise PydanticCustomError("between_fields", "has no effect with dataset: {dataset}", said)
        return value

    @field_validator("hash_rows", "cache_dir", "vocabulary", "unlisted", "eval_candidates")
    @classmethod
    def _dataset_looks_at_it(cls, value: Any, info: ValidationInfo) -> Any:
        dataset, name = info.data.get("dataset"), info.field_name or ""
        datasets = DATA_SETTINGS[name]
        if dataset is None or dataset in datasets or not value:  # null or empty: it is not set
            return value
        if value != (default := cls.__pydantic_fields__[name].get_default(call_default_factory=True)):
            allowed = f"the default, or dataset: {' or '.join(datasets)}"
            said = {"dataset": dataset, "allowed": allowed, "nearest": default}
            raise PydanticCustomError("between_fields", "has no effect with dataset: {dataset}", said)
        return value

    @field_validator("cache_dir", "vocabulary")
    @classmethod
    def _whole_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not value.startswith(("/", "~/")):
            last = value.rstrip("/").rsplit("/", 1)[-1].lstrip("~.")[:NAME_MAX] or info.field_name
            said = {"allowed": "a local path that begins with / or ~/", "nearest": f"/data/{last}"}
            raise PydanticCustomError(
                "between_fields", "is no whole path, and a worker starts in its run's folder", said
            )
        return value

    @field_validator("split")
    @classmethod
    def _split_has_an_effect(cls, value: SplitSpec, info: ValidationInfo) -> SplitSpec:
        if value.by != "time" and info.data.get("dataset") in DATASETS_OF_ROWS:
            said = {"part": "by", "dataset": info.data["dataset"], "allowed": "time", "nearest": "time"}
            raise PydanticCustomError("between_fields", "has no effect with dataset: {dataset}", said)
        return value

    @field_validator("tasks", "features")
    @classmethod
    def _named_once(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if value is not None and info.data.get("dataset") in DATASETS_OF_ROWS:
            said = {"dataset": info.data["dataset"], "allowed": "null", "nearest": None}
            raise PydanticCustomError("between_fields", "has no effect with dataset: {dataset}", said)
        if value is not None and (not value or len(set(value)) < len(value)):
            once = list(dict.fromkeys(value)) or None
            raise PydanticCustomError(
                "between_fields",
                "names one twice" if value else "is empty",
                {"allowed": "each once, or null for all", "nearest": once},
            )
        return value

    # A rule between fields stands at the field to be changed, after the field it looks at: the error then names it.
    @field_validator(*AT_MOST)
    @classmethod
    def _at_most_the_other(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = AT_MOST[info.field_name or ""]
        most = info.data.get(other)  # not there where it is not valid itself
        if value is not None and most is not None and value > most:
            said = {"other": other, "allowed": f"at most {most}, which is data.{other}", "nearest": most}
            raise PydanticCustomError("between_fields", "is more than data.{other}: nothing could fill it", said)
        return value

    @property
    def eval_slots(self) -> int:
        """Candidate slots per held-out sample."""
        return self.eval_candidates or self.num_candidates

    @property
    def uih_tokens(self) -> int:
        """UIH tokens of one batch."""
        return self.batch_size * (self.uih_budget or self.uih_len)


DATASETS_OF_ROWS = ("synthetic-clicks", "criteo")
"""Datasets of rows with dense and multi-hot features, which `dlrm` takes; the others hold histories, for `dlrmv3`. A
`module` takes both."""

DATA_SETTINGS = {
    "hash_rows": ("parquet", "criteo"),
    "cache_dir": ("criteo",),
    "vocabulary": ("parquet",),
    "unlisted": ("parquet",),
    "eval_candidates": tuple(name for name in get_args(DatasetName) if name not in DATASETS_OF_ROWS),
}
"""Which datasets look at a setting; others refuse it."""

StrategyName = Literal[
    "sparse_embedding", "fused_attention", "fused_update", "fold_layers", "mixed_precision", "quantize"
]


class CompileSpec(Spec):
    """How the step is compiled."""

    backend: Literal["inductor", "xla", "eager"] = "inductor"
    """What lowers the captured graph; eager runs the step as PyTorch does, as reference."""
    cache: StrictBool = True
    """Keep compiled programs on disk and reuse them."""
    cache_dir: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")] | None = None
    """Directory of that cache; null means the user's cache directory."""
    strategies: tuple[StrategyName, ...] | None = None
    """What the compiler is asked for, each once; null: those that change no result beyond rounding, [] for none."""
    memory_budget_mib: Count | None = None
    """Most MiB of activations and gradients that may live at once on a device: values are computed again to fit."""

    @field_validator("strategies")
    @classmethod
    def _each_once(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and len(set(value)) < len(value):
            once = list(dict.fromkeys(value))
            raise PydanticCustomError("between_fields", "names one twice", {"allowed": "each once", "nearest": once})
        return value


class TrainSpec(Spec):
    """How long to train, and what to look at meanwhile."""

    steps: Count = 400
    """Steps; the data is gone through again as often as needed."""
    eval_every: Annotated[StrictInt, Field(ge=0, le=INT32_MAX)] = 0
    """Steps between evaluations on held-out data; 0: only at the end."""
    eval_batches: Count | None = None
    """At most so many batches an evaluation; null: the whole held-out part."""
    log_every: Count = 1
    """Steps between reported metrics."""
    window_steps: Annotated[StrictInt, Field(ge=0, le=INT32_MAX)] = 100
    """Steps of a window over which training batches, each predicted before its step, are scored; 0: they are not."""
    lr_final: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Learning rates fall along half a cosine to this share of themselves at the last step; 1: they stay."""
    clip_norm: Annotated[Number, Field(gt=0)] | None = None
    """Global norm that dense gradients are clipped to; null: not clipped."""
    seed: Annotated[StrictInt, Field(ge=0, le=INT32_MAX)] = 0
    """Seed of parameters, sample order and dropout."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """At a loss that is NaN, infinite or a spike: fail; drop the batch; or go back a few steps, and drop all since."""
    loss_spike: Annotated[Number, Field(gt=1)] | None = None
    """A loss of so many times the median of the last 50 counts as a spike; null: none does."""


class CheckpointSpec(Spec):
    """Where a run's state is saved, and how often."""

    path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")] | None = None
    """Directory or fsspec URI (s3://, gs://), of which a control plane gives each job a part; null: one of its own."""
    every_steps: Count | None = None
    """Steps between checkpoints; null: not by steps."""
    every_seconds: Annotated[Number, Field(gt=0)] | None = None
    """Seconds between checkpoints; null: not by time."""
    at_end: StrictBool = True
    """Save the state after the last step too, where there is a place for it: the model that a run is for."""
    keep_last: Annotated[StrictInt, Field(ge=1, le=10_000)] = 2
    """Newest checkpoints that are kept."""
    keep_best: Annotated[StrictInt, Field(ge=0, le=10_000)] = 0
    """Checkpoints with the best held-out score that are kept besides; they are written after evaluations."""
    best_by: Literal["ne", "auc", "log_loss"] = "ne"
    """Score of the first task by which they are the best."""

    @property
    def periodic(self) -> bool:
        """Whether checkpoints are written while all goes well, and not only when a run is told to stop."""
        return self.every_steps is not None or self.every_seconds is not None or self.keep_best > 0


class JobSpec(Spec):
    """One training job, as its user asks for it."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_MAX, pattern=NAME_PATTERN)]
    """Lower-case letters, digits and '-', starting with a letter; at most 40 characters; need not be unique."""
    model: Model = DLRMv3Spec()
    """The model and its sizes."""
    data: DataSpec = DataSpec()
    """The dataset and its batches."""
    optimizers: OptimizersSpec = OptimizersSpec()
    """Dense and sparse optimizer."""
    accelerator: Accelerator = CpuSpec()
    """cpu, or a tpu slice, or gpus."""
    compile: Annotated[CompileSpec, Field(validate_default=True)] = CompileSpec()
    """Backend and cache; where no backend is given, a TPU has xla."""
    embedding: Annotated[EmbeddingSpec, Field(validate_default=True)] = EmbeddingSpec()
    """Engine of the tables."""
    train: TrainSpec = TrainSpec()
    """Length and evaluation."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Saved states, from which a run goes on that was stopped or killed."""
    debug: DebugSpec = DebugSpec()
    """Switches for looking closer."""
    runtime: RuntimeSpec = RuntimeSpec()
    """Threads and time limits."""
    kubernetes: KubernetesSpec = KubernetesSpec()
    """Image, queue, restarts and security of a job's pods."""

    @model_validator(mode="before")
    @classmethod
    def _what_follows(cls, data: Any) -> Any:
        """Take the accelerator's backend, engine and batch where none is given, and a dataset that the model takes."""
        if not isinstance(data, Mapping):
            return data
        accelerator, model = (data.get(name) for name in ("accelerator", "model"))
        kind = (
            accelerator.get("kind") if isinstance(accelerator, Mapping) else getattr(accelerator, "kind", accelerator)
        )
        if kind == "tpu":
            data = _filled(data, "compile", {"backend": BACKENDS["tpu"][0]})
            data = _filled(data, "embedding", {"engine": engine_on_tpu(data)})
        if isinstance(model, Mapping) and model.get("kind") == "dlrm":
            data = _filled(data, "data", {"dataset": DATASETS_OF_ROWS[0]})
        return _filled(data, "data", {"batch_size": usual_batch(data)})

    @field_validator("data")
    @classmethod
    def _model_takes_it(cls, value: DataSpec, info: ValidationInfo) -> DataSpec:
        kind = getattr(info.data.get("model"), "kind", None)  # not there where it is not valid itself
        if kind in (None, "module") or (kind == "dlrm") == (value.dataset in DATASETS_OF_ROWS):
            return value
        every = get_args(DataSpec.model_fields["dataset"].annotation)
        fitting = [name for name in every if (kind == "dlrm") == (name in DATASETS_OF_ROWS)]
        raise PydanticCustomError(
            "between_fields",
            "holds what a {kind} does not take",
            {"part": "dataset", "kind": kind, "allowed": ", ".join(fitting), "nearest": fitting[0]},
        )

    @field_validator("accelerator")
    @classmethod
    def _source_is_there(cls, value: Accelerator, info: ValidationInfo) -> Accelerator:
        source = getattr(info.data.get("model"), "source", None)
        if source is not None and value.kind != "cpu" and not source.startswith("/"):
            said: dict[str, Any] = {"allowed": "null, or a folder of the image by its whole path", "nearest": None}
            said |= {"at": ("model", "source"), "given": source, "kind": value.kind}
            raise PydanticCustomError("between_fields", "leads nowhere in a pod, where a {kind} job runs", said)
        return value

    @field_validator("embedding")
    @classmethod
    def _has_a_ring(cls, value: EmbeddingSpec, info: ValidationInfo) -> EmbeddingSpec:
        said = ring_problem(value, *map(info.data.get, ("compile", "accelerator")))
        if said is not None:
            raise PydanticCustomError("between_fields", "{problem}", said)
        return value

    @field_validator("embedding")
    @classmethod
    def _has_sparsecores(cls, value: EmbeddingSpec, info: ValidationInfo) -> EmbeddingSpec:
        if value.sparsecore is None or "accelerator" not in info.data:  # not there where it is not valid itself
            return value
        generation = getattr(info.data["accelerator"], "generation", None)
        if generation not in GENERATIONS:
            raise PydanticCustomError(
                "between_fields",
                "has no effect on {place}, whose SparseCores nobody can program",
                {
                    "part": "sparsecore",
                    "place": f"a {generation}" if generation else f"a {info.data['accelerator'].kind}",
                    "allowed": f"null, or a TPU of generation {', '.join(GENERATIONS)}",
                    "nearest": None,
                },
            )
        return value

    @field_validator("embedding")
    @classmethod
    def _engine_fits(cls, value: EmbeddingSpec, info: ValidationInfo) -> EmbeddingSpec:
        said = sparsecore_problem(value, *map(info.data.get, ("compile", "accelerator", "optimizers")))
        if said is not None:
            raise PydanticCustomError("between_fields", "sparsecore {problem}", said)
        return value

    @field_validator("train")
    @classmethod
    def _goes_back_exactly(cls, value: TrainSpec, info: ValidationInfo) -> TrainSpec:
        said = rewind_problem(value.on_nan, info.data.get("embedding"))
        if said is not None:
            raise PydanticCustomError("between_fields", "{problem}", said)
        return value

    @field_validator("debug")
    @classmethod
    def _profiles_steps_there_are(cls, value: DebugSpec, info: ValidationInfo) -> DebugSpec:
        if value.profile is None or "train" not in info.data:  # not there where it is not valid itself
            return value
        steps, asked = info.data["train"].steps, value.profile
        if asked.last > steps:
            count = min(asked.steps, steps)
            raise PydanticCustomError(
                "between_fields",
                "ends at step {last}, and train.steps is {steps}",
                {
                    "part": "profile",
                    "last": asked.last,
                    "steps": steps,
                    "allowed": f"start + steps - 1 of at most {steps}",
                    "nearest": {"start": min(asked.start, steps - count + 1), "steps": count},
                },
            )
        return value

    @field_validator("embedding")
    @classmethod
    def _divided_tables_fit(cls, value: EmbeddingSpec, info: ValidationInfo) -> EmbeddingSpec:
        said = divided_problem(value, *map(info.data.get, ("compile", "accelerator", "optimizers")))
        if said is not None:
            raise PydanticCustomError("between_fields", "torchrec {problem}", said)
        return value

    @field_validator("embedding")
    @classmethod
    def _batch_is_shared_out(cls, value: EmbeddingSpec, info: ValidationInfo) -> EmbeddingSpec:
        said = batch_problem(value.engine, *map(info.data.get, ("compile", "accelerator", "data")))
        if said is not None:
            raise PydanticCustomError("between_fields", "{problem}", said)
        return value

    @field_validator("runtime")
    @classmethod
    def _engine_is_divided(cls, value: RuntimeSpec, info: ValidationInfo) -> RuntimeSpec:
        said = processes_problem(value.processes, *map(info.data.get, ("embedding", "accelerator")))
        if said is not None:
            raise PydanticCustomError("between_fields", "are for {problem}", said)
        return value

    @field_validator("compile")
    @classmethod
    def _devices_run_it(cls, value: CompileSpec, info: ValidationInfo) -> CompileSpec:
        if (said := devices_problem(value, info.data.get("accelerator"))) is not None:
            raise PydanticCustomError("between_fields", "{problem}", said)
        return value


def _filled(data: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a spec's fields with `defaults` in the part `name`, where it is a mapping that lacks them."""
    part = data.get(name, {})
    return {**data, name: {**defaults, **part}} if isinstance(part, Mapping) else data
