"""The charts of a run's further metrics: what is drawn is this attempt's, and nothing is read while they are closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nicegui import Client
from nicegui.page import page

from twinstep.platform.dashboard.more_charts import MoreCharts
from twinstep.platform.store.records import MetricSeries


async def nothing() -> None:
    pass


@pytest.fixture
def more() -> Iterator[MoreCharts]:
    with Client(page("/more"), request=None) as client:
        yield MoreCharts(nothing, nothing)
    client.delete()


def series(name: str) -> dict[str, MetricSeries]:
    steps, values = [1, 2, 3], [0.5, 0.4, 0.3]
    return {
        name: MetricSeries(
            name=name, width=1, first_steps=steps, steps=steps, times=values, means=list(values), lows=list(values),
            highs=list(values), undefined=[0, 0, 0],
        )
    }  # fmt: skip


def drawn(more: MoreCharts) -> dict[str, list[object]]:
    return {name: plot.element.options["series"][0]["data"] for name, plot in more.plots.items()}


@pytest.mark.parametrize("names", [["mine/loss"], ["mine/loss", "mine/other"], ["mine/other"]], ids=" ".join)
def test_a_new_attempt_shows_none_of_the_last_ones_curves(more: MoreCharts, names: list[str]) -> None:
    more.open = True
    more.set_names(["mine/loss"])
    more.update(series("mine/loss"))
    assert len(drawn(more)["mine/loss"]) == 3
    more.set_names(names)
    more.update(series("mine/other") if "mine/other" in names else {})
    shown = drawn(more)
    assert shown.pop("mine/loss") == []
    assert [len(points) for points in shown.values()] == [3] * ("mine/other" in names)


def test_what_is_closed_is_not_read_however_closely_it_was_looked_at(more: MoreCharts) -> None:
    more.open = True
    more.set_names(["mine/loss"])
    more.update(series("mine/loss"))
    more.plots["mine/loss"].window = (1.0, 2.0)
    assert more.windows() == {"mine/loss": (1, 2)}
    more.open = False
    assert (more.windows(), more.wanted()) == ({}, [])
