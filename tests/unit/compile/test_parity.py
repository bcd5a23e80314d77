"""Parity: what is measured, what is weighed, and that a broken pass is caught and named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import twinstep
from twinstep.spec.errors import CompileError
from twinstep.worker.compile.parity.compare import Tolerance, difference
from twinstep.worker.compile.parity.noise import GradientNoise
from twinstep.worker.compile.passes import table
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.table import Pass

aten = torch.ops.aten
FINE = Tolerance(1e-4, 1e-7)


class Net(nn.Module):
    """A bias before a norm, whose gradient is rounding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 8)
        self.before = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.head = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.before(self.table(ids)).T).T)).squeeze(-1)


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer.zero_grad()
    logits = model(batch["ids"])
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss, "logits": logits}


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "ids": torch.randint(30, (16,), generator=generator),
            "label": torch.randint(2, (16,), generator=generator).float(),
        }
        for _ in range(count)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.inductor
def test_both_backends_hold_for_twenty_steps_and_nothing_of_the_users_is_changed() -> None:
    model = Net()
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = twinstep.parity(step, model, optimizer, batches(20))
    assert report.ok, report.summary()
    assert [each.backend for each in report.backends] == ["inductor", "xla"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    for backend in report.backends:
        found = {(each.kind, each.name) for each in backend.tensors}
        assert {("loss", "loss"), ("output", "logits"), ("gradient", "table.weight")} <= found
        assert ("optimizer", "optimizer/exp_avg_sq/head.bias") in found
        assert all(len(each.steps) == 20 for each in backend.tensors)
        assert max(each.worst.max_rel for each in backend.of_kind("loss")) <= 1e-5
    json.dumps(report.to_json(), allow_nan=False)


def flip_a_sign(graph: fx.GraphModule, context: PassContext) -> int:
    """A broken pass: the first division of the update becomes its negative."""
    found = [node for node in graph.graph.nodes if node.target is aten.div.Tensor]
    with graph.graph.inserting_after(found[-1]):
        flipped = graph.graph.call_function(aten.neg.default, (found[-1],))
    flipped.meta = dict(found[-1].meta)
    found[-1].replace_all_uses_with(flipped, delete_user_cb=lambda user: user is not flipped)
    return 1


def drop_weight_decay(graph: fx.GraphModule, context: PassContext) -> int:
    """A broken pass: what AdamW multiplies its parameters by becomes 1."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    changed = 0
    for node in placeholders[: len(context.slots)]:
        for user in list(node.users):
            if user.target is aten.mul.Tensor and not isinstance(user.args[1], float | int):
                user.replace_all_uses_with(node)
                changed += 1
    return changed


@pytest.mark.parametrize("broken", [flip_a_sign, drop_weight_decay])
def test_a_broken_pass_is_caught_and_named(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Pass(broken.__name__, broken, keeps_bits=True, why="broken on purpose", strategy="fused_update")
    monkeypatch.setattr(table, "PASSES", (*table.PASSES, row))
    monkeypatch.setattr("twinstep.worker.compile.capture.PASSES", table.PASSES)
    model = Net()
    report = twinstep.parity(step, model, adamw(model), batches(4), backends=["xla"], steps=4)
    assert not report.ok
    (backend,) = report.backends
    assert backend.first_divergent is not None
    number, tensor = backend.first_divergent
    assert number == 1
    assert tensor.kind in ("parameter", "optimizer")
    assert backend.culprit is not None
    assert (backend.culprit.kind, backend.culprit.name) == ("pass", broken.__name__)
    assert backend.culprit.strategy == "fused_update"
    assert broken.__name__ in report.summary()


def test_a_wrong_lowering_is_told_from_a_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinstep.worker.compile.lower import xla_ops

    monkeypatch.setitem(xla_ops.OWN_OPS, aten.sqrt.default, lambda x: x)
    model = Net()
    report = twinstep.parity(
        step, model, adamw(model), batches(1), backends=["xla"], steps=1, gradients=None, strategies=[]
    )
    assert not report.ok
    culprit = report.backends[0].culprit
    assert culprit is not None
    assert culprit.kind == "lowering", culprit
    assert "in-place state" in culprit.tried


def test_the_first_divergent_tensor_is_by_step_and_then_in_the_graphs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale_the_logits(graph: fx.GraphModule, context: PassContext) -> int:
        *_, first = (node for node in graph.graph.nodes if node.target is aten.addmm.default)
        with graph.graph.inserting_after(first):
            scaled = graph.graph.call_function(aten.mul.Tensor, (first, 1.5))
        scaled.meta = dict(first.meta)
        first.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return 1

    row = Pass("scale", scale_the_logits, keeps_bits=True, why="broken on purpose")
    monkeypatch.setattr("twinstep.worker.compile.capture.PASSES", (*table.PASSES, row))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = twinstep.parity(step, model, optimizer, batches(2), backends=["xla"], steps=2, bisect=False)
    found = report.backends[0].first_divergent
    assert found is not None
    names = [(each.kind, each.name) for each in report.backends[0].tensors]
    assert names.index(("output", "logits")) < names.index(("loss", "loss")) < names.index(("gradient", "head.weight"))
    assert (found[0], found[1].name) in ((1, "logits"), (1, "loss"))


def test_excluded_tensors_need_no_parity_and_are_said_to_be_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Pass("drop_weight_decay", drop_weight_decay, keeps_bits=True, why="broken on purpose")
    monkeypatch.setattr("twinstep.worker.compile.capture.PASSES", (*table.PASSES, row))
    model = Net()
    report = twinstep.parity(
        step,
        model,
        adamw(model),
        batches(1),
        backends=["xla"],
        steps=1,
        gradients=None,
        exclude={"parameter:*": "decay is off in this test"},
        bisect=False,
    )
    assert report.ok
    excluded = [each for each in report.backends[0].tensors if each.excluded]
    assert {each.kind for each in excluded} == {"parameter"}
    assert max(each.worst.ratio for each in excluded) > 1


def test_a_schedule_between_steps_holds() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def halve(number: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + number)

    report = twinstep.parity(
        step, model, optimizer, batches(4), backends=["xla"], steps=6, gradients=["head.*"], between=halve
    )
    assert report.ok, report.summary()
    assert [each.name for each in report.backends[0].of_kind("gradient")] == ["head.weight", "head.bias"] or {
        each.name for each in report.backends[0].of_kind("gradient")
    } == {"head.weight", "head.bias"}


def test_random_numbers_that_are_not_eagers_are_refused_on_xla() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))

    def dropped(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompileError, match="random numbers"):
        twinstep.parity(dropped, model, optimizer, [torch.ones(4, 3)], backends=["xla"], steps=2)


def test_no_batch_is_refused() -> None:
    model = Net()
    with pytest.raises(CompileError, match="nothing to compare"):
        twinstep.parity(step, model, adamw(model), [], backends=["xla"])


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8),
)
def test_a_difference_is_the_largest_of_its_elements(first: list[float], second: list[float]) -> None:
    size = min(len(first), len(second))
    got, want = torch.tensor(first[:size]), torch.tensor(second[:size])
    found = difference(got, want, FINE)
    errors = [abs(float(a) - float(b)) for a, b in zip(got.double(), want.double(), strict=True)]
    assert found.max_abs == pytest.approx(max(errors))
    scale = max(abs(each) for each in want.double().tolist())
    assert found.over == (max(errors) > FINE.absolute + FINE.relative * scale)
    assert difference(want, want, FINE).ratio == 0.0


@pytest.mark.parametrize(
    ("got", "want", "over"),
    [
        (math.nan, 1.0, True),
        (1.0, math.nan, True),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (-math.inf, math.inf, True),
        (math.inf, 3.0, True),
        (0.0, 0.0, False),
        (0.0, 1e-30, False),
    ],
)
def test_nan_and_infinity_equal_themselves_alone(got: float, want: float, over: bool) -> None:
    found = difference(torch.tensor([1.0, got]), torch.tensor([1.0, want]), FINE)
    assert found.over is over
    if over:
        assert found.max_abs == math.inf
        assert found.at == (1,)


def test_integers_other_shapes_and_other_dtypes_are_held_exactly() -> None:
    exact = Tolerance(0.0, 0.0)
    assert not difference(torch.tensor([3]), torch.tensor([3]), exact).over
    assert difference(torch.tensor([3]), torch.tensor([4]), exact).over
    assert difference(torch.ones(2), torch.ones(3), FINE).note == "[2] float32 for [3] float32"
    assert difference(torch.ones(2, dtype=torch.float64), torch.ones(2), FINE).over


def test_noise_allows_next_to_nothing_where_gradients_are_ordinary_and_nothing_where_there_are_none() -> None:
    noise = GradientNoise(eps=2.0**-23)
    gradients = {"w": torch.tensor([1.0, 0.1, 0.0]), "b": torch.tensor([3e-9, 0.0])}
    before = {"parameter:w": torch.zeros(3), "parameter:b": torch.zeros(2)}
    after = {"parameter:w": torch.full((3,), 0.01), "parameter:b": torch.tensor([-0.01, 0.0])}
    owners = {path: ("optimizer", path.partition(":")[2]) for path in after}
    noise.add_step(gradients, before, after, owners)
    ordinary = noise.allowance("parameter:w", before["parameter:w"])
    rounding = noise.allowance("parameter:b", before["parameter:b"])
    assert ordinary is not None
    assert rounding is not None
    assert float(ordinary[:2].max()) < 3e-7
    assert float(ordinary[2]) == 0.0
    assert rounding.tolist() == pytest.approx([0.02, 0.02])
    untouched = GradientNoise(eps=2.0**-23)
    untouched.add_step({**gradients, "b": torch.zeros(2)}, before, after, owners)
    allowed = untouched.allowance("parameter:b", before["parameter:b"])
    assert allowed is not None
    assert float(allowed.max()) == 0.0
