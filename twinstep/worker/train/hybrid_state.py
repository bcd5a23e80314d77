"""What HybridParallel holds: the plan of tables, the divided ones, and the model and optimizers of the dense step."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinstep.worker.checkpoint.content import live_tensors
from twinstep.worker.compile.state import materialise
from twinstep.worker.embedding.collection import EmbeddingCollection, tables_of
from twinstep.worker.embedding.hybrid.given import lookups_of, without
from twinstep.worker.embedding.hybrid.plan import TablePlan, TableSize, plan_tables
from twinstep.worker.embedding.hybrid.tables import DividedTables, TableUse, Whole
from twinstep.worker.embedding.optim import build_optimizer, split_parameters
from twinstep.worker.train.engines import Parts
from twinstep.worker.train.group import Group


class HybridState:
    """A run's state on one process, beside its live model."""

    def __init__(self, parts: Parts) -> None:
        assert isinstance(parts.together, Group)  # noqa: S101
        self._group, self._live, self._live_optimizers = parts.together, parts.model, parts.optimizers
        for name, each in parts.optimizers.items():  # what is made at the first step could not be shared else
            materialise(name, each)
        collection, example = tables_of(parts.model), parts.loader.train_batch(0)[0]
        lookups = lookups_of(parts.model, example)
        self.plans = plans_of(parts, collection, {lookup.table for lookup in lookups})
        divided = {plan.table.name: plan for plan in self.plans if plan.kind != "data_parallel"}
        self.view = without(parts.model, divided)
        if parts.together.device.type != "cpu":
            self.view = copy.deepcopy(self.view).to(parts.together.device)
        self.optimizers = self._optimizers_of_view(parts)
        """`dense`, and `sparse` where a table is not divided."""
        uses = [
            TableUse(plan=plan, lookups=tuple(n for n, lookup in enumerate(lookups) if lookup.table == name))
            for name, plan in divided.items()
        ]
        self.tables = (
            DividedTables(
                uses,
                pooled=lookups[0].ids.dim() > 1,
                optimizer=parts.spec.optimizers.sparse,
                device=parts.together.device,
                group=parts.together.tables,
                on_host=gpus_of_a_host(parts.together),
            )
            if uses
            else None
        )
        self._whole: Whole = {name: _of_table(collection, parts.optimizers["sparse"], name) for name in divided}
        self.updates = 0
        """Steps whose update the tables have."""
        self._rate: float | None = None
        self.push()

    def _optimizers_of_view(self, parts: Parts) -> dict[str, Optimizer]:
        dense, kept = split_parameters(self.view)
        spec, own = parts.spec.optimizers, {}
        for name, kind, params in (("dense", spec.dense, dense), ("sparse", spec.sparse, kept)):
            if not params:
                continue
            own[name] = build_optimizer(kind, [parameter for _, parameter in params])
            for _, parameter in params:
                if parameter in self._live_optimizers[name].state:  # on a GPU the parameters are copies, with their own
                    own[name].state[parameter] = self._live_optimizers[name].state[parameter]
            materialise(name, own[name])
        return own

    def take_rates(self) -> None:
        """Use the learning rates that the live optimizers have now."""
        for name, own in self.optimizers.items():
            for group, live in zip(own.param_groups, self._live_optimizers[name].param_groups, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(float(live["lr"]))
                else:
                    group["lr"] = float(live["lr"])
        rate = float(self._live_optimizers["sparse"].param_groups[0]["lr"])
        if self.tables is not None and rate != self._rate:
            self.tables.set_learning_rate(rate)
            self._rate = rate

    def push(self) -> None:
        """Take state from the live model and optimizers."""
        self._copy(into_live=False)
        if self.tables is not None:
            self.tables.push(self._whole)

    def pull(self) -> None:
        """Bring the live model and optimizers up to date; a collective."""
        self._copy(into_live=True)
        if self.tables is not None:
            self.tables.pull(self._whole)
            self._count()

    def pull_own(self) -> dict[str, list[tuple[int, int, int]]]:
        """Bring this process's rows up to date, and what is not divided by rows; a collective.

        Returns:
            By path, of what is divided by rows: first row, the one after the last, and who has them.
        """
        self._copy(into_live=True)
        if self.tables is None:
            return {}
        held = self.tables.pull_own(self._whole)
        self._count()
        live = live_tensors(self._live, self._live_optimizers)
        paths = {tensor.data_ptr(): path for path, tensor in live.items() if tensor.numel()}
        return {paths[self._whole[table][name].data_ptr()]: rows for (table, name), rows in held.items()}

    def _count(self) -> None:
        """Say how many steps tables have taken, where their optimizer counts them."""
        for tensors in self._whole.values():
            if "step" in tensors and self.updates:
                tensors["step"].fill_(self.updates)

    @torch.no_grad()
    def _copy(self, *, into_live: bool) -> None:
        """Copy what the dense step has of its own, on a GPU; on a CPU it is the live tensors themselves."""
        live = live_tensors(self._live, self._live_optimizers)
        for path, own in live_tensors(self.view, self.optimizers).items():
            if own is not live[path]:
                (live[path] if into_live else own).copy_(own if into_live else live[path])


def gpus_of_a_host(group: Group) -> int | None:
    """Return how many GPUs processes have on one host, the same everywhere; None on CPUs; a collective on GPUs."""
    return max(group.gather(group.ranks.local)) + 1 if group.device.type == "cuda" else None


def plans_of(parts: Parts, collection: EmbeddingCollection, used: set[str]) -> tuple[TablePlan, ...]:
    """Return how a run's tables are divided; one that nobody looks up is not."""
    assert isinstance(parts.together, Group)  # noqa: S101
    sizes = [
        TableSize(name=name, rows=len(weight), dim=weight.shape[1])
        for name, weight in collection.weights.items()
        if name in used
    ]
    return plan_tables(
        sizes,
        asked=parts.spec.embedding.sharding,
        processes=parts.together.ranks.size,
        sparse=parts.spec.optimizers.sparse.kind,
        device=parts.together.device.type,
    )


def _of_table(collection: EmbeddingCollection, optimizer: Optimizer, name: str) -> Mapping[str, Tensor]:
    weight = collection.weights[name]
    kept = {entry: value for entry, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
    return {"weight": weight.detach(), **kept}
