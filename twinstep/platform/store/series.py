"""Read metrics for charts."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from twinstep.platform.store.tables import MetricRow


def last_values(connection: Connection, run_id: str, names: Sequence[str]) -> dict[str, float | None]:
    """Return the value of each metric at its last step, by index; a metric without points is left out."""
    found: dict[str, float | None] = {}
    for name in names:
        query = (
            select(MetricRow.value)
            .where(MetricRow.run_id == run_id, MetricRow.name == name)
            .order_by(MetricRow.step.desc())
            .limit(1)
        )
        row = connection.execute(query).one_or_none()
        if row is not None:
            found[name] = row.value
    return found
