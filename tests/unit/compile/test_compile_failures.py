"""A step that fails leaves the state as it was before it, and says what to do."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from twinstep.spec.errors import CompileError, DataError
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile import compile as compile_step
from twinstep.worker.compile.interrupt import uninterrupted
from twinstep.worker.compile.lookups import written_too_soon

BACKENDS = [pytest.param("inductor", marks=pytest.mark.inductor), "xla"]
ROWS = 7
Batch = dict[str, Tensor]


class Model(nn.Module):
    """Counts its steps in a buffer, which no lookup stands before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 4)
        self.other = nn.Embedding(ROWS - 2, 4)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch) -> Tensor:
        self.seen.add_(1)
        return self.linear(self.table(batch["ids"]) * self.other(batch["more"] + 1)).squeeze(-1)


def step(model: nn.Module, optimizer: Any, batch: Batch) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def given(ids: list[int], more: list[int]) -> Batch:
    return {"ids": torch.tensor(ids), "more": torch.tensor(more)}


GOOD = given([0, 3, ROWS - 1], [0, 1, 2])


def make(backend: str) -> tuple[Model, torch.optim.Optimizer, StepCompiler]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, StepCompiler(step, model, optimizer, backend=backend)  # type: ignore[arg-type]


def state(model: nn.Module, optimizer: torch.optim.Optimizer, compiler: StepCompiler) -> Any:
    compiler.pull()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_that_names_no_row_is_an_error_with_the_leaf_and_changes_nothing(backend: str) -> None:
    model, optimizer, compiler = make(backend)
    compiler(GOOD)
    before = state(model, optimizer, compiler)
    for ids, words in (([0, ROWS, 1], f"ids.* holds 0…{ROWS}"), ([0, -1, 1], "ids.* holds -1…1")):
        with pytest.raises(DataError, match=words) as caught:
            compiler(given(ids, [0, 1, 2]))
        assert f"rows 0…{ROWS - 1}" in caught.value.problem
        assert "table" in caught.value.remedy
        same(state(model, optimizer, compiler), before)
    compiler(GOOD)
    model_of_eager, optimizer_of_eager, eager = make("eager")
    for _ in range(2):
        eager(GOOD)
    torch.testing.assert_close(
        state(model, optimizer, compiler), state(model_of_eager, optimizer_of_eager, eager), rtol=1e-4, atol=1e-5
    )
    assert int(model.seen) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_within_a_step_comes_after_it(backend: str) -> None:
    model, optimizer, compiler = make(backend)
    runner = compiler.runner(GOOD)
    program: Any = runner._program
    name = "code" if backend == "inductor" else "compiled"
    real, done = getattr(program, name), []

    def pressed(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        result = real(*args)
        done.append(1)
        return result

    setattr(program, name, pressed)
    # A process that a shell put into the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run(GOOD)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done
    setattr(program, name, real)
    model_of_eager, optimizer_of_eager, eager = make("eager")
    eager(GOOD)
    torch.testing.assert_close(
        state(model, optimizer, compiler), state(model_of_eager, optimizer_of_eager, eager), rtol=1e-4, atol=1e-5
    )


def test_a_handler_of_ones_own_is_left_alone() -> None:
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            assert came == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_xla_that_refuses_a_call_leaves_the_state_and_one_that_fails_after_it_says_that_it_is_gone() -> None:
    model, optimizer, compiler = make("xla")
    compiler(GOOD)
    before = state(model, optimizer, compiler)
    program: Any = compiler.runner(GOOD)._program
    real = program.compiled

    def refused(*args: Any) -> Any:
        raise ValueError("no room")

    def failed(*args: Any) -> Any:
        real(*args)
        raise RuntimeError("the device went away")

    program.compiled = refused
    with pytest.raises(ValueError, match="no room"):
        compiler(GOOD)
    same(state(model, optimizer, compiler), before)
    program.compiled = failed
    with pytest.raises(RuntimeError, match="went away"):
        compiler(GOOD)
    program.compiled = real
    with pytest.raises(CompileError, match="went with a step that failed"):
        compiler(GOOD)
    compiler.push()
    same(state(model, optimizer, compiler), before)
    compiler(GOOD)


def graph_of(function: Any, *args: Tensor) -> Any:
    return make_fx(function, tracing_mode="fake")(*args)


def test_what_no_lookup_stands_before_is_written_too_soon() -> None:
    def graph(table: Tensor, count: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
        loss = nn.functional.embedding(ids, table).sum() + weights.index_select(0, ids).sum()
        return [table * loss, count + 1, loss]

    traced = graph_of(graph, torch.ones(4, 2), torch.ones(()), torch.tensor([1, 2]), torch.ones(4))
    assert written_too_soon(traced, 2) == (1,)


def refused(model: nn.Module, optimizer: Any, batch: Batch) -> Tensor:
    loss = step(model, optimizer, batch)
    if loss > 0:
        raise AssertionError
    return loss


@pytest.mark.parametrize("some_state", [False, True])
@pytest.mark.parametrize("what", ["a step", "a batch", "a setting"])
def test_a_refused_first_compile_leaves_optimizers_what_they_had(what: str, some_state: bool) -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    if some_state:
        model.linear(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    batch = GOOD
    if what == "a batch":
        batch = given([2**40], [0])
    elif what == "a setting":
        del optimizer.param_groups[0]["betas"]
    before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())

    with pytest.raises((CompileError, DataError)):
        compile_step(refused if what == "a step" else step, model, optimizer, batch, target="xla")

    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_a_batch_that_is_no_number_is_refused_where_asked_and_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Any, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["dense"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = compile_step(train, model, optimizer, {"dense": torch.ones(3, 2)}, target="xla", check_finite=True)
    run({"dense": torch.ones(3, 2)})
    before = copy.deepcopy(model.state_dict())

    for wrong in (float("nan"), float("inf")):
        with pytest.raises(DataError, match="dense"):
            run({"dense": torch.full((3, 2), wrong)})

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
