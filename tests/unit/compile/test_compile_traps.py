"""Traps of whole-step capture: each is followed as eager does it, or refused before anything is changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twinstep
from twinstep.spec.errors import CaptureError, CompileError, DataError, TwinstepError
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.code import code_digest
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.table import PASSES, Pass, run_passes
from twinstep.worker.compile.state import STARTS_FROM_ZERO

BACKENDS = ("inductor", "xla")
LAZY = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def square_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def follow(
    backend: str,
    make: Callable[[], tuple[nn.Module, Any]],
    step: Any,
    between: Callable[[int, nn.Module, Any, StepCompiler], None] = lambda *_: None,
    steps: int = 4,
) -> dict[str, Any]:
    """Train with `step`, calling `between` before each; return the model's state."""
    model, optimizer = make()
    compiler = StepCompiler(step, model, optimizer, backend=backend)  # type: ignore[arg-type]
    for index, x in enumerate(inputs(steps)):
        between(index, model, optimizer, compiler)
        compiler(x)
    compiler.pull()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_follows_eager(backend: str, *arguments: Any, **options: Any) -> None:
    got, want = follow(backend, *arguments, **options), follow("eager", *arguments, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", LAZY, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_follows_eager_or_is_refused(kind: Any) -> None:
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)  # Muon takes matrices only
        return model, kind(model.parameters())

    try:
        got = follow("xla", make, square_step)
    except TwinstepError:
        assert kind not in STARTS_FROM_ZERO
        return
    torch.testing.assert_close(got, follow("eager", make, square_step), rtol=1e-4, atol=1e-6)


def test_an_optimizer_of_ones_own_with_a_start_that_is_not_zero_is_refused_before_its_first_step() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("scale", torch.ones(())).mul_(0.9)
                    parameter.sub_(state["scale"] * group["lr"] * parameter.grad)

    def make() -> tuple[nn.Module, Any]:
        model = linear()
        return model, Own(model.parameters())

    with pytest.raises(CompileError, match="not known to be zero"):
        follow("xla", make, square_step)

    def after_a_step() -> tuple[nn.Module, Any]:
        model, optimizer = make()
        square_step(model, optimizer, torch.ones(4, 3))
        return model, optimizer

    assert_follows_eager("xla", after_a_step, square_step)


