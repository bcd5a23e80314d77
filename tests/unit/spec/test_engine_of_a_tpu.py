"""Which engine of tables a spec has that names none."""

from __future__ import annotations

from typing import Any

import pytest

from twinstep.spec.errors import SpecError
from twinstep.spec.parse import validate_spec

TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}


def engine_of(**more: Any) -> str:
    return validate_spec({"name": "a", "accelerator": TPU, **more}).embedding.engine


@pytest.mark.parametrize(
    ("more", "engine"),
    [
        ({}, "ring"),
        ({"embedding": {"init_std": 0.1}}, "ring"),
        ({"optimizers": {"sparse": {"kind": "adagrad"}}}, "ring"),
        ({"optimizers": {"dense": {"kind": "sgd", "momentum": 0.9}}}, "ring"),
        ({"compile": {"strategies": ["sparse_embedding"]}}, "ring"),
        ({"optimizers": {"sparse": {"kind": "adam"}}}, "dense"),
        ({"optimizers": {"sparse": {"kind": "sgd", "momentum": 0.5}}}, "dense"),
        ({"optimizers": {"sparse": {"weight_decay": 0.1}}}, "dense"),
        ({"compile": {"strategies": []}}, "dense"),
        ({"embedding": {"engine": "dense"}}, "dense"),
        ({"embedding": {"engine": "sparsecore"}}, "sparsecore"),
        ({"accelerator": {"kind": "tpu", "generation": "v6e", "topology": "1x1"}}, "dense"),
        ({"accelerator": {"kind": "tpu", "generation": "v7x", "topology": "1x1x1"}}, "ring"),
        ({"accelerator": "cpu"}, "dense"),
        ({"accelerator": {"kind": "gpu", "model": "h100", "count": 8}}, "dense"),
    ],
)
def test_a_tpu_passes_rows_around_a_ring_where_the_optimizer_leaves_other_rows_alone(
    more: dict[str, Any], engine: str
) -> None:
    assert engine_of(**more) == engine


def test_four_chips_and_128_are_one_spec_with_another_topology() -> None:
    data = {"batch_size": 128}
    few = validate_spec({"name": "a", "data": data, "accelerator": TPU})
    many = validate_spec({"name": "a", "data": data, "accelerator": {**TPU, "topology": "4x4x8"}})
    assert many.model_copy(update={"accelerator": few.accelerator}) == few


@pytest.mark.parametrize(
    "more",
    [
        {"compile": {"backend": "inductor"}},
        {"embedding": 3},
        {"compile": {"strategies": "all"}},
        {"compile": []},
        {"optimizers": {"sparse": {"kind": ["sgd"]}}},
        {"optimizers": {"sparse": {"kind": {}}}},
        {"optimizers": 1},
    ],
)
def test_what_is_wrong_elsewhere_is_one_fault_and_no_engine_is_blamed(more: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        engine_of(**more)
    assert [each.field.split(".")[0] for each in caught.value.faults] == [next(iter(more))]
