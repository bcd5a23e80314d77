"""Ids that a step makes of its batch: none that names no row is read in silence, and such a step changes nothing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from twinstep.spec.errors import CompileError, DataError
from twinstep.worker.compile import StepCompiler

BACKENDS = [pytest.param("inductor", marks=pytest.mark.inductor), "xla"]
ROWS, COUNT = 7, 4
Form = Callable[[nn.Embedding, Tensor], Tensor]

FORMS: dict[str, Form] = {
    "as it is": lambda table, ids: table(ids),
    "one of them": lambda table, ids: table(ids[0]),
    "shifted": lambda table, ids: table(ids + 1),
    "indexed": lambda table, ids: table.weight[ids],
    "indexed and shifted": lambda table, ids: table.weight[ids - 2],
    "chosen": lambda table, ids: table(torch.where(ids < 3, ids, 0)),
    "clamped on one side": lambda table, ids: table(ids.clamp(max=ROWS - 1)),
    "in another shape": lambda table, ids: table(ids.view(2, 2).t().reshape(-1)[1:3]),
    "joined": lambda table, ids: table(torch.cat([ids[:2], ids[3:] // 2])),
    "by remainder of itself": lambda table, ids: table(ids % (ids.abs() + 1) + ids // 4),
    "selected": lambda table, ids: table.weight.index_select(0, ids),
    "gathered": lambda table, ids: table.weight.gather(0, ids[:, None].expand(COUNT, 3)),
    "added": lambda table, ids: table.weight.index_add(0, ids, torch.ones(COUNT, 3)),
    "scattered": lambda table, ids: table.weight.scatter(0, ids[:, None].expand(COUNT, 3), 0.5),
    "in a bag": lambda table, ids: F.embedding_bag(ids[None] - 1, table.weight),
    "classes": lambda table, ids: F.cross_entropy(table.weight[:COUNT] @ torch.ones(3, ROWS), ids, ignore_index=-1),
    "one hot": lambda table, ids: F.one_hot(ids, ROWS).float() @ table.weight,
}


class Tables(nn.Module):
    """One table for each form, and a count of steps, which no lookup stands before."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 3) for _ in names)
        self.names = names
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen.add_(1)
        found = [FORMS[name](table, batch[name]) for name, table in zip(self.names, self.tables, strict=True)]  # type: ignore[arg-type]
        return torch.stack([(each * each).sum() for each in found]).sum()


def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(batch)
    loss.backward()
    optimizer.step()
    return loss


def compiled(model: nn.Module, backend: Any, **settings: Any) -> StepCompiler:
    return StepCompiler(step, model, torch.optim.Adam(model.parameters(), lr=0.01), backend=backend, **settings)


def taken(backend: str) -> tuple[str, ...]:
    """Return the forms of one step: on Inductor, whose code checks indices itself, those that it may miss, and some."""
    some = ("as it is", "shifted", "indexed", "selected", "classes", "one hot")
    return some if backend == "inductor" else tuple(FORMS)


@functools.cache
def all_forms(backend: str) -> tuple[Tables, StepCompiler]:
    model = Tables(*taken(backend))
    compiler = compiled(model, backend)
    compiler({name: torch.ones(COUNT, dtype=torch.int64) for name in model.names})
    return model, compiler


def state(model: nn.Module, compiler: StepCompiler) -> dict[str, Tensor]:
    compiler.pull()
    return copy.deepcopy(model.state_dict())


def eager_takes(form: Form, ids: Tensor) -> bool:
    try:
        form(nn.Embedding(ROWS, 3), ids)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data(), ids=st.lists(st.integers(-9, 9), min_size=COUNT, max_size=COUNT))
@settings(max_examples=120, deadline=None)
def test_a_step_takes_the_ids_that_eager_takes_and_no_others(backend: str, data: Any, ids: list[int]) -> None:
    model, compiler = all_forms(backend)
    name = data.draw(st.sampled_from(model.names))
    batch = {each: torch.ones(COUNT, dtype=torch.int64) for each in model.names} | {name: torch.tensor(ids)}
    if eager_takes(FORMS[name], batch[name]):
        assert torch.isfinite(compiler(batch)) or name == "classes"
        return
    before = state(model, compiler)
    with pytest.raises(DataError) as caught:
        compiler(batch)
    assert f"['{name}']" in caught.value.problem
    assert f"{__file__}:" in caught.value.problem
    torch.testing.assert_close(state(model, compiler), before, rtol=0, atol=0)


def test_the_error_has_the_leaf_the_ids_the_rows_and_the_line() -> None:
    _, compiler = all_forms("xla")
    batch = {each: torch.ones(COUNT, dtype=torch.int64) for each in FORMS} | {"shifted": torch.tensor([0, 1, 2, ROWS])}
    with pytest.raises(DataError) as caught:
        compiler(batch)
    line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "ids + 1)" in text)
    assert caught.value.problem.startswith(
        f"ids made of batch leaf ['shifted'] are 1…{ROWS + 1}, and embedding looks up rows 0…{ROWS - 1}"
        f" at {__file__}:{line}:"
    )
    with pytest.raises(DataError, match=f"classes 0…{ROWS - 1}"):
        compiler(batch | {"shifted": batch["as it is"], "one hot": torch.tensor([0, 0, 0, ROWS])})


