"""The newest events of a run are found by the index of its job, whatever else the table holds."""

from __future__ import annotations

from sqlalchemy import event

from twinstep.platform.store.store import Store
from twinstep.spec.job import JobSpec


def test_the_newest_events_of_a_run_are_found_by_index(store: Store) -> None:
    job = store.create_job(JobSpec(name="a"))
    asked: list[tuple[str, object]] = []
    engine = store.database._reads

    def note(connection, cursor, statement, parameters, context, many) -> None:
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        found = store.last_events(job.id, job.run_id, limit=5)
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert [each.name for each in found] == ["submitted"]
    if store.database.dialect == "sqlite":
        with store.database.read() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked[-1][0]}", asked[-1][1]).all()
        assert "USING INDEX" in str(plan)
