"""Series for charts: whatever was reported, in whatever order and however it is asked for, nothing seen is lost."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, insert

from twinstep.platform.store.database import Database
from twinstep.platform.store.records import MetricSeries
from twinstep.platform.store.rollup import Rollup, joined, point, width_for
from twinstep.platform.store.series import SeriesReader, last_values, metric_names
from twinstep.platform.store.tables import MetricRow

values = st.none() | st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
curves = st.dictionaries(st.integers(0, 3000), values, max_size=60)


def brute(points: dict[int, float | None], width: int) -> list[tuple[Any, ...]]:
    """What buckets of `width` steps must say."""
    gathered: dict[int, list[int]] = defaultdict(list)
    for step in sorted(points):
        gathered[step // width].append(step)
    said = []
    for steps in gathered.values():
        known = [value for step in steps if (value := points[step]) is not None]
        mean = statistics.fmean(known) if known else None
        low, high = (min(known), max(known)) if known else (None, None)
        said.append((steps[0], steps[-1], low, high, mean, len(steps) - len(known)))
    return said


def told(series: MetricSeries) -> list[tuple[Any, ...]]:
    columns = (series.first_steps, series.steps, series.lows, series.highs, series.means, series.undefined)
    return list(zip(*columns, strict=True))


def agree(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> bool:
    def same(one: Any, other: Any) -> bool:
        return one == other or (None not in (one, other) and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6))

    return len(found) == len(expected) and all(
        all(same(one, other) for one, other in zip(mine, theirs, strict=True))
        for mine, theirs in zip(found, expected, strict=True)
    )


@given(st.dictionaries(st.integers(0, 5000), values), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_rollup_says_the_same_whatever_the_order_points_came_in(points: Any, kept: int, dice: Any) -> None:
    rollup, order = Rollup(kept=kept), list(points)
    dice.shuffle(order)
    for step in order:
        rollup.add([point(step, float(step), points[step])])
    buckets = rollup.buckets()
    assert len(buckets) <= kept
    assert agree(
        [(each.first, each.last, each.low, each.high, each.mean, each.undefined) for each in buckets],
        brute(points, rollup.width),
    )
    assert [each.time for each in buckets] == [float(each.last) for each in buckets]


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(1, 500))
def test_a_width_is_the_least_that_is_narrow_enough(first: int, extra: int, most: int) -> None:
    width = width_for(first, first + extra, most)

    def count(wide: int) -> int:
        return (first + extra) // wide - first // wide + 1

    assert count(width) <= most or most == 1
    assert width == 1 or count(width // 2) > most


def test_joining_leaves_what_it_was_given_alone() -> None:
    parts = [point(1, 0.0, 1.0), point(2, 0.0, 5.0)]
    assert joined(parts, 4)[0].high == 5.0
    assert parts[0].high == 1.0


@pytest.fixture(scope="module")
def filled(databases: Any, seeded: Any) -> Iterator[Database]:
    database = Database(databases.new())
    seeded.fill_jobs(database, 3)
    yield database
    database.close()


RUN, OTHER = "run-00000000002001", "run-00000000001001"


def store(database: Database, points: dict[int, float | None], *, run_id: str = RUN, name: str = "loss") -> None:
    rows = [
        {"run_id": run_id, "step": step, "time": float(step), "name": name, "value": value}
        for step, value in points.items()
    ]
    if rows:
        with database.write() as connection:
            connection.execute(insert(MetricRow), rows)


@given(
    first=curves,
    later=curves,
    most=st.integers(1, 50),
    kept=st.integers(2, 40),
    edges=st.none() | st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
)
@settings(max_examples=25, deadline=None)
def test_a_series_is_what_the_points_say_at_first_and_when_more_came(
    filled: Database, first: Any, later: Any, most: int, kept: int, edges: tuple[int, int] | None
) -> None:
    with filled.write() as connection:
        connection.execute(delete(MetricRow))
    later = {step: value for step, value in later.items() if step not in first}
    reader = SeriesReader(filled, kept=kept)
    start, end = edges or (None, None)
    store(filled, {5: 1.0}, run_id=OTHER)
    for more in (first, later):
        store(filled, more)
        points = first if more is first else first | later
        found = reader.series(RUN, ["loss", "none"], max_points=most, from_step=start, to_step=end)
        if not points:
            assert found == []
            continue
        (series,) = found
        assert len(series.steps) <= max(most, 1)
        inside = {
            step: value
            for step, value in points.items()
            if (start is None or step >= start) and (end is None or step <= end)
        }
        if edges is None:
            assert agree(told(series), brute(points, series.width))
        else:  # buckets at the edges may be whole, never less
            said = dict(zip(series.steps, told(series), strict=True))
            for row in brute(inside, series.width)[1:-1]:
                assert agree([said[row[1]]], [row])
            for step in inside:
                assert any(low <= step <= high for low, high, *_ in told(series))


def test_a_follower_adds_to_what_it_holds(filled: Database) -> None:
    with filled.write() as connection:
        connection.execute(delete(MetricRow))
    store(filled, {step: float(step) for step in range(1, 1001)})
    reader = SeriesReader(filled)
    (held,) = reader.series(RUN, ["loss"], max_points=100)
    store(filled, {step: float(step) for step in range(1001, 1101)})
    (more,) = reader.series(RUN, ["loss"], max_points=100, from_step=held.first_steps[-1], width=held.width)
    assert more.width == held.width
    assert len(more.steps) < 20
    (whole,) = reader.series(RUN, ["loss"], max_points=100, width=held.width)
    assert told(held)[:-1] + told(more) == told(whole)


def test_what_is_in_memory_of_all_runs_has_a_bound_and_is_read_anew_beyond_it(filled: Database) -> None:
    with filled.write() as connection:
        connection.execute(delete(MetricRow))
    for run_id in (RUN, OTHER):
        store(filled, {step: float(step) for step in range(40)}, run_id=run_id)
    reader = SeriesReader(filled, kept_in_all=50)
    for run_id in (RUN, OTHER, RUN):
        (series,) = reader.series(run_id, ["loss"], max_points=100)
        assert series.steps == list(range(40))
        assert list(reader._runs) == [run_id]


def test_names_are_listed_in_order_and_the_last_values_found(filled: Database) -> None:
    with filled.write() as connection:
        connection.execute(delete(MetricRow))
    for name in ("b", "a", "<img src=x>", "eval/auc"):
        store(filled, {1: 1.0, 7: 3.0, 3: None}, name=name)
    store(filled, {2: None}, name="undefined")
    with filled.read() as connection:
        assert sorted(metric_names(connection, RUN)) == ["<img src=x>", "a", "b", "eval/auc", "undefined"]
        assert metric_names(connection, OTHER) == []
        assert last_values(connection, RUN, ["b", "undefined", "none"]) == {"b": 3.0, "undefined": None}


def test_a_million_points_are_looked_at_once_and_then_by_what_is_new(
    filled: Database, seeded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200_000  # a fifth, so that the test is quick; the query is the same
    with filled.write() as connection:
        connection.execute(delete(MetricRow))
    seeded.fill_points(filled, RUN, count)
    reader = SeriesReader(filled)
    (series,) = reader.series(RUN, ["loss"], max_points=500)
    assert 250 <= len(series.steps) <= 500
    assert max(filter(None, series.highs)) == 5.0  # one step among so many
    assert sum(series.undefined) == 3
    gaps = [after - before for before, after in zip(series.steps, series.first_steps[1:], strict=False)]
    assert max(gaps) > count * 0.009
    asked: list[Any] = []
    monkeypatch.setattr("twinstep.platform.store.series._gathered", lambda *args, **kwargs: asked.append(args) or [])
    store(filled, {count + 10: 9.0})
    (again,) = reader.series(RUN, ["loss"], max_points=500)
    assert (again.steps[-1], again.highs[-1], asked) == (count + 10, 9.0, [])


def test_the_api_reads_series_of_a_jobs_own_runs(shared: Any) -> None:
    job, other = shared.submit("reports-9"), shared.submit("reports-1")
    shared.when(job["id"], "succeeded")
    shared.when(other["id"], "succeeded")
    path = f"/v1/jobs/{job['id']}/metrics"
    assert shared.http.get(f"{path}/names").json() == {"run_id": job["run_id"], "items": ["loss"]}
    answer = shared.http.get(f"{path}/series", params={"names": "loss,none", "max_points": 3}).json()
    (series,) = answer["items"]
    assert (series["width"], series["first_steps"], series["steps"]) == (4, [1, 4, 8], [3, 7, 9])
    assert (series["highs"], series["lows"][-1]) == ([1.0, 0.25, 0.125], 1 / 9)
    assert shared.http.get(f"{path}/series", params={"names": "loss", "run_id": other["run_id"]}).status_code == 404
    assert shared.http.get("/v1/jobs/job-none/metrics/series", params={"names": "loss"}).status_code == 404
    assert shared.http.get(f"{path}/series").status_code == 422
    assert shared.http.get(f"{path}/series", params={"names": "loss", "max_points": 0}).status_code == 422
    backwards = shared.http.get(f"{path}/series", params={"names": "loss", "from_step": 9, "to_step": 1}).json()
    assert all(series["steps"] == [] for series in backwards["items"])