def test_what_is_within_the_table_by_its_making_is_not_computed_before_the_step() -> None:
    bounded: list[Form] = [
        lambda table, ids: table(ids % ROWS),
        lambda table, ids: table(ids.clamp(0, ROWS - 1)),
        lambda table, ids: table(ids.float().sigmoid().mul(ROWS - 1).long()),
        lambda table, ids: table(torch.where((ids >= 0) & (ids < ROWS), ids, 0)),
        lambda table, ids: table(table.weight.argmax(0)),
        lambda table, ids: table(torch.bucketize(ids.float(), torch.arange(ROWS - 1).float())),
        lambda table, ids: table(torch.randint(0, ROWS, (COUNT,))),
        lambda table, ids: table(table.weight.topk(2, 0).indices),
        lambda table, ids: table((ids > 2).long() + (ids & 3)),
    ]
    for form in bounded:
        guard = checked_of(form)
        assert not guard.checks, form
    for form in (FORMS["shifted"], lambda table, ids: table((ids.float().sigmoid() * ROWS).long())):
        assert checked_of(form).checks


def checked_of(form: Form) -> Any:
    from twinstep.worker.compile.guards import guard

    return guard(compiled(One(form), "xla").look(torch.ones(COUNT, dtype=torch.int64)).captured)


class One(nn.Module):
    """One table under one form; buffers that ids may be made of."""

    def __init__(self, form: Callable[..., Tensor], *, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.form, self.whole = nn.Embedding(ROWS, 3), form, whole
        self.register_buffer("places", torch.arange(COUNT))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.form(self if self.whole else self.table, ids).square().sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_a_buffer_are_checked_as_the_buffer_stands(backend: str) -> None:
    def form(model: Any, ids: Tensor) -> Tensor:
        found: Tensor = model.table(model.places) + model.table(model.at.clone()) * ids[:, None]
        model.at.add_(1)
        return found

    ids = torch.ones(COUNT, dtype=torch.int64)
    model = One(form, whole=True)
    compiler = compiled(model, backend)
    for _ in range(2):
        compiler(ids)
    compiler.pull()
    model.places[1] = ROWS
    before = state(model, compiler)
    with pytest.raises(DataError, match="no leaf of the batch"):
        compiler(ids)
    torch.testing.assert_close(state(model, compiler), before, rtol=0, atol=0)
    model.places[1] = 0
    for _ in range(ROWS - 2):
        compiler(ids)
    with pytest.raises(DataError, match=f"{ROWS}…{ROWS}"):
        compiler(ids)
    assert int(state(model, compiler)["at"]) == ROWS


def test_ids_of_parameters_are_bounded_or_refused_by_xla_with_the_line() -> None:
    ids = torch.ones(COUNT, dtype=torch.int64)
    unbounded = One(lambda table, ids: table(table.weight.sum(1).long()))
    with pytest.raises(CompileError, match="computed from parameters") as caught:
        compiled(unbounded, "xla")(ids)
    assert f"{__file__}:" in caught.value.problem
    assert f"clamp(0, {ROWS - 1})" in caught.value.remedy
    bounded = One(lambda table, ids: table(table.weight.sum(1).long().clamp(0, ROWS - 1)))
    assert torch.isfinite(compiled(bounded, "xla")(ids))


def test_a_product_of_ids_that_32_bits_cut_is_an_error_and_a_short_one_is_eagers() -> None:
    form: Form = lambda table, ids: table(ids * 1_000_003 % ROWS)  # noqa: E731
    model, eager = One(form), One(form)
    compiler = compiled(model, "xla")
    short = torch.tensor([1, 20, 300, 2000])
    torch.testing.assert_close(compiler(short), step(eager, torch.optim.Adam(eager.parameters(), lr=0.01), short))
    before = state(model, compiler)
    with pytest.raises(DataError, match="32 bits"):
        compiler(torch.tensor([1, 20, 300, 3000]))
    torch.testing.assert_close(state(model, compiler), before, rtol=0, atol=0)


def test_a_program_from_disk_checks_as_the_one_it_was(tmp_path: Path) -> None:
    ids = torch.ones(COUNT, dtype=torch.int64)
    for _ in range(2):
        compiler = compiled(Tables("shifted"), "xla", cache_dir=tmp_path)
        compiler({"shifted": ids})
        with pytest.raises(DataError, match=f"are 2…{ROWS}"):
            compiler({"shifted": torch.tensor([1, 1, 1, ROWS - 1])})
    assert next(iter(compiler._runners.values()))._captured is None
