"""Interleaving, medians and spread, and what a result carries: on numbers known beforehand."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure import (
    as_line,
    as_page,
    cpu_model,
    interleave,
    ratio,
    ratio_spread,
    result,
    rounded,
    seeds_spread,
    spread,
)

numbers = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


def test_sides_take_turns_and_the_warm_up_is_not_counted() -> None:
    log: list[str] = []
    clock = iter(range(100))
    samples = interleave(
        {"a": lambda: (log.append("a"), float(next(clock)))[1], "b": lambda: (log.append("b"), float(next(clock)))[1]},
        runs=3,
        warmup=2,
    )
    assert log == ["a", "b"] * 5
    assert samples == {"a": [4.0, 6.0, 8.0], "b": [5.0, 7.0, 9.0]}


def test_rounds_are_announced_with_the_warm_up_counted() -> None:
    rounds: list[tuple[int, int]] = []
    interleave({"a": lambda: 0.0}, runs=2, warmup=1, on_round=lambda number, total: rounds.append((number, total)))
    assert rounds == [(1, 3), (2, 3), (3, 3)]


def test_a_slow_phase_of_the_machine_cancels_out_of_the_ratios_within_rounds() -> None:
    slow = [1.0, 1.0, 10.0, 10.0, 1.0]
    found = ratio_spread([3 * each for each in slow], [2 * each for each in slow])
    assert found["min"] == found["max"] == found["median"] == pytest.approx(1.5)
    assert ratio([3.0, 3.0, 90.0], [2.0, 2.0, 2.0]) == 1.5


@given(numbers)
def test_spread_is_what_numpy_and_the_standard_library_say(values: list[float]) -> None:
    found = spread(values)
    assert found["median"] == statistics.median(values)
    assert (found["min"], found["max"], found["n"]) == (min(values), max(values), len(values))
    assert found["q1"] == pytest.approx(np.quantile(values, 0.25))
    assert found["q3"] == pytest.approx(np.quantile(values, 0.75))
    assert found["iqr"] == pytest.approx(found["q3"] - found["q1"], abs=1e-9)


def test_one_seed_has_no_deviation_and_several_have_the_samples() -> None:
    assert seeds_spread([0.5])["std"] == 0.0
    assert seeds_spread([0.1, 0.3]) == {
        "mean": 0.2, "std": pytest.approx(0.1414, abs=1e-4), "min": 0.1, "max": 0.3, "values": [0.1, 0.3]
    }  # fmt: skip


def test_floats_are_cut_wherever_they_stand_and_nothing_else_is() -> None:
    assert rounded({"a": [1.23456, 7], "b": ("x", True, None), "c": {"d": 123456.0}}) == {
        "a": [1.235, 7], "b": ["x", True, None], "c": {"d": 123500.0}
    }  # fmt: skip


def test_a_result_carries_its_surroundings_and_names_no_machine() -> None:
    found = result("step", {"ratios": {"a/b": 1.0}}, runs=7)
    assert set(found) == {"bench", "ratios", "versions", "cpu", "threads", "runs", "date"}
    assert {"python", "twinstep", "torch", "jax"} <= set(found["versions"])
    text = as_page(found)
    assert json.loads(text) == json.loads(as_line(found)) == found
    assert "\n" not in as_line(found)
    assert list(json.loads(text)) == sorted(found)
    assert str(Path.home()) not in text
    assert len(platform.node()) < 4 or platform.node() not in text


def test_a_processor_that_is_not_named_is_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU: fast\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU: fast"
    assert cpu_model(tmp_path / "missing") == platform.machine()
