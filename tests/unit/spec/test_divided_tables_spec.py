"""What a spec may ask of tables that are divided over processes, and what it is told where it asks for more."""

from __future__ import annotations

from typing import Any

import pytest

from twinstep.spec.errors import SpecError
from twinstep.spec.parse import validate_spec

DIVIDED: dict[str, Any] = {"name": "divided", "embedding": {"engine": "torchrec"}}


def test_defaults_divide_by_size_with_overlap() -> None:
    spec = validate_spec(DIVIDED | {"runtime": {"processes": 2}})
    assert spec.embedding.sharding == {}
    assert spec.embedding.overlap
    assert spec.runtime.processes == 2


@pytest.mark.parametrize(
    ("parts", "field", "problem"),
    [
        (
            {"embedding": {"sharding": {"item_id": "row_wise"}}},
            "embedding.sharding",
            "has no effect with engine: dense",
        ),
        ({"embedding": {"overlap": False}}, "embedding.overlap", "has no effect with engine: dense"),
        ({"runtime": {"processes": 2}}, "runtime.processes", "are for embedding.engine: torchrec"),
        (DIVIDED | {"compile": {"backend": "xla"}}, "embedding.engine", "does not run on the xla backend"),
        (DIVIDED | {"optimizers": {"sparse": {"kind": "adamw"}}}, "embedding.engine", "has no adamw for tables"),
        (
            DIVIDED | {"optimizers": {"sparse": {"kind": "sgd", "momentum": 0.9}}},
            "embedding.engine",
            "has neither momentum nor weight decay for tables",
        ),
        (
            {"embedding": {"engine": "torchrec", "sharding": {"item_id": "rowwise"}}},
            "embedding.sharding.item_id",
            "",
        ),
    ],
)
def test_what_cannot_be_is_said_at_its_field(parts: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        validate_spec({"name": "divided"} | parts)
    (fault,) = refused.value.faults
    assert fault.field == field
    assert problem in fault.problem
    assert fault.remedy