def make_sgd() -> tuple[nn.Module, Any]:
    model = linear()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accumulating(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def zeroing_in_place(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_gradients_that_add_up_over_steps_and_ones_that_are_zeroed_in_place_follow_eager() -> None:
    assert_follows_eager("xla", make_sgd, accumulating)
    assert_follows_eager("xla", make_sgd, zeroing_in_place)


def test_a_schedule_inside_the_step_is_refused() -> None:
    model, optimizer = make_sgd()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def scheduled(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = square_step(model, optimizer, x)
        schedule.step()
        return loss

    with pytest.raises(CaptureError, match=r"param_groups\[0\]\['lr'\]"):
        StepCompiler(scheduled, model, optimizer, backend="xla")(torch.ones(4, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_freezing_and_unfreezing_between_steps_follows_eager(backend: str) -> None:
    def between(index: int, model: nn.Module, *_: Any) -> None:
        model.weight.requires_grad_(index % 2 == 0)
        model.weight.grad = None

    assert_follows_eager(backend, make_sgd, square_step, between)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_group_that_is_added_keeps_its_state(backend: str) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = linear()
        return model, torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)

    def between(index: int, model: nn.Module, optimizer: Any, compiler: StepCompiler) -> None:
        if index == 1:
            optimizer.add_param_group({"params": [model.bias], "lr": 0.3})
            model.bias.grad = None

    assert_follows_eager(backend, make, square_step, between, steps=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_loading_a_model_and_an_optimizer_between_steps_follows_eager(backend: str) -> None:
    kept: dict[str, Any] = {}

    def between(index: int, model: nn.Module, optimizer: Any, compiler: StepCompiler) -> None:
        compiler.pull()
        if index == 1:
            kept.update(model=copy.deepcopy(model.state_dict()), optimizer=copy.deepcopy(optimizer.state_dict()))
        if index == 3:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])

    assert_follows_eager(backend, make_sgd, square_step, between, steps=5)


def test_a_write_that_leaves_no_trace_is_taken_by_push() -> None:
    model, optimizer = make_sgd()
    compiler = StepCompiler(square_step, model, optimizer, backend="xla")
    compiler(torch.ones(4, 3))
    compiler.pull()
    model.weight.data.fill_(0.0)
    model.bias.data.fill_(2.0)
    compiler.push()
    assert float(compiler(torch.ones(4, 3))) == pytest.approx(4.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runner_refuses_a_model_that_is_no_longer_what_it_was_compiled_for(backend: Any) -> None:
    model, optimizer = make_sgd()
    runner = twinstep.compile(square_step, model, optimizer, torch.ones(4, 3), target=backend)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(CompileError, match=r"momentum=0\.5"):
        runner(torch.ones(4, 3))
    optimizer.param_groups[0]["momentum"] = 0.9
    model.eval()
    with pytest.raises(CompileError, match="training True → False"):
        runner(torch.ones(4, 3))
    model.train()
    runner(torch.ones(4, 3))
    model.to(torch.bfloat16)
    with pytest.raises(CompileError, match="bfloat16"):
        runner(torch.ones(4, 3))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("a", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("b", torch.tensor([5.0, 6.0]))


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda a: a.chunk(2)[1],
    "split": lambda a: a.split([2, 2])[1],
    "unbind": lambda a: torch.stack(a.view(2, 2).unbind())[1],
    "repeat": lambda a: a[2:].repeat(1),
    "pad": lambda a: nn.functional.pad(a[2:], (0, 0)),
    "expand": lambda a: a[3].expand(2),
    "flip of a view": lambda a: a.view(2, 2).t()[1],
    "cat of one": lambda a: torch.cat([a[2:]]),
    "same type": lambda a: a[2:].to(torch.float32, copy=True),
    "first power": lambda a: a[2:].pow(1),
    "times one": lambda a: a[2:] * 1.0,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("move", MOVES)
def test_state_that_moves_from_one_buffer_to_another_arrives_before_it_is_overwritten(move: str, backend: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Tensor]:
        square_like = (model.weight * x[0, :2]).sum()
        optimizer.zero_grad()
        square_like.backward()
        optimizer.step()
        moved = MOVES[move](model.a)
        out = moved + 0.0
        model.b.copy_(moved)
        model.a.add_(1).mul_(2)
        return {"out": out, "moved": moved}

    def make() -> tuple[nn.Module, Any]:
        model = Buffers()
        return model, torch.optim.SGD([model.weight], lr=0.1)

    if backend == "xla":  # one move on the other backend says as much and compiles faster
        assert_follows_eager("xla", make, step)
        return
    assert_follows_eager("inductor", make, step, steps=3)


def test_buffers_that_share_memory_are_refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            whole = torch.zeros(4)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[1:3])

    model = Views()
    with pytest.raises(CompileError, match="share memory"):
        StepCompiler(square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")


def test_parts_of_one_block_of_memory_that_do_not_overlap_are_fine() -> None:
    model = nn.Linear(2, 1)
    block = torch.randn(3)
    model.weight.data, model.bias.data = block[:2].view(1, 2), block[2:]
    compiler = StepCompiler(square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")
    compiler(torch.ones(4, 2))


def test_a_number_is_read_when_it_is_read_and_not_when_it_is_used() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("t", torch.tensor(1.0))

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (model.weight * x[0]).sum().backward()
        scale = model.t.item()
        model.t.mul_(2)
        with torch.no_grad():
            model.weight.add_(x[1], alpha=scale)
        optimizer.step()
        return model.weight.sum()

    def make() -> tuple[nn.Module, Any]:
        model = Scale()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    for backend in BACKENDS:
        assert_follows_eager(backend, make, step)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def drawing(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    return square_step(model, optimizer, x * random.random())


def drawing_with_numpy(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    return square_step(model, optimizer, x * float(np.random.rand()))


@pytest.mark.parametrize(
    ("model", "step", "words"),
    [
        (Counting, square_step, "attribute calls from 0 to 1"),
        (linear, drawing, "generator"),
        (linear, drawing_with_numpy, "generator"),
    ],
)
def test_what_python_would_do_once_only_is_refused(model: Any, step: Any, words: str) -> None:
    made = model()
    with pytest.raises(CaptureError, match=words):
        StepCompiler(step, made, torch.optim.SGD(made.parameters(), lr=0.1), backend="xla")(torch.ones(4, 3))


@dataclasses.dataclass
class Config:
    factor: float


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.config = Config(1.0)
        self.options = {"scale": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.config.factor * self.options["scale"][0]


def test_a_setting_inside_a_dataclass_or_a_list_compiles_again() -> None:
    def make() -> tuple[nn.Module, Any]:
        model = Configured()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def between(index: int, model: Any, *_: Any) -> None:
        model.config = Config(1.0 + index)
        model.options["scale"][0] = 1.0 / (1 + index)

    assert_follows_eager("xla", make, square_step, between)


def test_autocast_around_the_step_is_part_of_the_key() -> None:
    reasons: list[str] = []
    model, optimizer = make_sgd()
    compiler = StepCompiler(
        square_step, model, optimizer, backend="xla", on_event=lambda event: reasons.append(event.reason)
    )
    compiler(torch.ones(4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiler(torch.ones(4, 3))
    assert reasons == ["first compile", "autocast off → torch.bfloat16"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_may_lie_in_memory_as_it_likes(backend: str) -> None:
    losses = {}
    for each in ("eager", backend):
        model, optimizer = make_sgd()
        compiler = StepCompiler(square_step, model, optimizer, backend=each)  # type: ignore[arg-type]
        wide = torch.arange(12.0).reshape(3, 4)
        batches = [torch.ones(4, 3), wide.t(), torch.ones(3).expand(4, 3), torch.ones(8, 3)[::2]]
        losses[each] = [float(compiler(x)) for x in batches]
    assert losses[backend] == pytest.approx(losses["eager"], rel=1e-5)


def test_digits_that_xla_would_lose_are_refused() -> None:
    model = linear().double()
    with pytest.raises(DataError, match="float64"):
        StepCompiler(square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(
            torch.ones(4, 3, dtype=torch.float64)
        )


def test_a_state_that_was_lost_with_a_failed_step_is_named_and_taken_again_by_push() -> None:
    model, optimizer = make_sgd()
    compiler = StepCompiler(square_step, model, optimizer, backend="xla")
    compiler(torch.ones(4, 3))
    lifted: Any = compiler._lifted
    for array in lifted.backend.arrays:
        array.delete()  # as XLA does with what was donated to a step that failed
    with pytest.raises(CompileError, match="went with a step that failed"):
        compiler(torch.ones(4, 3))
    compiler.push()
    compiler(torch.ones(4, 3))


def test_two_steps_of_the_same_shapes_do_not_answer_for_each_other(tmp_path: Any) -> None:
    def other_loss(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).abs().mean()
        loss.backward()
        optimizer.step()
        return loss

    for backend in BACKENDS:
        for step in (square_step, other_loss):
            model, optimizer = make_sgd()
            eager_model, eager_optimizer = make_sgd()
            x = inputs(1)[0]
            got = StepCompiler(step, model, optimizer, backend=backend, cache_dir=tmp_path)(x)  # type: ignore[arg-type]
            assert float(got) == pytest.approx(float(step(eager_model, eager_optimizer, x).detach()), rel=1e-5)


def test_the_digest_of_code_sees_nested_functions_partials_and_closures() -> None:
    def make(constant: float, inner: float) -> Any:
        def outer() -> float:
            def nested() -> float:
                return 1.5 if inner else 2.5

            return nested() + constant

        return outer

    def other() -> Any:
        return [value + 1 for value in range(3)]

    def another() -> Any:
        return [value + 2 for value in range(3)]

    assert code_digest(make(1, 1)) == code_digest(make(1, 1))
    assert code_digest(make(1, 1)) != code_digest(make(2, 1))
    assert code_digest(other) != code_digest(another)
    assert code_digest(functools.partial(other, 1)) != code_digest(functools.partial(other, 2))

    def early() -> Any:
        return late

    assert code_digest(early)
    late = 1


@pytest.mark.parametrize(
    "each", [each for each in PASSES if each.keeps_bits and not each.strategy], ids=lambda each: each.name
)
def test_a_pass_that_says_so_keeps_every_bit(each: Pass) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        copied = torch.clone(x.t()).detach()
        unused = copied * 3
        del unused
        return copied.sin() @ y.expand(4, 4), torch.empty(4, 4).copy_(y).t().contiguous()

    x, y = torch.randn(4, 4), torch.randn(4)
    functional = each.name != "drop_writes"
    traced = torch.func.functionalize(function) if functional else function
    graph = make_fx(traced, tracing_mode="fake")(x, y)
    want = graph(x, y)
    changed = run_passes(graph, (each,), PassContext(slots=(), num_rates=0, num_batch=2, backend="inductor"))
    assert changed[each.name] > 0, "the graph gave the pass nothing to do"
    for got, expected in zip(graph(x, y), want, strict=True):
        assert torch.equal(got, expected)
