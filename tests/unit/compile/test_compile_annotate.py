"""Annotations: batch dimensions against a second capture with another batch size, roles, stages, regions, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._inductor.decomposition import select_decomp_table

from twinstep.worker.compile.annotate import Annotations, Spread, annotate
from twinstep.worker.compile.batch_labels import BatchDim, JoinedDim, leaf_dims, viewed
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.state import TrainState

ROWS, HISTORY, DIM = 50, 3, 8


class Recommender(nn.Module):
    """What a recommender has: tables, sequences flattened and joined, attention over a sample, norms, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.action = nn.Parameter(torch.randn(1, DIM))
        self.dense = nn.Sequential(nn.Linear(4, DIM), nn.LayerNorm(DIM), nn.SiLU(), nn.Dropout(0.1))
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = ids.shape[0]
        history = self.table(ids).view(-1, DIM)  # [B * history, D]
        extra = self.action.expand(rows, -1)
        tokens = torch.cat([history, self.dense(dense) + extra])  # [B * history + B, D]
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        first = slice(0, rows * HISTORY)
        scores = q[first].view(rows, HISTORY, DIM) @ k[first].view(rows, HISTORY, DIM).transpose(1, 2)
        mixed = scores.softmax(-1) @ v[first].view(rows, HISTORY, DIM)
        return self.head(mixed.mean(1) + tokens[rows * HISTORY :]).squeeze(-1)


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer.zero_grad()
    logits = model(batch["ids"], batch["dense"])
    weights = batch["weights"] / batch["weights"].sum()
    loss = (nn.functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="none") * weights).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss, "logits": logits}


def batch_of(rows: int) -> dict[str, Tensor]:
    return {
        "ids": torch.randint(ROWS, (rows, HISTORY)),
        "dense": torch.randn(rows, 4),
        "label": torch.ones(rows),
        "weights": torch.ones(rows),
    }


def captured(rows: int, table: Callable[[], Any] = core_aten_decompositions) -> Captured:
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = batch_of(rows)
    state = TrainState(model, optimizer)
    return capture(step, state, optimizer, batch, table(), backend="xla", strategies={})


@pytest.fixture(scope="module")
def five() -> tuple[Captured, Annotations]:
    found = captured(5)
    return found, annotate(found, Spread())


