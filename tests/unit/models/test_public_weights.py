"""The public model's state dict in and out: exact both ways, and held whole to its configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinstep.spec.errors import TrainError
from twinstep.worker.models.config import DLRMv3Config
from twinstep.worker.models.dlrmv3 import DLRMv3

ACTIONS = "_hstu_transducer._input_preprocessor._action_encoder._combined_action_weights"
HEAD = "_multitask_module._prediction_module.2.weight"
TABLE = "_embedding_collection.embeddings.user_id.weight"


@pytest.fixture
def public(kuairand: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the public model's whole state dict: parameters and buffers."""
    return {
        key.partition("/")[2]: torch.from_numpy(value.copy())
        for key, value in kuairand.items()
        if key.startswith(("params/", "buffers/"))
    }


def test_a_round_trip_gives_every_name_shape_dtype_and_bit(
    public: dict[str, Tensor], kuairand_config: DLRMv3Config
) -> None:
    model = DLRMv3.from_generative_recommenders(public, kuairand_config)
    found = model.to_generative_recommenders()
    assert set(found) == set(public)
    for name, value in public.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    again = DLRMv3.from_generative_recommenders(found, kuairand_config)
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_what_comes_out_is_a_copy(public: dict[str, Tensor], kuairand_config: DLRMv3Config) -> None:
    model = DLRMv3.from_generative_recommenders(public, kuairand_config)
    model.to_generative_recommenders()[HEAD].zero_()
    public[HEAD].zero_()
    assert model.get_parameter(HEAD).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_half_width_are_widened_exactly(
    public: dict[str, Tensor], kuairand_config: DLRMv3Config, dtype: torch.dtype
) -> None:
    half = {name: value.to(dtype) if name.endswith(TABLE) else value for name, value in public.items()}
    model = DLRMv3.from_generative_recommenders(half, kuairand_config)
    assert model.get_parameter(TABLE).dtype is torch.float32
    assert torch.equal(model.get_parameter(TABLE).to(dtype), half[TABLE])


def test_buffers_may_be_left_out(public: dict[str, Tensor], kuairand_config: DLRMv3Config) -> None:
    bare = {name: value for name, value in public.items() if not name.endswith(("_weights", "_units", "_per_period"))}
    bare |= {name: value for name, value in public.items() if name.endswith("_contextual_linear_weights")}
    model = DLRMv3.from_generative_recommenders(bare, kuairand_config)
    assert torch.equal(model.to_generative_recommenders()[ACTIONS], public[ACTIONS])


def renamed(state: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new if name == old else name: value for name, value in state.items()}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda s: renamed(s, HEAD, "_multitask_module._prediction_modul.2.weight"), (HEAD, "unknown", "missing")),
        (lambda s: s | {HEAD: s[HEAD][:3]}, (HEAD, "the shape [3, 512], not [8, 512]")),
        (lambda s: s | {HEAD: s[HEAD].T}, (HEAD, "the shape [512, 8], not [8, 512]")),
        (lambda s: s | {HEAD: s[HEAD].double()}, (HEAD, "float64")),
        (lambda s: s | {HEAD: s[HEAD].to(torch.int64)}, (HEAD, "int64")),
        (lambda s: s | {HEAD: s[HEAD].tolist()}, (HEAD, "is a list, not a tensor")),
        (lambda s: s | {ACTIONS: s[ACTIONS] * 2}, (ACTIONS, "[2, 4, 8")),
        (lambda s: {f"module.{name}": value for name, value in s.items()}, ("take the prefix 'module.' off",)),
        (lambda s: {"a": torch.zeros(1)}, ("give the state dict of a DlrmHSTU itself",)),
        (lambda s: {}, ("is missing",)),
        (
            lambda s: {n: v for n, v in s.items() if n != TABLE} | {HEAD: s[HEAD][:3], "extra": torch.zeros(1)},
            ("3 faults", TABLE, HEAD, "extra is unknown"),
        ),
    ],
)  # fmt: skip
def test_a_state_dict_of_another_configuration_is_refused_with_every_key_and_the_nearest(
    public: dict[str, Tensor], kuairand_config: DLRMv3Config, harm: Any, said: tuple[str, ...]
) -> None:
    with pytest.raises(TrainError) as caught:
        DLRMv3.from_generative_recommenders(harm(public), kuairand_config)
    for words in said:
        assert words in str(caught.value) + caught.value.remedy


def test_a_renamed_key_is_named_with_what_it_may_have_been(
    public: dict[str, Tensor], kuairand_config: DLRMv3Config
) -> None:
    wrong = "_multitask_module._prediction_modul.2.weight"
    with pytest.raises(TrainError) as caught:
        DLRMv3.from_generative_recommenders(renamed(public, HEAD, wrong), kuairand_config)
    assert f"{wrong} is unknown (nearest: {HEAD})" in caught.value.problem
    assert f"{HEAD} is missing (nearest: {wrong})" in caught.value.problem


def test_a_larger_configuration_names_what_the_weights_lack(
    public: dict[str, Tensor], kuairand_config: DLRMv3Config
) -> None:
    with pytest.raises(TrainError, match=r"_stu_layers\.2\._uvqk_weight is missing"):
        DLRMv3.from_generative_recommenders(public, dataclasses.replace(kuairand_config, num_layers=3))
