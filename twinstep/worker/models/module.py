"""A user's own nn.Module as a job's model: made by its factory, held to the contract, its outputs graded.

`registry.py` calls `build_module` for `model: {kind: module}`; `factory.py` finds the factory. What a factory is called
with is a ModuleConfig; what its module is called with is the batch that built-in models take (`data/batch.py`,
`data/multi_hot.py`), and it returns logits, or (logits, loss). docs/howto/own-model.md says it to users.

# Shapes: Q tasks, B rows, K candidate slots (1 in a MultiHotBatch), U history slots of a row.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from twinstep.spec.errors import ToldToStop, TrainError, TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.module import ModuleSpec
from twinstep.worker.data.events import DataSchema
from twinstep.worker.data.multi_hot import AnyBatch, AnySchema, MultiHotSchema
from twinstep.worker.embedding.collection import (
    EmbeddingCollection,
    GivenCollection,
    Lookup,
    in_place_of_tables,
)
from twinstep.worker.embedding.optim import split_parameters
from twinstep.worker.models.config import (
    BagConfig,
    ContextualConfig,
    ItemFeatureConfig,
    TableConfig,
    TaskConfig,
    table_configs,
    task_configs,
)
from twinstep.worker.models.factory import check_arguments, find_factory, kind_of, place_of, said_of
from twinstep.worker.models.heads import ModelOutput, count_binary, task_losses
from twinstep.worker.models.memory import check_memory

GIVEN_ROWS = ("sparsecore", "torchrec")
"""Engines that look rows up outside the module, and ask it beforehand for which: by its `lookups`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleConfig:
    """What a factory of an nn.Module is called with: what the job's data and spec say of the model.

    A dataset of histories has `contextual`, `item_features`, `action_bits` and `uih_len`; one of rows has `num_dense`
    and `bags`. How many rows and candidates there are a module reads off its batch: held-out ones have other numbers.
    """

    tables: tuple[TableConfig, ...]
    """Tables that the features need, of `model.embedding_dim` floats a row."""
    tasks: tuple[TaskConfig, ...]
    """What is predicted, in the order of the logits; binary tasks stand before regressions."""
    table_std: float
    """Standard deviation of the normal that tables start from: `embedding.init_std`."""
    contextual: tuple[ContextualConfig, ...] = ()
    """C features of a user, one id per row each, in the order of `batch.contextual_ids`."""
    item_features: tuple[ItemFeatureConfig, ...] = ()
    """F features of an event or candidate, in the order of `batch.uih_ids`, `batch.cand_ids`; the item's id first."""
    action_bits: int = 0
    """J: bits of `batch.uih_actions`."""
    uih_len: int = 0
    """U: history slots of a row."""
    num_dense: int = 0
    """N: dense features of a row."""
    bags: tuple[BagConfig, ...] = ()
    """Multi-hot features, in the order of `batch.lengths`; each has `max_ids` columns of `batch.ids`."""

    def embedding_collection(self, names: Iterable[str] | None = None) -> EmbeddingCollection:
        """Return these tables (None: all) as a collection, filled; `collection(name, ids, valid)` looks rows up.

        Rows that a batch names are then all that a step updates, and engines of tables may divide them.

        Raises:
            TrainError: a name is no table of the job's data, or these tables cannot fit into this machine's memory.
        """
        known = {table.name: table for table in self.tables}
        wanted = list(known if names is None else names)
        if unknown := [name for name in wanted if name not in known]:
            raise TrainError(f"the data has no table {unknown[0]!r}", remedy=f"tables: {', '.join(known)}")
        if torch.get_default_device().type != "meta":
            check_memory([known[name] for name in wanted])
        found = EmbeddingCollection({name: (known[name].rows, known[name].dim) for name in wanted})
        for weight in found.weights.values():
            nn.init.normal_(weight, std=self.table_std)
        return found


def module_config(spec: JobSpec, schema: AnySchema) -> ModuleConfig:
    """Return what a spec and a schema say to a factory."""
    shared: dict[str, Any] = {
        "tables": table_configs(schema, spec.model.embedding_dim),
        "tasks": task_configs(schema),
        "table_std": spec.embedding.init_std,
    }
    if isinstance(schema, MultiHotSchema):
        bags = tuple(BagConfig(name=each.name, table=each.table, max_ids=each.max_ids) for each in schema.features)
        return ModuleConfig(**shared, num_dense=len(schema.dense), bags=bags)
    assert isinstance(schema, DataSchema)  # noqa: S101
    return ModuleConfig(
        **shared,
        contextual=tuple(ContextualConfig(name=each.name, table=each.table) for each in schema.contextual),
        item_features=tuple(ItemFeatureConfig(name=each.name, table=each.table) for each in schema.item_features),
        action_bits=schema.action_bits,
        uih_len=spec.data.uih_len,
    )


