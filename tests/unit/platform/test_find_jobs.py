"""Finding jobs: whatever is asked, however few are looked through at once, pages together hold what fits, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from twinstep.platform.store.database import Database
from twinstep.platform.store.records import Job
from twinstep.platform.store.search import JobFilter, JobSort, find_jobs
from twinstep.platform.store.store import Store
from twinstep.spec.job import JobSpec
from twinstep.spec.states import RunState

COUNT = 60


@pytest.fixture(scope="module")
def database(databases: Any, seeded: Any) -> Iterator[Database]:
    database = Database(databases.new())
    seeded.fill_jobs(database, COUNT)
    yield database
    database.close()


def pages(database: Database, wanted: JobFilter, **how: Any) -> Iterator[Job]:
    cursor = None
    with database.read() as connection:
        for _ in range(COUNT + 2):
            page = find_jobs(connection, wanted, cursor=cursor, **how)
            assert len(page.items) <= how["limit"]
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return
    raise AssertionError("the pages do not end")


ORDERS = {
    JobSort.NEWEST: (lambda job: job.id, True),
    JobSort.OLDEST: (lambda job: job.id, False),
    JobSort.NAME: (lambda job: (job.name, job.id), False),
    JobSort.NAME_BACKWARDS: (lambda job: (job.name, job.id), True),
}


@given(
    wanted=st.builds(
        JobFilter,
        states=st.lists(st.sampled_from(list(RunState)), max_size=3, unique=True).map(tuple),
        accelerators=st.lists(st.sampled_from(["cpu", "tpu", "gpu"]), max_size=2, unique=True).map(tuple),
        backends=st.lists(st.sampled_from(["inductor", "xla", "eager"]), max_size=2, unique=True).map(tuple),
        min_attempt=st.integers(1, 3),
        text=st.sampled_from(
            ["", "", "SWEEP", "sweep-0001", "topology=4x4x8", "v5p h100", "00000000000007", "count=128"]
        ),
    ),
    sort=st.sampled_from(list(JobSort)),
    limit=st.integers(1, 9),
    scanned=st.integers(1, 70),
)
@settings(max_examples=120, deadline=None)
def test_pages_hold_every_job_that_fits_once_and_in_order(
    database: Database, wanted: JobFilter, sort: JobSort, limit: int, scanned: int
) -> None:
    def fits(job: Job) -> bool:
        words = {"v5p h100": False, "topology=4x4x8": job.accelerator == "tpu", "count=128": job.accelerator == "gpu"}
        return (
            (not wanted.states or job.state in wanted.states)
            and (not wanted.accelerators or job.accelerator in wanted.accelerators)
            and (not wanted.backends or job.backend in wanted.backends)
            and job.attempt >= wanted.min_attempt
            and words.get(wanted.text, wanted.text.lower() in job.name or wanted.text in job.id)
        )

    with database.read() as connection:
        every = find_jobs(connection, JobFilter(), sort=JobSort.NEWEST, limit=COUNT, cursor=None).items
    assert len(every) == COUNT
    key, backwards = ORDERS[sort]
    expected = sorted(filter(fits, every), key=key, reverse=backwards)
    found = list(pages(database, wanted, sort=sort, limit=limit, scanned=scanned))
    assert [job.id for job in found] == [job.id for job in expected]


def test_a_jobs_newest_run_is_what_it_is_found_by(database: Database) -> None:
    twice = list(pages(database, JobFilter(min_attempt=2), sort=JobSort.OLDEST, limit=50, scanned=100))
    assert [(job.id[-2:], job.attempt) for job in twice] == [(f"{n:02d}", 2) for n in range(0, COUNT, 10)]


@pytest.mark.parametrize(
    "hostile", ["%", "q_q", "\\", "'; drop table jobs; --", "%%%", "\x00qq", "a" * 200, "\u202e", "x=%"]
)
def test_what_is_looked_for_is_text_and_no_pattern(database: Database, hostile: str) -> None:
    assert list(pages(database, JobFilter(text=hostile), sort=JobSort.NEWEST, limit=50, scanned=100)) == []


@pytest.mark.parametrize("cursor", ["", "/", "%", "zzz", "job-none", "a/b/c", "\x00"])
def test_a_cursor_that_is_none_is_a_place_like_any_other(database: Database, cursor: str) -> None:
    for sort in JobSort:
        with database.read() as connection:
            find_jobs(connection, JobFilter(), sort=sort, limit=3, cursor=cursor)


def test_the_few_jobs_of_a_state_are_found_by_an_index(database: Database) -> None:
    if database.dialect != "sqlite":
        pytest.skip("PostgreSQL plans a table as small as this one otherwise")
    with database.read() as connection:
        plan = connection.execute(
            text("EXPLAIN QUERY PLAN SELECT job_id FROM runs WHERE state = 'running' ORDER BY job_id DESC LIMIT 3")
        ).all()
    assert "ix_runs_state_job_id" in str(plan)
    assert "TEMP B-TREE" not in str(plan)


def test_the_api_takes_each_part_of_a_filter(shared: Any) -> None:
    made = [shared.submit(name, **spec) for name, spec in (("found-a", {}), ("found-b", {"train": {"steps": 77}}))]

    def found(**only: Any) -> list[str]:
        answer = shared.http.get("/v1/jobs", params=only)
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["items"]]

    assert found(q="found", sort="oldest") == [job["id"] for job in made]
    assert found(q="found steps=77") == [made[1]["id"]]
    assert found(q="found", sort="-name", accelerator=["cpu", "gpu"], backend="inductor") == [
        job["id"] for job in reversed(made)
    ]
    assert found(q="found", accelerator="tpu") == found(q="found", min_attempt=2) == []
    everything = ["pending", "queued", "starting", "running", "succeeded", "failed", "cancelled"]
    assert found(q="found", state=everything, limit=1) == [made[1]["id"]]
    for wrong in ({"state": "none"}, {"accelerator": "abacus"}, {"sort": "loss"}, {"min_attempt": 0}, {"q": "x" * 201}):
        assert shared.http.get("/v1/jobs", params=wrong).status_code == 422, wrong


def test_counts_are_of_jobs_not_of_their_runs(store: Store) -> None:
    job = store.create_job(JobSpec(name="once"))
    assert store.count_jobs() == {RunState.PENDING: 1}
    store.move(job.run_id, to=RunState.QUEUED, if_version=1, reason="", actor="scheduler")
    assert store.count_jobs() == {RunState.QUEUED: 1}
