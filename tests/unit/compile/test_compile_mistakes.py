"""Typical mistakes of a first hour: each is refused by name, with what to do, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinstep
from twinstep.spec.errors import CompileError
from twinstep.worker.compile import strategies
from twinstep.worker.compile.strategies import Quantize, resolve


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def pieces() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(**more: Tensor) -> dict[str, Tensor]:
    return {"x": torch.ones(4, 3), "y": torch.zeros(4), **more}


@pytest.fixture(scope="module")
def runner() -> Any:
    return twinstep.compile(step, *pieces(), batch(), target="xla")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sparse_embedding", r"give a list: strategies=\[…\]"),
        (["sparse_embeding"], "did you mean 'sparse_embedding'"),
        ([3], "3 is no strategy"),
        ([strategies.Rematerialise], r"needs budget_bytes .*Rematerialise\(budget_bytes=…\)"),
    ],
)
def test_strategies_that_are_none_are_refused_with_the_way_to_give_them(given: Any, said: str) -> None:
    with pytest.raises(CompileError, match=said):
        twinstep.compile(step, *pieces(), batch(), target="xla", strategies=given)


def test_a_strategys_class_stands_for_its_defaults() -> None:
    assert resolve([Quantize])["quantize"] == Quantize()  # type: ignore[list-item]


@pytest.mark.parametrize(("target", "said"), [("tpu", "for a TPU: xla"), ("gpu", "for a GPU: inductor")])
def test_a_device_given_as_target_names_the_backend_for_it(target: Any, said: str) -> None:
    with pytest.raises(CompileError, match=said):
        twinstep.compile(step, *pieces(), batch(), target=target)


def test_a_mesh_that_is_a_number_is_refused() -> None:
    with pytest.raises(CompileError, match="names and lengths of axes, not 8"):
        twinstep.compile(step, *pieces(), batch(), target="xla", mesh=8)  # type: ignore[arg-type]


def test_one_batch_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(CompileError, match="give a list of batches"):
        twinstep.parity(step, *pieces(), batch(), backends=["xla"], steps=1)


@pytest.mark.parametrize("length", [True, 2.0, "2", None])
def test_an_axis_of_a_mesh_has_a_whole_length(length: Any) -> None:
    with pytest.raises(CompileError, match=r"axis 'data' is .* long"):
        twinstep.compile(step, *pieces(), batch(), target="xla", mesh={"data": length})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "nothing to compare"),
        ({"steps": -1}, "nothing to compare"),
        ({"backends": []}, "no backend"),
        ({"gradients": ["wieght"]}, r"no parameter is called 'wieght'"),
        ({"gradients": "weight"}, r"gradients is 'weight'"),
    ],
)
def test_a_comparison_of_nothing_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CompileError, match=said):
        twinstep.parity(step, *pieces(), [batch()], **{"backends": ["xla"], "steps": 1, **options})


def _named(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = "fast"


def _without_betas(optimizer: Any) -> None:
    del optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize("spoil", [_named, _without_betas])
def test_an_optimizer_that_cannot_step_is_refused_and_as_it_was(spoil: Any) -> None:
    model, _ = pieces()
    optimizer = torch.optim.Adam(model.parameters())
    spoil(optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(CompileError, match=r"'optimizer' \(Adam\) cannot take a step") as caught:
        twinstep.compile(step, model, optimizer, batch(), target="xla")
    assert "param_groups" in caught.value.remedy
    assert not optimizer.state
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


def test_a_batch_of_another_width_is_one_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CompileError, match="must have same reduction dim"):
        twinstep.compile(step, *pieces(), {"x": torch.ones(4, 5), "y": torch.zeros(4)}, target="xla")
    assert not caplog.records


def test_a_leaf_that_is_missing_or_new_is_named(runner: Any) -> None:
    with pytest.raises(CompileError, match=r"lacks \['y'\] and adds \['z'\]"):
        runner({"x": torch.ones(4, 3), "z": torch.zeros(4)})
    with pytest.raises(CompileError, match=r"adds \['z'\]"):
        runner(batch(z=torch.zeros(4)))


def test_another_dtype_is_to_be_cast_and_another_shape_padded(runner: Any) -> None:
    with pytest.raises(
        CompileError, match=r"\['y'\] is \[4\] int64, compiled for \[4\] float32 .*\.to\(torch\.float32\)"
    ):
        runner({"x": torch.ones(4, 3), "y": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(CompileError, match="pad to the compiled shape"):
        runner({"x": torch.ones(4, 3), "y": torch.zeros(3)})


def test_the_directory_of_the_cache_may_be_text(tmp_path: Path) -> None:
    twinstep.compile(step, *pieces(), batch(), target="xla", cache_dir=str(tmp_path / "cache"))
    assert (tmp_path / "cache" / "programs").is_dir()
