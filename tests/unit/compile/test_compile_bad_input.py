"""Bad input is a clear error before anything is changed: pieces, devices, batches, ops without a lowering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinstep
from twinstep.spec.errors import CaptureError, CompileError, DataError
from twinstep.worker.compile import StepCompiler


def step(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long())


class Distances(nn.Module):
    """Between all rows: neither torchax nor the compiler has a lowering for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.pdist(self.body(x))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + torch.rand(x.shape, generator=self.generator))


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("make", "optimizer", "said"),
    [
        (linear, lambda model: model, "optimizer 'optimizer' is Linear"),
        (linear, lambda model: {"dense": sgd(model), "sparse": 3}, "optimizer 'sparse' is int"),
        (lambda: linear().weight, lambda model: None, "the model is Parameter"),
        (lambda: nn.LazyLinear(1), lambda model: None, "weight has no shape yet"),
        (lambda: nn.Linear(4, 1, device="meta"), sgd, "weight is on the meta device"),
        (linear, lambda model: sgd(linear()), "not the model's"),
    ],
)
@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_pieces_that_make_no_step_are_refused(make: Any, optimizer: Any, said: str, backend: Any) -> None:
    model = make()
    with pytest.raises(CompileError, match=said) as caught:
        StepCompiler(step, model, optimizer(model), backend=backend)
    assert caught.value.remedy


def test_state_of_the_optimizer_on_another_device_is_refused_and_named() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, X)
    optimizer.state[model.weight]["momentum_buffer"] = torch.empty(1, 4, device="meta")
    with pytest.raises(CompileError, match="momentum_buffer of weight is on the meta device"):
        StepCompiler(step, model, optimizer, backend="xla")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (X.to_sparse(), "batch leaf batch is a sparse_coo tensor"),
        (X.to("meta"), "batch leaf batch is on meta, the model on cpu"),
        ({"x": X, "n": 3}, r"batch leaf \['n'\] is int, not a tensor"),
    ],
)
def test_batches_that_are_no_plain_tensors_of_the_models_device_are_refused(batch: Any, said: str) -> None:
    model = linear()
    before = model.weight.detach().clone()
    compiler = StepCompiler(step, model, sgd(model), backend="xla")
    with pytest.raises(CompileError, match=said):
        compiler(batch)
    compiler(X)
    compiler.pull()
    trained = model.weight.detach().clone()
    assert not torch.equal(trained, before)
    with pytest.raises(CompileError, match=said):  # as well where a program for that shape is there already
        compiler(batch)
    compiler.pull()
    assert torch.equal(model.weight, trained)


@pytest.mark.parametrize("backend", ["eager", "xla"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_refused_by_name_before_the_step(value: float, backend: Any) -> None:
    model = linear()
    compiler = StepCompiler(
        lambda model, optimizer, batch: step(model, optimizer, batch["x"]),
        model,
        sgd(model),
        backend=backend,
        check_finite=True,
    )
    compiler({"x": X})
    compiler.pull()
    before = model.weight.detach().clone()
    broken = X.clone()
    broken[1, 2] = value
    with pytest.raises(DataError, match=rf"\['x'\] holds {value} at \[1, 2\]"):
        compiler({"x": broken})
    compiler.pull()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("backend", ["inductor", "xla"])
@pytest.mark.parametrize(
    ("make", "said", "line"),
    [
        (Sparse, "makes a sparse tensor", "loss.backward()"),
        (OwnGenerator, "torch.Generator of its own", "torch.rand(x.shape, generator=self.generator)"),
    ],
)
def test_what_no_backend_can_hold_is_refused_with_the_users_line(
    make: Callable[[], nn.Module], said: str, line: str, backend: Any
) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match=said) as caught:
        twinstep.compile(step, model, sgd(model), X, target=backend)
    assert Path(__file__).name in caught.value.problem
    assert line in caught.value.problem
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_an_op_with_no_lowering_is_named_with_the_users_line() -> None:
    model = Distances()
    with pytest.raises(CompileError) as caught:
        twinstep.compile(step, model, sgd(model), X, target="xla")
    assert "no lowering for aten._pdist_backward" in caught.value.problem
    assert f"{Path(__file__).name}:" in caught.value.problem
    assert "loss.backward()" in caught.value.problem


def test_an_op_that_torchax_does_not_know_is_named_with_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinstep.worker.compile.lower import xla_ops

    known = {name: op for name, op in xla_ops.all_aten_ops.items() if "mean" not in str(name)}
    monkeypatch.setattr(xla_ops, "all_aten_ops", known)
    model = linear()
    with pytest.raises(CompileError, match=r"no lowering for aten\.mean.*square\(\)\.mean\(\)"):
        twinstep.compile(step, model, sgd(model), X, target="xla")


@pytest.mark.inductor
def test_an_op_that_inductor_fails_on_is_named_with_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("not today")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.erfinv.default, refuse)
    model = linear()

    def odd(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.erfinv(model(batch) * 0.01).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CompileError, match=r"aten\.erfinv\.default at .*torch\.erfinv\(model\(batch\)"):
        twinstep.compile(odd, model, sgd(model), X, target="inductor")


def test_a_backend_that_is_none_is_refused() -> None:
    model = linear()
    with pytest.raises(CompileError, match="no backend is called 'cuda'"):
        twinstep.compile(step, model, sgd(model), X, target="cuda")  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="no backend is called 'cuda'"):
        twinstep.parity(step, model, sgd(model), [X], backends=["cuda"])  # type: ignore[list-item]


class Recurrent(nn.Module):
    """Recurrent layers one after the other, the first one wider than its input."""

    def __init__(self, *kinds: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(4 + at, 5 + at, batch_first=True) for at, kind in enumerate(kinds))
        self.head = nn.Linear(4 + len(kinds), 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("kinds", "backend", "length"),
    [
        ((nn.RNN,), "xla", 6),
        ((nn.GRU, nn.LSTM), "xla", 6),
        ((nn.LSTM, nn.GRU), "xla", 3),
        pytest.param((nn.GRU, nn.LSTM), "inductor", 2, marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
)
def test_recurrent_layers_follow_eager_one_after_the_other(kinds: Any, backend: Any, length: int) -> None:
    model = Recurrent(*kinds)
    batches = list(torch.randn(3, 2, length, 4, generator=torch.Generator().manual_seed(0)))
    report = twinstep.parity(step, model, sgd(model), batches, backends=[backend], steps=3, gradients=None)
    assert report.ok, report.summary()
    trained = {each.name for each in report.backends[0].of_kind("parameter")}
    assert {f"layers.{at}.weight_hh_l0" for at in range(len(kinds))} <= trained
