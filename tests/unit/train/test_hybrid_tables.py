"""What FBGEMM keeps of divided tables, as it comes out and goes in; a group of one process, with the real modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from twinstep.spec.embedding import FUSED, FUSED_ON_GPUS
from twinstep.spec.optimizers import SparseOptimizerSpec
from twinstep.worker.embedding.hybrid import sharded
from twinstep.worker.embedding.hybrid.plan import TableSize, plan_tables

ROWS, DIM = 12, 8


@pytest.fixture
def group() -> Iterator[distributed.ProcessGroup]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.new_group()
    finally:
        distributed.destroy_process_group()


def made(kind: str, group: distributed.ProcessGroup, name: str = "t") -> Any:
    plans = plan_tables([TableSize(name=name, rows=ROWS, dim=DIM)], asked={name: "row_wise"}, processes=1, sparse=kind)
    optimizer = SparseOptimizerSpec(kind=kind, lr=0.1)  # type: ignore[arg-type]
    return sharded.shard(
        {plan: ["f"] for plan in plans},
        pooled=True,
        optimizer=optimizer,
        device=torch.device("cpu"),
        group=group,
        on_host=1,
    )


@pytest.mark.parametrize("kind", FUSED)
def test_each_tensor_that_an_optimizer_keeps_is_found_where_it_is(kind: str, group: distributed.ProcessGroup) -> None:
    assert set(sharded.KINDS) == set(sharded.STATE) == set(FUSED_ON_GPUS)
    found = {each.name: each for each in sharded.divided_tensors(made(kind, group), kind)}
    assert set(found) == {"weight", *sharded.STATE[kind].values()}
    for tensor in found.values():
        (piece,) = tensor.pieces
        assert piece.here is not None
        piece.here.fill_(3.0)
        assert piece.everywhere(group).unique().tolist() == [3.0]
    assert found["weight"].pieces[0].sizes == (ROWS, DIM)


def test_a_table_may_be_called_as_something_that_a_module_has(group: distributed.ProcessGroup) -> None:
    found = sharded.divided_tensors(made("rowwise_adagrad", group, name="type"), "rowwise_adagrad")
    assert {each.table for each in found} == {"type"}
    assert all(each.pieces[0].here is not None for each in found)


def test_a_key_that_nobody_knows_ends_the_run(group: distributed.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sharded.STATE, "adagrad", {"momentum1": "sum", "momentum2": "exp_avg_sq"})
    with pytest.raises(RuntimeError, match="FBGEMM keeps"):
        sharded.divided_tensors(made("adagrad", group), "adagrad")


def test_memory_that_nobody_wrote_is_never_sent(group: distributed.ProcessGroup) -> None:
    piece = sharded.Piece((0, 0), (ROWS, DIM), 0, None)
    with pytest.raises(RuntimeError, match="process 0 lacks the piece"):
        piece.everywhere(group)


def test_what_torchrec_calls_adams_moments_is_torchs(
    group: distributed.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is for GPUs; here SGD's module is given the state that TorchRec would show for it."""
    module, other = made("sgd", group), made("sgd", group)
    tensors = [next(iter(each.state_dict().values())) for each in (module, other)]
    shown = {"state": {"x.t.weight": {"t.momentum1": tensors[0], "t.exp_avg_sq": tensors[1]}}}
    monkeypatch.setattr(type(module.fused_optimizer), "state_dict", lambda self: shown)
    found = {each.name: each.pieces[0].here for each in sharded.divided_tensors(module, "adam")}
    assert set(found) == {"weight", "exp_avg", "exp_avg_sq"}
    for name, tensor in zip(("exp_avg", "exp_avg_sq"), tensors, strict=True):
        here = found[name]
        assert here is not None
        assert here.data_ptr() == tensor.local_shards()[0].tensor.data_ptr()


def test_an_optimizer_counts_on_from_where_a_checkpoint_was(group: distributed.ProcessGroup) -> None:
    module = made("adagrad", group)
    for steps in (40, 0):  # a later start too, after steps of its own, where FBGEMM alone would count on from those
        sharded.set_steps(module, steps)
        (kernel,) = sharded.kernels(module.fused_optimizer)
        assert (int(kernel.iter), int(kernel.iter_cpu)) == (steps, steps)


def test_a_shard_names_the_gpu_that_its_process_has_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GPUs on 2 hosts: process 9 has GPU 1 of its host, and there is none of number 9."""
    seen: list[Any] = []
    monkeypatch.setattr(
        sharded.EmbeddingBagCollectionSharder, "shard", lambda self, module, plan, *_: seen.append(plan)
    )
    monkeypatch.setattr(sharded.ShardingEnv, "from_process_group", lambda group: None)
    tables = [TableSize(name=name, rows=64, dim=8) for name in ("rows", "whole")]
    asked: Any = {"rows": "row_wise", "whole": "table_wise"}
    plans = plan_tables(tables, asked=asked, processes=16, sparse="sgd", device="cuda")
    sharded.shard(
        {plan: [f"f{number}"] for number, plan in enumerate(plans)},
        pooled=True,
        optimizer=SparseOptimizerSpec(kind="sgd", lr=0.1),
        device=torch.device("cuda", 1),
        group=SimpleNamespace(size=lambda: 16),  # type: ignore[arg-type]
        on_host=8,
    )
    (plan,) = seen
    places = [str(each.placement) for each in next(iter(plan.values())).sharding_spec.shards]
    assert places == [f"rank:{rank}/cuda:{rank % 8}" for rank in range(16)]
