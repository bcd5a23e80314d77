"""Faults that were found by trying to break the compiler, each held as a test of its kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.spec.errors import CaptureError, CompileError
from twinstep.worker.compile import StepCompiler

BACKENDS = ("inductor", "xla")


class Product(nn.Module):
    """`x @ W`, whose gradient is a matrix product with nothing transposed after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def square_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def train(backend: str, step: Any = square_step, make: Any = None, between: Any = None, steps: int = 3) -> Any:
    model = Product()
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    compiler = StepCompiler(step, model, optimizer, backend=backend)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for index in range(steps):
        if between:
            between(index, model, optimizer, compiler)
        compiler(torch.randn(4, 3, generator=generator))
    compiler.pull()
    return model.weight.detach().clone()


def assert_follows_eager(backend: str, **options: Any) -> None:
    torch.testing.assert_close(train(backend, **options), train("eager", **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_weight_decay_beside_a_matrix_product_keeps_its_factor(kind: str, backend: str) -> None:
    assert_follows_eager(backend, make=lambda p: getattr(torch.optim, kind)(p, lr=0.1, weight_decay=0.1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scaled_sum_in_the_users_own_code_keeps_its_factor(backend: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        product = torch.mm(x, model.weight)
        loss = (torch.add(product, x[:, :2], alpha=0.25) + torch.sub(product, x[:, :2], alpha=3)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    assert_follows_eager(backend, step=step)


def test_a_refusal_that_the_step_catches_is_still_a_refusal() -> None:
    def branches(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = square_step(model, optimizer, x)
        try:
            if loss > 0:
                loss = loss * 2
        except Exception:
            loss = loss * 7
        return loss

    def shapes(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = square_step(model, optimizer, x)
        try:
            return x[x > 0].sum()
        except Exception:
            return loss * 7

    for step in (branches, shapes):
        with pytest.raises(CaptureError):
            train("xla", step=step)


def test_hooks_on_gradients_are_refused_whenever_they_are_set() -> None:
    def halve(model: nn.Module) -> None:
        model.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[operator, union-attr]

    model = Product()
    halve(model)
    with pytest.raises(CompileError, match="weight has gradient hooks"):
        StepCompiler(square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")
    with pytest.raises(CompileError, match="weight has gradient hooks"):
        train("xla", between=lambda index, model, *_: halve(model) if index == 1 else None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_momentum_that_is_turned_on_between_steps_keeps_its_state(backend: str) -> None:
    def between(index: int, model: Any, optimizer: Any, compiler: Any) -> None:
        if index == 1:
            optimizer.param_groups[0]["momentum"] = 0.9

    assert_follows_eager(backend, between=between, steps=5)


def test_state_that_is_cleared_between_steps_starts_anew() -> None:
    def between(index: int, model: Any, optimizer: Any, compiler: Any) -> None:
        if index == 2:
            compiler.pull()
            optimizer.state.clear()

    for backend in BACKENDS:
        assert_follows_eager(backend, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), between=between, steps=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_grad_may_stand_at_the_end_of_the_step(backend: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_follows_eager(backend, step=step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_the_step_closes_over_is_an_input(backend: str) -> None:
    weights = torch.tensor([0.5, 2.0])
    criterion = nn.CrossEntropyLoss(weight=weights)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x) * weights, torch.tensor([0, 1, 1, 0]))
        loss.backward()
        optimizer.step()
        return loss

    assert_follows_eager(backend, step=step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
def test_half_precision_parameters_stay_so_on_xla(dtype: torch.dtype, kind: str) -> None:
    model = Product().to(dtype)
    compiler = StepCompiler(square_step, model, getattr(torch.optim, kind)(model.parameters(), lr=0.1), backend="xla")
    for _ in range(3):
        loss = compiler(torch.ones(4, 3, dtype=dtype))
    compiler.pull()
    assert loss.dtype is dtype
    assert model.weight.dtype is dtype


def test_what_hides_tensors_is_not_returned() -> None:
    @dataclasses.dataclass
    class Result:
        loss: Tensor

    with pytest.raises(CaptureError, match="returns Result"):
        train("xla", step=lambda model, optimizer, x: Result(square_step(model, optimizer, x)))


def test_a_buffer_that_changes_its_dtype_is_refused() -> None:
    class Counter(Product):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.tensor(0))

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        model.n = model.n + 1.5
        return square_step(model, optimizer, x)

    model = Counter()
    with pytest.raises(CaptureError, match=r"turns n, .*int64, into .*float32"):
        StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(torch.ones(4, 3))


def test_a_function_an_object_or_a_hook_of_a_module_that_changes_compiles_again() -> None:
    class Options:
        factor = 1.0

        def __init__(self) -> None:
            self.factor = 1.0

    class Flexible(Product):
        def __init__(self) -> None:
            super().__init__()
            self.function = torch.sin
            self.options = Options()

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x @ self.weight) * self.options.factor

    losses = {}
    for backend in ("eager", "xla"):
        model = Flexible()
        compiler = StepCompiler(
            square_step,
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            backend=backend,  # type: ignore[arg-type]
        )
        losses[backend] = [float(compiler(torch.ones(4, 3)))]
        model.function = torch.cos
        losses[backend].append(float(compiler(torch.ones(4, 3))))
        model.options.factor = 3.0
        losses[backend].append(float(compiler(torch.ones(4, 3))))
        model.register_forward_hook(lambda module, given, result: result * 2)
        losses[backend].append(float(compiler(torch.ones(4, 3))))
    assert losses["xla"] == pytest.approx(losses["eager"], rel=1e-5)
    assert len(set(losses["eager"])) == 4


def test_ops_whose_lowering_is_wrong_are_refused() -> None:
    class Put(Product):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).put(torch.tensor([0, 0]), torch.ones(2), accumulate=True)

    model = Put()
    with pytest.raises(CompileError, match="known to give wrong numbers"):
        StepCompiler(square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(torch.ones(4, 3))


def test_two_compilers_with_caches_of_their_own_use_each_its_own(tmp_path: Any) -> None:
    for name in ("one", "two"):
        model = Product()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiler = StepCompiler(square_step, model, optimizer, backend="xla", cache_dir=tmp_path / name)
        compiler(torch.ones(4, 3))
        assert list((tmp_path / name).rglob("*.program")), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_go_on_where_a_setting_changes_at_every_step(backend: str) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))

    def masked(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        kept: Tensor = model[0](x)
        optimizer.zero_grad()
        model[1](kept).sum().backward()
        optimizer.step()
        return kept

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    compiler = StepCompiler(masked, model, optimizer, backend=backend)  # type: ignore[arg-type]
    masks = []
    for momentum in (0.5, 0.6, 0.7):
        optimizer.param_groups[0]["momentum"] = momentum
        masks.append(compiler(torch.ones(64)) > 0)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
