"""What a spec asks of the compiler reaches it."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from twinstep.spec.errors import SpecError
from twinstep.spec.job import CompileSpec, StrategyName
from twinstep.spec.parse import validate_spec
from twinstep.worker.compile.strategies import DEFAULT_STRATEGIES, STRATEGIES, Rematerialise, resolve
from twinstep.worker.train.asked import strategies_of
from twinstep.worker.train.explain import look_at


def test_a_spec_names_the_strategies_that_need_no_settings() -> None:
    def needs(kind: type) -> bool:
        return any(field.default is dataclasses.MISSING for field in dataclasses.fields(kind))

    # A group of processes is the launcher's to make, so no spec asks for communication by itself.
    known = {name for name, kind in STRATEGIES.items() if not needs(kind)} - {"communication"}
    assert set(get_args(StrategyName)) == known


def test_strategies_of_a_spec_are_the_defaults_those_named_or_none() -> None:
    assert strategies_of(CompileSpec()) is None
    assert strategies_of(CompileSpec(strategies=())) == ()
    assert list(resolve(strategies_of(CompileSpec(strategies=("mixed_precision",))))) == ["mixed_precision"]
    found = resolve(strategies_of(CompileSpec(memory_budget_mib=3)))
    assert list(found) == [*(each.name for each in DEFAULT_STRATEGIES), "rematerialise"]
    assert found["rematerialise"] == Rematerialise(budget_bytes=3 << 20)


def test_a_strategy_that_is_none_or_named_twice_is_refused_by_field() -> None:
    for given, remedy in ((["sparse"], None), (["fold_layers", "fold_layers"], "strategies: [fold_layers]")):
        with pytest.raises(SpecError) as caught:
            validate_spec({"name": "a", "compile": {"strategies": given}})
        assert caught.value.faults[0].field.startswith("compile.strategies")
        if remedy is not None:
            assert caught.value.faults[0].remedy == remedy


def test_the_compiler_does_what_a_spec_asks() -> None:
    tiny: dict[str, Any] = {
        "name": "a",
        "model": {
            "embedding_dim": 8, "transducer_dim": 8, "num_layers": 1, "num_heads": 1, "linear_dim": 8,
            "attention_dim": 8, "hidden_dim": 8,
        },
        "data": {"dataset": "synthetic", "synthetic_events": 500, "batch_size": 4, "uih_len": 8, "num_candidates": 2},
        "compile": {"backend": "xla", "strategies": ["mixed_precision"]},
    }  # fmt: skip
    shown = str(look_at(validate_spec(tiny)).explain())
    assert "mixed_precision" in shown
    assert "sparse_embedding" not in shown
