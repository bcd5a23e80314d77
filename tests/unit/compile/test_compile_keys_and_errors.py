"""When a step is compiled again and what it says, and what is refused before anything is changed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twinstep
from twinstep.spec.errors import CaptureError, CompileError, DataError
from twinstep.worker.compile import CompileEvent, CompileKey, CompileWarning, StepCompiler
from twinstep.worker.compile import key as key_module
from twinstep.worker.compile.key import TRACED, reason, versions
from twinstep.worker.compile.shipped import STACK
from twinstep.worker.compile.stamp import Stamp
from twinstep.worker.compile.standing import reach
from twinstep.worker.compile.step_compiler import _STACK
from twinstep.worker.compile.storm import StormWatch


def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x)[:, 0] - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, 3), torch.zeros(rows)


def compiler(events: list[CompileEvent], train_step: Any = step, **options: Any) -> tuple[nn.Module, Any, StepCompiler]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    options.setdefault("backend", "xla")
    return model, optimizer, StepCompiler(train_step, model, optimizer, on_event=events.append, **options)


def test_a_new_batch_size_compiles_again_and_says_why_and_an_old_one_does_not() -> None:
    events: list[CompileEvent] = []
    _, _, compiled = compiler(events)
    for rows in (64, 128, 64, 128):
        compiled(batch(rows), sizes={"batch_size": rows, "uih_len": 4})
    assert [event.name for event in events] == ["compiled", "recompiled"]
    assert [event.reason for event in events] == ["first compile", "batch_size 64 → 128"]
    assert all(event.seconds > event.capture_seconds > 0 for event in events)


def test_state_goes_on_across_programs_of_different_shapes() -> None:
    _, _, mixed = compiler([])
    _, _, eager = compiler([], backend="eager")
    for rows in (2, 4, 2):
        assert float(mixed(batch(rows))) == pytest.approx(float(eager(batch(rows))), rel=1e-3)


def test_a_hyperparameter_that_is_built_in_compiles_again() -> None:
    events: list[CompileEvent] = []
    _, optimizer, compiled = compiler(events)
    compiled(batch(2))
    optimizer.param_groups[0]["lr"] = 0.5
    compiled(batch(2))
    assert len(events) == 1
    optimizer.param_groups[0]["eps"] = 1e-3
    compiled(batch(2))
    assert "eps=1e-08" in events[1].reason
    assert "eps=0.001" in events[1].reason


def test_a_changed_setting_of_a_module_compiles_again_and_is_named() -> None:
    events: list[CompileEvent] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = StepCompiler(step, model, optimizer, backend="xla", on_event=events.append)
    compiled(batch(2))
    model[0].p = 0.5
    compiled(batch(2))
    model.eval()
    compiled(batch(2))
    assert events[1].reason == "0.p 0.0 → 0.5"
    assert events[2].reason == "training True → False, 0.training True → False, 1.training True → False"


def test_programs_in_memory_are_bounded() -> None:
    events: list[CompileEvent] = []
    _, _, compiled = compiler(events, max_runners=2)
    for rows in (1, 2, 3, 1):
        compiled(batch(rows))
    assert len(events) == 4


def test_a_change_in_any_field_of_the_key_misses_and_has_a_reason() -> None:
    _, _, compiled = compiler([])
    key = compiled.key(batch(2), sizes={"batch_size": 2})
    changed: dict[str, Any] = {
        "sizes": (("batch_size", 3),),
        "devices": 2,
        "mesh": (("data", "2"),),
        "state": (*key.state[:-1], (key.state[-1][0], (7,), "float32")),
        "batch": (),
        "structure": "list",
        "hyperparameters": key.hyperparameters[1:],
        "modules": (("training", "False"),),
        "ambient": (("autocast", "torch.bfloat16"),),
        "backend": "inductor",
        "around": (("limits of item", "8 ids"),),
        "strategies": ("Rematerialise(budget_bytes=1)",),
        "step": "0",
        "threads": 99,
        "versions": (("torch", "0"),),
    }
    for field in dataclasses.fields(CompileKey):  # a field added without a case fails here
        other = dataclasses.replace(key, **{field.name: changed[field.name]})
        assert other != key
        assert other.digest != key.digest
        assert reason(key, other) not in ("", "same key")
    assert reason(key, key) == "same key"


def test_all_code_that_is_traced_into_a_program_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what JAX traces imports it, and only operators are registered: such a file must be one the digest reads."""
    worker, traced = (
        Path(twinstep.__file__).parent / "worker",
        re.compile(r"^\s*(?:import|from) jax\b|custom_op\(", re.M),
    )
    files = [path for path in worker.rglob("*.py") if traced.search(path.read_text())]
    assert len(files) > 20
    assert [path for path in files if not any(path.is_relative_to(folder) for folder in TRACED)] == []
    assert all(any(path.is_relative_to(folder) for path in files) for folder in TRACED)
    whole = dict(versions(()))["twinstep compiler"]
    for left_out in TRACED:
        monkeypatch.setattr(key_module, "TRACED", tuple(each for each in TRACED if each != left_out))
        key_module._own_source.cache_clear()
        assert dict(versions(()))["twinstep compiler"] != whole, left_out
    key_module._own_source.cache_clear()