def sizes(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


@pytest.mark.parametrize("table", [core_aten_decompositions, select_decomp_table])
def test_labels_are_what_a_capture_with_another_batch_size_shows(table: Callable[[], Any]) -> None:
    found = captured(5, table)
    other = captured(7, table)
    values = annotate(found, Spread()).by_name()
    grow = known = 0
    for mine, its in zip(found.graph.graph.nodes, other.graph.graph.nodes, strict=True):
        assert str(mine.target) == str(its.target)
        if mine.op == "output" or sizes(mine) is None:
            continue
        for at, (before, after) in enumerate(zip(sizes(mine) or (), sizes(its) or (), strict=True)):
            label = values[mine.name].dims[at]
            grow += before != after
            if label is not None:  # never wrong
                assert (label.size(5), label.size(7)) == (before, after), f"{mine.format_node()}: {label}"
                known += 1
    assert grow > 60
    assert known >= 0.85 * grow  # seldom unknown


def test_one_sample_has_no_labels_since_every_length_of_one_looks_alike() -> None:
    found = captured(1)
    annotations = annotate(found, Spread())
    assert annotations.batch_size is None
    assert not any(any(value.dims) for value in annotations.values)


def test_roles_are_what_the_slots_and_the_step_say(five: tuple[Captured, Annotations]) -> None:
    found, annotations = five
    named = {role: {value.label for value in annotations.of_role(role)} for role in ("table", "parameter", "batch")}
    parameters = {slot.name for slot in found.context.slots if slot.role == "parameter"}
    assert named["table"] == {"table.weight"}
    assert named["parameter"] == parameters - {"table.weight"}
    assert len(annotations.of_role("batch")) == 4
    assert len(annotations.of_role("learning rate")) == 1
    assert len(annotations.of_role("new state")) == len(found.context.slots)
    assert {value.shown_shape for value in annotations.of_role("output")} >= {"[]"}


def test_every_gradient_is_marked_once_before_the_clip_with_its_parameters_shape(
    five: tuple[Captured, Annotations],
) -> None:
    found, annotations = five
    shapes = {
        slot.name: tuple(tensor.shape)
        for slot, tensor in zip(found.context.slots, found.example, strict=False)
        if slot.role == "parameter"
    }
    marked = [value for value in annotations.of_role("gradient") if value.label]
    assert sorted(value.label for value in marked) == sorted(shapes)
    for value in marked:
        assert value.stage == "backward"  # clipping is the update's
        assert value.shape == shapes[value.label]
        assert not any(value.dims)


def test_regions_are_the_modules_whose_forward_and_backward_it_is(five: tuple[Captured, Annotations]) -> None:
    _, annotations = five
    stages = {region: set() for region in ("table", "dense.0", "dense.1", "qkv", "head")}
    for value in annotations.values:
        if value.region in stages:
            stages[value.region].add(value.stage)
    assert all(found == {"forward", "backward"} for found in stages.values()), stages
    assert {value.region for value in annotations.values if value.stage == "update"} == {"", "optimizer"}


def test_a_gradient_of_the_batch_is_summed_where_the_batch_ends(five: tuple[Captured, Annotations]) -> None:
    _, annotations = five
    sums = [value for value in annotations.values if value.reduce == "sum"]
    assert {"forward", "backward"} == {value.stage for value in sums}  # the loss, and each parameter's gradient
    assert not any(any(value.dims) for value in sums)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_label_that_a_view_keeps_marks_the_positions_of_each_sample(data: st.DataObject) -> None:
    """Against the definition: element at flat index f belongs to sample (f // inner) % B, in both shapes."""
    batch = data.draw(st.integers(2, 4))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    at = data.draw(st.integers(0, len(lengths)))
    old = (*lengths[:at], batch, *lengths[at:])
    total = math.prod(old)
    new = tuple(data.draw(st.permutations(old)) if data.draw(st.booleans()) else _merged(old, data))
    dims = tuple(BatchDim() if index == at else None for index in range(len(old)))
    sample = torch.arange(batch).view(*(batch if index == at else 1 for index in range(len(old)))).expand(old)
    after = sample.reshape(new)
    for index, label in enumerate(viewed(dims, old, new, batch)):
        if label is not None:
            assert label.size(batch) == new[index]
            here = (torch.arange(new[index]) // label.inner) % batch
            wanted = here.view(*(new[index] if each == index else 1 for each in range(len(new)))).expand(new)
            assert torch.equal(after, wanted)
    assert total == math.prod(new)


def _merged(shape: tuple[int, ...], data: st.DataObject) -> list[int]:
    start = data.draw(st.integers(0, len(shape) - 1))
    end = data.draw(st.integers(start + 1, len(shape)))
    return [*shape[:start], math.prod(shape[start:end]), *shape[end:]]


def test_leaf_dims_are_the_leading_ones_or_those_that_are_declared() -> None:
    shapes = {"a": (6, 3), "b": (6,), "c": (4, 6), "n": ()}
    size, found = leaf_dims(shapes)
    assert size == 6
    assert found == {"a": (BatchDim(), None), "b": (BatchDim(),), "c": (None, None), "n": ()}
    size, found = leaf_dims({"t": (2, 12), "b": (6,)}, declared={"t": 1, "b": 0})
    assert size == 6
    assert found["t"] == (None, BatchDim(inner=2))
    assert str(found["t"][1]) == "B·2"
    assert str(JoinedDim((BatchDim(inner=3), 4))) == "B·3+4"