class GradedModule(nn.Module):
    """A user's module with the losses of its tasks; `model(batch)` gives a ModelOutput, as every model does."""

    def __init__(self, module: nn.Module, config: ModuleConfig, *, named: str, own_loss: bool) -> None:
        """Grade `module`, which errors call `named`; unless `own_loss`, it may return no loss of its own."""
        super().__init__()
        self.module = module
        self._named, self._own_loss = named, own_loss
        self._num_binary = count_binary(config.tasks)

    def forward(self, batch: AnyBatch) -> ModelOutput:
        """Return the losses and the logits, [Q, B, K].

        Raises:
            TrainError: the module fails, or returns something else than it is to; never while a step is captured,
                whose errors name the user's line by themselves.
        """
        logits_QBK, loss = self._read(self._called(batch), batch)
        losses_Q = task_losses(
            logits_QBK.flatten(1), batch.labels.flatten(1), batch.weights.flatten(1), num_binary=self._num_binary
        )
        return ModelOutput(loss=losses_Q.sum() if loss is None else loss, task_losses=losses_Q, logits=logits_QBK)

    def lookups(self, batch: AnyBatch) -> list[Lookup]:
        """Return what the forward asks the collection for, in that order; the module's own word."""
        found: list[Lookup] = self.module.lookups(batch)  # type: ignore[operator]
        return found

    def _called(self, batch: AnyBatch) -> Any:
        try:
            return self.module(batch)
        except (TwinstepError, MemoryError, ToldToStop):
            raise
        except (Exception, SystemExit) as error:
            if get_proxy_mode() is not None and isinstance(error, Exception):
                raise
            raise TrainError(
                f"the forward of {self._named} fails{place_of(error)}: {said_of(error)}",
                remedy="mend it; the fields of a batch and their shapes: docs/howto/own-model.md",
            ) from error

    def _read(self, output: Any, batch: AnyBatch) -> tuple[Tensor, Tensor | None]:
        """Return logits, [Q, B, K] float32, and the loss that came with them."""
        pair = isinstance(output, tuple | list) and len(output) == 2
        logits, loss = output if pair else (output, None)
        wanted = list(batch.labels.shape)
        if not isinstance(logits, Tensor) or not (loss is None or isinstance(loss, Tensor)):
            raise self._wrong(f"{kind_of(output)}, not logits", f"return a tensor of the shape {wanted}")
        if list(logits.shape) != wanted or not logits.is_floating_point():
            squeezed = list(logits.shape) in (wanted[1:], [each for each in wanted if each > 1])
            how = f"logits.reshape({', '.join(map(str, wanted))})" if squeezed else "see batch.labels, which has it too"
            raise self._wrong(
                f"logits of the shape {list(logits.shape)} ({logits.dtype}), not {wanted}: tasks, rows, candidates", how
            )
        if loss is not None and (loss.dim() or not loss.is_floating_point()):
            raise self._wrong(f"a loss of the shape {list(loss.shape)}, not []", "return its mean or sum: one number")
        if loss is not None and not self._own_loss:
            raise self._wrong(
                "a loss of its own, and embedding.engine torchrec weighs each task's over processes",
                "return the logits alone, or another embedding.engine",
            )
        if torch.is_grad_enabled() and self.training and not (logits if loss is None else loss).requires_grad:
            raise self._wrong(
                "what depends on no parameter: nothing could be trained", "leave out torch.no_grad and .detach()"
            )
        return logits.to(torch.float32), loss

    def _wrong(self, what: str, remedy: str) -> TrainError:
        return TrainError(f"the forward of {self._named} returns {what}", remedy=remedy)


