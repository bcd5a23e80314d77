"""`scripts/bench api` at a small size: its counts are right, its numbers are there, and a miss is told of."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from bench import api
from bench.measure import as_line

SMALL = api.Size(
    submits=12, rounds=2, runs=60, live=6, followers=(2, 4), batches=8, points=2_000, plans=2, databases=("sqlite",)
)  # fmt: skip


def test_a_small_one_loses_and_doubles_nothing_and_gives_every_number() -> None:
    said: list[str] = []
    found = api.run(SMALL, say=said.append)
    assert found["equal"]
    assert set(found["wrong"]["sqlite"].values()) == {0}
    numbers = found["numbers"]["sqlite"] | found["numbers"]["no database"]
    assert set(api.BARS) <= set(numbers)
    assert json.loads(as_line(found))["bench"] == "api"
    assert "sqlite: submits" in said


def test_the_table_says_which_bar_was_missed() -> None:
    found = {
        "numbers": {"sqlite": {"pass s": 2.0, "ingest points/s": 100.0, "plan ms": 1.0}},
        "bars": api.BARS,
        "wrong": {"sqlite": {"submits lost": 0}},
    }
    text = StringIO()
    Console(file=text, width=100).print(api.table(found))
    lines = text.getvalue().splitlines()
    assert [line.count("missed") for line in lines if "pass s" in line or "ingest" in line] == [1, 1]
    assert not any("missed" in line for line in lines if "plan ms" in line)
