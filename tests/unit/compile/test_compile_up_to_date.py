"""state_dict() of a compiled step's model and optimizer is right at any moment, without a pull."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.up_to_date import let_go


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_state_dicts_follow_eager_after_each_step_without_a_pull() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    want_model, want_optimizer = make()
    model, optimizer = make()
    compiler = StepCompiler(step, model, optimizer, backend="xla")
    for index in range(4):
        step(want_model, want_optimizer, x)
        compiler(x)
        if index % 2:
            same(optimizer.state_dict()["state"], want_optimizer.state_dict()["state"])
            same(model.state_dict(), want_model.state_dict())
        else:
            same(model[0].state_dict(), want_model[0].state_dict())  # type: ignore[index]
            same(model.state_dict(), want_model.state_dict())


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_the_rows_that_a_process_has_are_all_of_them_where_it_is_alone(kind: str) -> None:
    x = torch.ones(5, 3) * torch.arange(5.0)[:, None]
    pairs = [(model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)) for model in (make()[0], make()[0])]
    compiler = StepCompiler(step, *pairs[0], backend="xla")
    compiler(x)
    step(*pairs[1], x)
    assert compiler.pull_own() == {}  # counts of steps, which have no dimensions, among them
    same(pairs[0][1].state_dict()["state"], pairs[1][1].state_dict()["state"])
    same(pairs[0][0].state_dict(), pairs[1][0].state_dict())


def test_a_checkpoint_between_steps_goes_on_where_it_was() -> None:
    x = torch.ones(5, 3) * torch.arange(5.0)[:, None]
    model, optimizer = make()
    compiler = StepCompiler(step, model, optimizer, backend="xla")
    for _ in range(2):
        compiler(x)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    later = [float(compiler(x)) for _ in range(2)]
    other, other_optimizer = make()
    other.load_state_dict(kept[0])
    other_optimizer.load_state_dict(kept[1])
    same([float(StepCompiler(step, other, other_optimizer, backend="xla")(x))], later[:1])
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    same([float(compiler(x)) for _ in range(2)], later)


def test_copies_of_a_compiled_model_are_their_own() -> None:
    model, optimizer = make()
    compiler = StepCompiler(step, model, optimizer, backend="xla")
    compiler(torch.ones(5, 3))
    model.state_dict()
    twin = copy.deepcopy(model)
    written = io.BytesIO()
    torch.save(model, written)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    compiler(torch.ones(5, 3))
    same(twin.state_dict(), before)
    written.seek(0)
    same(torch.load(written, weights_only=False).state_dict(), before)


def through_torch_save(value: Any) -> Any:
    written = io.BytesIO()
    torch.save(value, written)
    written.seek(0)
    return torch.load(written, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())
def test_copies_hold_the_state_after_the_last_step_without_a_pull(make_copy: Callable[[Any], Any]) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    want_model, want_optimizer = make()
    model, optimizer = make()
    compiler = StepCompiler(step, model, optimizer, backend="xla")
    for _ in range(3):
        step(want_model, want_optimizer, x)
        compiler(x)
        same(dict(make_copy(model[0]).named_buffers()), dict(want_model[0].named_buffers()))  # type: ignore[index]
        found = {name: value.detach() for name, value in make_copy(model).named_parameters()}
        same(found, {name: value.detach() for name, value in want_model.named_parameters()})
        step(want_model, want_optimizer, x)
        compiler(x)
        twin = make_copy(optimizer)
        same(list(twin.state.values()), list(want_optimizer.state.values()))
        assert "__getstate__" not in vars(twin)


def test_a_copy_of_model_and_optimizer_together_trains_on_by_itself() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    model, optimizer = make()
    compiler = StepCompiler(step, model, optimizer, backend="xla")
    compiler(x)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for _ in range(2):
        compiler(x)
        step(twin, twin_optimizer, x)
    same(twin.state_dict(), model.state_dict())
    same(twin_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


class Particular(nn.Linear):
    """Has a `__getstate__` of its own, which leaves something out."""

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "scratch"}


def test_a_class_that_says_what_its_state_is_is_asked() -> None:
    torch.manual_seed(0)
    model = Particular(3, 3)
    model.mark, model.scratch = "kept", "left out"  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    StepCompiler(step, model, optimizer, backend="xla")(torch.ones(5, 3))
    twin = copy.deepcopy(model)
    assert not torch.equal(twin.weight, before)
    assert twin.mark == "kept"
    assert not hasattr(twin, "scratch")
    assert model.scratch == "left out"


def test_nothing_is_left_on_a_model_that_was_let_go() -> None:
    model, optimizer = make()
    StepCompiler(step, model, optimizer, backend="xla")(torch.ones(5, 3))
    assert "__getstate__" in vars(model)
    let_go(model, [optimizer])
    assert "__getstate__" not in vars(model)
    assert "__getstate__" not in vars(optimizer)
    assert not model._state_dict_pre_hooks


def test_a_second_compiler_of_a_model_takes_up_what_the_first_one_had() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    want_model, want_optimizer = make()
    model, optimizer = make()
    for backend in ("xla", "xla"):
        compiler = StepCompiler(step, model, optimizer, backend=backend)  # type: ignore[arg-type]
        for _ in range(2):
            step(want_model, want_optimizer, x)
            compiler(x)
    same(model.state_dict(), want_model.state_dict())