def build_module(spec: JobSpec, schema: AnySchema) -> GradedModule:
    """Return the module that a spec's factory makes, graded; filled from `spec.train.seed`, on the default device.

    Generators of torch, numpy and Python are left alone.

    Raises:
        SpecError: the factory cannot be imported, is not there, or does not take its arguments.
        TrainError: it fails, or what it returns is no module that a job can train.
    """
    model = spec.model
    assert isinstance(model, ModuleSpec)  # noqa: S101
    factory, config = find_factory(model), module_config(spec, schema)
    check_arguments(factory, model, config)
    try:
        with _seeded(spec.train.seed):
            made = factory(config, **model.arguments)
    except (TwinstepError, MemoryError, ToldToStop):
        raise
    except (Exception, SystemExit) as error:
        meta = torch.get_default_device().type == "meta"
        raise TrainError(
            f"model.factory {model.factory} fails{place_of(error)}: {said_of(error)}",
            remedy="ahead of time it is called on the meta device: read no tensor's value" if meta else "mend it",
        ) from error
    if isinstance(made, nn.Module) and torch.get_default_device().type == "meta":
        made = made.to("meta")  # what was read from arrays is elsewhere yet
    _check_module(made, config, spec)
    return GradedModule(made, config, named=model.factory, own_loss=spec.embedding.engine != "torchrec")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that a factory may draw first values from, and leave them as they were."""
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


def _check_module(made: Any, config: ModuleConfig, spec: JobSpec) -> None:
    named, engine = f"model.factory {spec.model.factory}", spec.embedding.engine  # type: ignore[union-attr]
    if not isinstance(made, nn.Module):
        what = f"the class {made.__name__} itself" if isinstance(made, type) else kind_of(made)
        raise TrainError(f"{named} returns {what}, not an nn.Module", remedy="return the module that it makes")
    if not any(each.requires_grad for each in made.parameters()):
        raise TrainError(f"{named} returns a module without a parameter to train", remedy="give it one")
    here = torch.get_default_device().type
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if tensor.device.type != here:
            raise TrainError(
                f"{named} makes {name} on {tensor.device}",
                remedy="leave devices alone: whatever runs the step moves it",
            )
    collections = [each for each in made.modules() if isinstance(each, EmbeddingCollection)]
    if len(collections) > 1:
        raise TrainError(
            f"{named} makes {len(collections)} embedding collections",
            remedy="make one, config.embedding_collection(), for all tables; parts of the module may share it",
        )
    tables = {table.name: (table.rows, table.dim) for table in config.tables}
    for name, weight in (collections[0].weights if collections else {}).items():
        if tables.get(name) != tuple(weight.shape):
            raise TrainError(
                f"{named} makes the table {name} of {list(weight.shape)}, and the job's is "
                f"{list(tables[name]) if name in tables else 'none'}",
                remedy="make tables with config.embedding_collection(); model.embedding_dim is their width",
            )
    if engine in GIVEN_ROWS:
        _check_engine(made, collections, named, engine)


def _check_engine(made: nn.Module, collections: Sequence[EmbeddingCollection], named: str, engine: str) -> None:
    if not collections or not collections[0].weights:
        raise TrainError(
            f"{named} makes no embedding collection, and embedding.engine {engine} is for its tables",
            remedy="make tables with config.embedding_collection(), or embedding.engine: dense",
        )
    if not callable(getattr(made, "lookups", None)):
        raise TrainError(
            f"{named} returns a module without a method lookups, which embedding.engine {engine} asks before each step",
            remedy="define lookups(batch) -> list[twinstep.Lookup], in the order in which the forward asks its tables",
        )
    if not split_parameters(made)[0]:
        raise TrainError(
            f"{named} makes tables alone, and embedding.engine {engine} needs a parameter beside them",
            remedy="add one (a bias), or embedding.engine: dense",
        )


def check_lookups(model: nn.Module, batch: AnyBatch) -> None:
    """Hold a module's `lookups` against what its forward asks the collection for: a wrong order would mix up rows.

    Raises:
        TrainError: they differ in number, table or ids.
    """
    if not isinstance(model, GradedModule):
        return
    said = model.lookups(batch)
    collection = next(each for each in model.modules() if isinstance(each, EmbeddingCollection))
    recorder = _Recorder({name: int(weight.shape[1]) for name, weight in collection.weights.items()})
    view = in_place_of_tables(model, recorder)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            view(batch)
    finally:
        model.train(was_training)
    asked = recorder.asked
    for number in range(max(len(said), len(asked))):
        told = said[number] if number < len(said) else None
        real = asked[number] if number < len(asked) else None
        if told is None or real is None or not _same(told, real):
            raise TrainError(
                f"lookup {number + 1} is of {'nothing' if told is None else told.table} by the module's lookups, of "
                f"{'nothing' if real is None else real.table} by its forward, or their ids differ",
                remedy="let lookups name what the forward asks its collection for, in the same order",
            )


class _Recorder(GivenCollection):
    """Answers with zeros, and notes what it was asked."""

    def __init__(self, dims: dict[str, int]) -> None:
        super().__init__()
        self._dims = dims
        self.asked: list[Lookup] = []

    def forward(self, table: str, ids: Tensor, valid: Tensor) -> Tensor:
        """Note a lookup of single rows."""
        self.asked.append(Lookup(table, ids.reshape(-1), valid.expand(ids.shape).reshape(-1)))
        return torch.zeros(*ids.shape, self._dims[table])

    def bags(self, lookups: Sequence[Lookup]) -> list[Tensor]:
        """Note lookups of bags."""
        self.asked += lookups
        return [torch.zeros(each.ids.shape[0], self._dims[each.table]) for each in lookups]


def _same(told: Lookup, real: Lookup) -> bool:
    return (
        told.table == real.table
        and torch.equal(told.valid, real.valid)
        and torch.equal(torch.where(told.valid, told.ids, 0), torch.where(real.valid, real.ids, 0))
    )
