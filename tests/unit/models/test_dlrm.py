"""DLRM's parts against their formulas in float64, and what dummies, empty slots and missing labels must not change."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.spec.errors import TrainError
from twinstep.spec.parse import validate_spec
from twinstep.worker.data.events import TableSchema, TaskSchema
from twinstep.worker.data.multi_hot import MultiHotBatch, MultiHotFeature, MultiHotSchema
from twinstep.worker.models.config import BagConfig, DLRMConfig, TableConfig, TaskConfig
from twinstep.worker.models.dlrm import DLRM, DotInteraction, LowRankCross, init_dlrm
from twinstep.worker.models.heads import task_losses
from twinstep.worker.models.registry import build_meta_model, build_model

FEATURES = (("a", "t0", 3), ("b", "t1", 1), ("c", "t0", 2))  # a and c share a table
B, N, E = 6, 4, 8


def make(interaction: Literal["dot", "dcn"] = "dcn") -> DLRM:
    model = DLRM(
        DLRMConfig(
            num_dense=N,
            tables=(TableConfig(name="t0", rows=20, dim=E), TableConfig(name="t1", rows=7, dim=E)),
            features=tuple(BagConfig(name=name, table=table, max_ids=most) for name, table, most in FEATURES),
            tasks=(TaskConfig(name="clicked"), TaskConfig(name="seconds", kind="regression")),
            bottom_dims=(16,),
            over_dims=(16, 12),
            interaction=interaction,
            num_cross_layers=2,
            cross_rank=5,
        )
    )
    init_dlrm(model, seed=0)
    return model


def batch(seed: int = 0) -> MultiHotBatch:
    made = torch.Generator().manual_seed(seed)
    lengths = torch.stack([torch.randint(0, most + 1, (B,), generator=made) for _, _, most in FEATURES], dim=1)
    labels = torch.randint(0, 2, (2, B, 1), generator=made).float()
    ids = torch.randint(0, 7, (B, 6), generator=made)
    return MultiHotBatch(torch.randn(B, N, generator=made), ids, lengths, labels, torch.ones(2, B, 1))


def results(model: DLRM, given: MultiHotBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(given)
    out.loss.backward()
    return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def bags_by_loop(model: DLRM, given: MultiHotBatch) -> list[Tensor]:
    """Each feature by torch.nn.functional.embedding_bag, from offsets."""
    found, start = [], 0
    for f, (_, table, most) in enumerate(FEATURES):
        ids = [given.ids[row, start : start + int(given.lengths[row, f])] for row in range(B)]
        offsets = torch.tensor([0, *(len(each) for each in ids[:-1])]).cumsum(0)
        weight = model._embedding_collection.embeddings[table].weight
        found.append(torch.nn.functional.embedding_bag(torch.cat(ids), weight, offsets, mode="sum"))
        start += most
    return found


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_the_whole_model_is_its_formula_in_float64(interaction: Literal["dot", "dcn"]) -> None:
    model, given = make(interaction).double(), batch()
    given = given._replace(dense=given.dense.double())
    p = dict(model.named_parameters())
    x = given.dense
    for layer in (0, 2):
        x = torch.relu(x @ p[f"_bottom.{layer}.weight"].T + p[f"_bottom.{layer}.bias"])
    vectors = torch.stack([x, *bags_by_loop(model, given)], dim=1)
    if interaction == "dot":
        products = torch.einsum("bie,bje->bij", vectors, vectors)
        pairs = [products[:, i, j] for i in range(4) for j in range(i)]
        crossed = torch.cat([x, torch.stack(pairs, dim=1)], dim=1)
    else:
        first = crossed = vectors.reshape(B, -1)
        for layer in range(2):
            down, up = p[f"_interaction._down.{layer}.weight"], p[f"_interaction._up.{layer}.weight"]
            matrix = torch.einsum("or,ri->oi", up, down)
            crossed = (
                first * (torch.einsum("oi,bi->bo", matrix, crossed) + p[f"_interaction._up.{layer}.bias"]) + crossed
            )
    for layer in (0, 2, 4):
        crossed = crossed @ p[f"_over.{layer}.weight"].T + p[f"_over.{layer}.bias"]
        crossed = torch.relu(crossed) if layer < 4 else crossed
    out = model(given)
    torch.testing.assert_close(out.logits[:, :, 0], crossed.T)
    clicked, seconds = crossed.T
    binary = torch.nn.functional.softplus(clicked) - clicked * given.labels[0, :, 0]
    want = torch.stack([binary.mean(), (seconds - given.labels[1, :, 0]).square().mean()])
    torch.testing.assert_close(out.task_losses, want)
    torch.testing.assert_close(out.loss, want.sum())


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), vectors=st.integers(1, 6), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_dot_interaction_and_its_gradient_are_einsums(rows: int, vectors: int, width: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vectors, width, generator=made, dtype=torch.float64, requires_grad=True)
    found = DotInteraction(vectors)(x)
    products = torch.einsum("bie,bje->bij", x, x)
    pairs = [products[:, i, j] for i in range(vectors) for j in range(i)]
    want = torch.cat([x[:, 0], *(pair[:, None] for pair in pairs)], dim=1)
    torch.testing.assert_close(found, want)
    dy = torch.randn(want.shape, generator=made, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (found, want)))


@settings(max_examples=40, deadline=None)
@given(rank=st.integers(1, 7), layers=st.integers(1, 3), seed=st.integers(0, 99))
def test_low_rank_cross_is_the_papers_formula_with_the_whole_matrix(rank: int, layers: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    cross = LowRankCross(6, rank=rank, num_layers=layers).double()
    for parameter in cross.parameters():
        torch.nn.init.normal_(parameter, generator=made)
    vectors = torch.randn(3, 2, 3, generator=made, dtype=torch.float64)
    first = x = vectors.reshape(3, 6)
    for down, up in zip(cross._down, cross._up, strict=True):
        matrix = torch.einsum("or,ri->oi", up.weight, down.weight)
        x = first * (torch.einsum("oi,bi->bo", matrix, x) + up.bias) + x
    torch.testing.assert_close(cross(vectors), x)


def test_what_stands_in_an_empty_slot_changes_no_bit() -> None:
    model, given = make(), batch()
    start, empty = 0, torch.zeros_like(given.ids, dtype=torch.bool)
    for f, (_, _, most) in enumerate(FEATURES):
        empty[:, start : start + most] = torch.arange(most) >= given.lengths[:, f : f + 1]
        start += most
    assert empty.any()
    loss, grads = results(model, given)
    other, other_grads = results(model, given._replace(ids=torch.where(empty, 5, given.ids)))
    assert torch.equal(loss, other)
    assert all(torch.equal(value, other_grads[name]) for name, value in grads.items())


def test_dummy_rows_change_neither_the_loss_nor_a_gradient() -> None:
    model, given = make(), batch()
    loss, grads = results(model, MultiHotBatch(*(x[:4] for x in given[:3]), *(x[:, :4] for x in given[3:])))
    weights = given.weights.clone()
    weights[:, 4:] = 0
    other, other_grads = results(model, given._replace(weights=weights))
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=0)
    for name, value in grads.items():
        torch.testing.assert_close(value, other_grads[name], rtol=1e-5, atol=1e-7, msg=name)


def test_a_missing_label_of_weight_zero_reaches_no_gradient() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    labels, weights = torch.ones(2, 3), torch.ones(2, 3)
    labels[0, 1] = labels[1, 2] = torch.nan
    weights[0, 1] = weights[1, 2] = 0
    losses = task_losses(logits, labels, weights, num_binary=1)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] == logits.grad[1, 2] == 0


SCHEMA = MultiHotSchema(
    tables=(TableSchema(name="t0", rows=20), TableSchema(name="t1", rows=7)),
    dense=("x", "y"),
    features=(MultiHotFeature(name="a", table="t0", max_ids=2), MultiHotFeature(name="b", table="t1")),
    tasks=(TaskSchema(name="clicked"),),
)


def test_a_spec_gives_the_same_bits_for_a_seed_and_the_same_shapes_without_values() -> None:
    spec = validate_spec({"name": "t", "model": {"kind": "dlrm"}, "data": {"dataset": "synthetic-clicks"}})
    first, second, meta = build_model(spec, SCHEMA), build_model(spec, SCHEMA), build_meta_model(spec, SCHEMA)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert {k: v.shape for k, v in first.state_dict().items()} == {k: v.shape for k, v in meta.state_dict().items()}


def test_tables_that_cannot_fit_are_refused_before_they_are_made() -> None:
    spec = validate_spec({"name": "t", "model": {"kind": "dlrm"}, "data": {"dataset": "synthetic-clicks"}})
    huge = MultiHotSchema(
        tables=(TableSchema(name="t0", rows=2**31 - 1),), dense=SCHEMA.dense, features=(), tasks=SCHEMA.tasks
    )
    with pytest.raises(TrainError, match="the tables and their gradients take"):
        build_model(spec, huge)