def test_packages_whose_kernels_are_in_a_program_are_in_its_key() -> None:
    for stack in (STACK, _STACK["xla"]):
        assert dict(versions(stack))["jax-tpu-embedding"] == importlib.metadata.version("jax-tpu-embedding")


@pytest.mark.inductor
def test_the_disk_cache_answers_a_second_process_of_the_same_step(tmp_path: Path) -> None:
    for backend in ("xla", "inductor"):
        found = []
        for _ in range(2):
            events: list[CompileEvent] = []
            _, _, compiled = compiler(events, backend=backend, cache_dir=tmp_path)
            compiled(batch(6))
            found.append(events[0].cache)
        assert found == ["none", "disk"], backend


def data_dependent(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    loss = model(given[0]).sum()
    if loss > 0:
        loss = loss * 2
    return loss


def scalar_used(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    scale = given[1].sum().item()
    return model(given[0]).sum() ** scale


def scalar_returned(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> float:
    return model(given[0]).sum().item()


def shape_from_data(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    chosen = given[0][given[0] > 0]
    return chosen.new_zeros(int(chosen.sum())).sum()


@pytest.mark.parametrize(
    ("train_step", "line"),
    [
        (data_dependent, "if loss > 0"),
        (scalar_used, "scale"),
        (scalar_returned, ""),
        (shape_from_data, "chosen"),
    ],
)
def test_what_one_graph_cannot_hold_is_named_and_changes_nothing(train_step: Any, line: str) -> None:
    model, optimizer, compiled = compiler([], train_step)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CaptureError) as caught:
        compiled(batch(2))
    assert line in caught.value.problem
    if line:
        assert Path(__file__).name in caught.value.problem
    assert caught.value.remedy
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert isinstance(optimizer.param_groups[0]["params"][0], nn.Parameter)


def numpy_read(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return model(given[0]).sum() * float(np.log1p(given[1].numpy()).sum())


def values_listed(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return model(given[0]).sum() * len(set(given[1].reshape(-1).to(torch.int64).tolist()))


@pytest.mark.parametrize(("train_step", "line"), [(numpy_read, "np.log1p"), (values_listed, "set(")])
def test_values_that_python_reads_are_named_with_what_to_use_instead(train_step: Any, line: str) -> None:
    _, _, compiled = compiler([], train_step)
    with pytest.raises(CaptureError) as caught:
        compiled(batch(2))
    assert line in caught.value.problem
    assert "torch's own functions" in caught.value.remedy or "torch.where" in caught.value.remedy


def test_an_error_of_the_users_own_step_is_named_with_its_line() -> None:
    def broken(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        return model(given[0]) @ torch.ones(5)

    _, _, compiled = compiler([], broken)
    with pytest.raises(CaptureError, match=r"torch\.ones\(5\)"):
        compiled(batch(2))


@pytest.mark.inductor
def test_a_runner_refuses_other_structures_shapes_and_dtypes_and_keeps_the_state() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = twinstep.compile(step, model, optimizer, batch(4), target="inductor")
    before = model.weight.detach().clone()
    x, y = batch(4)
    for wrong, word in (((x, y, y), "structure"), ((x[:2], y[:2]), r"\[2, 3\]"), ((x.double(), y), "float64")):
        with pytest.raises(CompileError, match=word):
            runner(wrong)
    with pytest.raises(CompileError, match="not a tensor"):
        runner((x, 3.0))
    assert torch.equal(model.weight, before)
    runner(batch(4))
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("target", ["inductor", "xla"])
def test_a_runner_alone_trains_and_brings_the_live_model_up_to_date(target: Any) -> None:
    models = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiled:
            runner = twinstep.compile(step, model, optimizer, batch(4), target=target)
            runner(batch(4))
            runner.pull()
        else:
            step(model, optimizer, batch(4))
        models.append(model.state_dict())
    torch.testing.assert_close(models[0], models[1])


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    with pytest.raises(CompileError, match="not the model's"):
        StepCompiler(step, model, torch.optim.SGD(other.parameters(), lr=0.1), backend="xla")


def test_an_integer_that_xla_would_cut_is_refused() -> None:
    model = nn.Embedding(4, 2)

    def lookup(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        return model(given[0]).sum() + (given[1] // 1000).sum()

    compiled = StepCompiler(lookup, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")
    ids = torch.tensor([1, 2])
    compiled((ids, torch.tensor([1_650_000_000])))
    with pytest.raises(DataError, match="1650000000000"):
        compiled((ids, torch.tensor([1_650_000_000_000])))


def test_making_optimizer_state_moves_nothing() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model.weight.grad = torch.full_like(model.weight, 7.0)
    before = model.weight.detach().clone()
    StepCompiler(step, model, optimizer, backend="xla")
    assert torch.equal(model.weight, before)
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 7.0))
    assert all(float(entry["step"]) == 0 for entry in optimizer.state.values())


def masked_by_index(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return model(given[0])[given[1] > 0].sum()


def unique_values(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return torch.unique(given[1]).sum() + model(given[0]).sum()


@pytest.mark.parametrize("backend", ["inductor", "xla"])
@pytest.mark.parametrize(("train_step", "line"), [(masked_by_index, "> 0]"), (unique_values, "torch.unique")])
def test_a_shape_that_depends_on_data_is_refused_with_the_users_line(train_step: Any, line: str, backend: str) -> None:
    _, _, compiled = compiler([], train_step, backend=backend)
    with pytest.raises(CaptureError, match="shape depends") as caught:
        compiled(batch(2))
    assert line in caught.value.problem


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_going_back_to_an_earlier_hyperparameter_compiles_nothing(kind: str) -> None:
    events: list[CompileEvent] = []
    finals = []
    for backend in ("xla", "eager"):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        compiled = StepCompiler(step, model, optimizer, backend=backend, on_event=events.append)  # type: ignore[arg-type]
        for decay in (0.0, 0.5, 0.0, 0.5):
            optimizer.param_groups[0]["weight_decay"] = decay
            compiled(batch(2))
        compiled.pull()
        finals.append(model.weight.detach().clone())
    assert len(events) == 2
    torch.testing.assert_close(finals[0], finals[1])


def test_a_storm_of_compiles_is_told_once_with_what_keeps_changing() -> None:
    told: list[CompileWarning] = []
    events: list[CompileEvent] = []
    _, _, compiled = compiler(events, on_warning=told.append, storm=(2, 10))
    for rows in range(1, 7):
        compiled(batch(rows), sizes={"batch_size": rows, "uih_len": 4})
    assert len(events) == 6
    (storm,) = told
    assert storm.name == "recompile_storm"
    assert storm.data == {"field": "batch_size", "compiles": 3, "steps": 3}
    assert "compiled 3 times in 3 steps" in storm.text
    assert "bucket" in storm.text


def test_compiles_that_are_far_apart_are_no_storm() -> None:
    _, _, compiled = compiler([])
    key = compiled.key(batch(2), sizes={"batch_size": 2})
    other = dataclasses.replace(key, sizes=(("batch_size", 3),))
    watch = StormWatch(max_compiles=2, window=10)
    for _ in range(6):
        assert watch.compiled(key, other) is None
        for _ in range(5):
            watch.step()
    assert watch.compiled(None, key) is None
    assert [watch.compiled(key, other) is None for _ in range(3)] == [True, False, True]  # and then it keeps quiet


def grad_scaled(model: nn.Module, optimizer: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return step(model, optimizer, given) * helper(given[1]).mean()


def helper(y: Tensor, factor: float = 2.0) -> Tensor:
    return y * factor * Settings.scale


class Settings:
    scale = 1.0


def test_what_surrounds_a_step_is_in_its_key() -> None:
    _, _, compiled = compiler([], grad_scaled)
    digests = [compiled.key(batch(2)).digest]
    changes: list[tuple[Any, Any]] = [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        (lambda: setattr(Settings, "scale", 3.0), lambda: setattr(Settings, "scale", 1.0)),
        (lambda: setattr(helper, "__defaults__", (3.0,)), lambda: setattr(helper, "__defaults__", (2.0,))),
    ]
    for change, undo in changes:
        change()
        try:
            digests.append(compiled.key(batch(2)).digest)
        finally:
            undo()
    assert len(set(digests)) == len(digests)
    assert compiled.key(batch(2)).digest == digests[0]


def test_the_stamp_sees_whatever_the_key_sees() -> None:
    _, optimizer, compiled = compiler([], grad_scaled)
    compiled(batch(2))

    def fresh() -> bool:
        stamp = compiled._stamp
        return stamp is not None and stamp.fresh()

    model: Any = compiled._model
    group = optimizer.param_groups[0]
    changes: dict[str, Any] = {
        "mode": model.eval,
        "attribute": lambda: setattr(model, "factor", 2.0),
        "setting": lambda: group.update(eps=0.5),
        "frozen": lambda: model.bias.requires_grad_(False),
        "dtype": lambda: setattr(model.bias, "data", model.bias.data.double()),
        "buffer": lambda: model.register_buffer("more", torch.ones(1)),
        "state": lambda: optimizer.state[model.weight].update(exp_avg=torch.zeros(1, 3)),
        "hook": lambda: model.register_forward_hook(lambda *_: None),
        "class": lambda: setattr(Settings, "scale", 5.0),
    }
    try:
        for name, change in changes.items():
            compiled._stamp = Stamp(compiled.state, model, reach(grad_scaled, model, compiled.state))
            assert fresh(), name
            change()
            assert not fresh(), name
            if name == "dtype":
                model.bias.data = model.bias.data.float()
    finally:
        Settings.scale = 1.0
