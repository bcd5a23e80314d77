"""Steps that change what a graph cannot show, modules under two names, two compilers of one model: held to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinstep.spec.errors import CaptureError, CompileError
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.up_to_date import GETSTATE

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Stack(nn.Module):
    """Linear layers with batch norms, one module under several names where `shared`."""

    def __init__(self, *, shared: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if batch_norm else nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList([layers[0]] * 3 if shared else layers)
        buffer = torch.zeros(4)
        self.register_buffer("one", buffer)
        self.register_buffer("same", buffer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def square_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_equal(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def held(model: nn.Module) -> list[Any]:
    """Return what a model is made of, to the object: all but the mark by which copies of it are up to date."""
    return [
        (
            path,
            [name for name in vars(module) if name != GETSTATE],
            *(list(map(id, vars(module)[name].values())) for name in ("_parameters", "_modules")),
        )
        for path, module in model.named_modules()
    ]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_one_module_under_several_names_follows_eager_and_keeps_its_tensors(batch_norm: bool) -> None:
    states = []
    for backend in ("eager", "xla"):
        model = Stack(shared=True, batch_norm=batch_norm)
        before = held(model)
        compiler = StepCompiler(square_step, model, sgd(model), backend=backend)  # type: ignore[arg-type]
        for _ in range(3):
            compiler(X)
        assert held(model) == before
        states.append(model.state_dict())
    assert_equal(*states)


def _replace_parameter(model: Any) -> None:
    model.layers[0][0].weight = nn.Parameter(model.layers[0][0].weight.detach() * 0.5)


def _swap_modules(model: Any) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _add_buffer(model: Any) -> None:
    model.register_buffer("late", model.one + 1)


def _drop_buffer(model: Any) -> None:
    model.one = None


def _untie_buffers(model: Any) -> None:
    model.one = model.one + 1


def _attribute(model: Any) -> None:
    model.last = model.one + 1


def _data(model: Any) -> None:
    model.layers[0][0].weight.data = model.layers[0][0].weight.data * 0.5


def _data_of_gradients(model: Any) -> None:
    model.layers[0][0].weight.grad.data = model.layers[0][0].weight.grad.data * 0.5


def _vector(model: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_replace_parameter, "replaces, adds or removes the parameter layers.0.0.weight"),
        (_swap_modules, "replaces, adds or removes the submodule layers.0"),
        (_add_buffer, "replaces, adds or removes the buffer late"),
        (_drop_buffer, "replaces, adds or removes the buffer one"),
        (_untie_buffers, "two buffers that are one tensor"),
        (_attribute, "attribute last"),
        (_data, r"other data \(tensor.data = …\) at .*test_compile_hostile_steps.py"),
        (_data_of_gradients, "other data"),
        (_vector, "other data"),
    ],
)
def test_a_change_of_the_model_that_no_graph_shows_is_refused_and_undone(change: Any, words: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = square_step(model, optimizer, x)
        change(model)
        return loss

    model = Stack()
    before, values = held(model), {name: value.clone() for name, value in model.state_dict().items()}
    compiler = StepCompiler(step, model, sgd(model), backend="xla")
    with pytest.raises(CaptureError, match=words):
        compiler(X)
    assert held(model) == before
    assert_equal(dict(model.state_dict()), values)
    StepCompiler(square_step, model, sgd(model), backend="xla")(X)


def test_a_parameter_group_that_the_step_adds_is_refused_and_taken_away() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = square_step(model, optimizer, x)
        optimizer.add_param_group({"params": list(model.layers[1].parameters())})
        return loss

    model = Stack()
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="number of parameter groups from 1 to 2"):
        StepCompiler(step, model, optimizer, backend="xla")(X)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("backend", ["xla", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_training_and_an_evaluating_compiler_of_one_model_take_turns(backend: str) -> None:
    def evaluate(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    results = []
    for name in ("eager", backend):
        model = Stack(batch_norm=True)
        optimizer = sgd(model)
        compilers = [StepCompiler(square_step, model, optimizer, backend=name) for _ in range(2)]  # type: ignore[arg-type]
        evaluation = StepCompiler(evaluate, model, None, backend=name)  # type: ignore[arg-type]
        found = []
        for index in range(4):
            model.train()
            found.append(compilers[index % 2](X * (index + 1)).clone())
            model.eval()
            found.append(evaluation(X).clone())
        results.append((found, dict(model.state_dict())))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), None, "0.1", torch.tensor([0.1, 0.2])])
def test_a_learning_rate_that_is_no_finite_number_is_refused_before_the_step(rate: Any) -> None:
    model = Stack()
    optimizer = sgd(model)
    compiler = StepCompiler(square_step, model, optimizer, backend="xla")
    compiler(X)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(CompileError, match="learning rate of optimizer"):
        compiler(X)
    assert_equal(dict(model.state_dict()), before)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    compiler(X)


def test_a_parameter_whose_elements_share_memory_is_refused() -> None:
    model = Stack()
    model.layers[0][0].bias = nn.Parameter(torch.zeros(1).expand(4))  # type: ignore[index, union-attr]
    with pytest.raises(CompileError, match=r"elements of layers.0.0.bias share memory"):
        StepCompiler(square_step, model, torch.optim.SGD(model.layers[1].parameters(), lr=0.1), backend="xla")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_whose_input_needs_no_gradient_follows_eager(layout: torch.memory_format) -> None:
    states = []
    for backend in ("eager", "xla"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3)).to(memory_format=layout)  # type: ignore[call-overload]
        compiler = StepCompiler(square_step, model, sgd(model), backend=backend)  # type: ignore[arg-type]
        for index in range(2):
            generator = torch.Generator().manual_seed(index)
            compiler(torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=layout))
        states.append(dict(model.state_dict()))
    assert_equal(*states)


def test_a_query_that_sees_no_key_takes_no_gradient_in_softmax_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)[None, None]
            mask = torch.ones(5, 5, dtype=torch.bool)
            return F.scaled_dot_product_attention(y, y, y, attn_mask=mask.triu(1))  # the last row sees none

    states = []
    for backend in ("eager", "xla"):
        model = Attention()
        compiler = StepCompiler(square_step, model, sgd(model), backend=backend)  # type: ignore[arg-type]
        for _ in range(3):
            compiler(X)
        states.append(dict(model.state_dict()))
    assert_equal(*states)
