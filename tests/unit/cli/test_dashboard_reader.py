"""What the pages read, on a real store: rows, lines that grow by what is new, events, the end of a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from twinstep.platform.dashboard.reader import LOG_TAIL_BYTES, POINTS_PER_READ, READS_PER_REFRESH, Reader
from twinstep.platform.dashboard.series import MAX_POINTS
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings
from twinstep.platform.store.records import MetricPage
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.platform.store.store import Store
from twinstep.spec.errors import NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import parse_spec
from twinstep.spec.report import EventRecord, MetricRecord, ProgressRecord, Record


class CountingService(Service):
    """The service, which counts the points it hands out."""

    points = 0

    def list_metrics(self, job_id: str, **options: object) -> MetricPage:  # type: ignore[override]
        page = super().list_metrics(job_id, **options)  # type: ignore[arg-type]
        self.points += len(page.items)
        return page


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CountingService]:
    settings = Settings(data_dir=tmp_path)
    store = Store(settings.database)
    yield CountingService(store, settings)
    store.close()


def report(service: Service, run_id: str, first: int, count: int) -> None:
    """Report `count` steps, two drawn metrics each and one that is not."""
    for begin in range(first, first + count, 5000):
        records: list[Record] = [
            MetricRecord(seq=step, time=0, step=step, values={"loss": 1 / step, "eval/auc": 0.5, "step_ms": 2.0})
            for step in range(begin, min(begin + 5000, first + count))
        ]
        service._store.ingest(run_id, records)


def test_a_refresh_reads_only_new_points_however_long_the_run(service: CountingService) -> None:
    reader, job = Reader(service), service.submit_job(JobSpec(name="long"))
    report(service, job.run_id, 1, 12_000)
    lines = reader.lines(job.id, job.run_id)
    assert service.points == READS_PER_REFRESH * POINTS_PER_READ  # so many in one go; the rest with the next refresh
    lines = reader.lines(job.id, job.run_id)
    assert lines.points["loss"][-1][0] == 12_000
    assert all(0 < len(lines.points[line]) <= MAX_POINTS for line in ("loss", "auc"))
    assert set(lines.points) == {"loss", "auc", "ne", "examples_per_s"}
    service.points = 0
    again = reader.lines(job.id, job.run_id)
    assert (service.points, again.version) == (0, lines.version)
    report(service, job.run_id, 12_001, 1)
    last = reader.lines(job.id, job.run_id)
    assert service.points == 2
    assert last.points["loss"][-1][0] == 12_001
    assert last.version != lines.version


def test_a_row_shows_the_newest_numbers_of_a_run_without_summary(service: CountingService) -> None:
    reader, job = Reader(service), service.submit_job(JobSpec(name="live"))
    (row,) = reader.jobs(JobFilter(), sort=JobSort.NEWEST, limit=5, cursor=None).rows
    assert (row.loss, row.step, row.model, row.dataset, row.backend) == (None, 0, "dlrmv3", "ml-100k", "inductor")
    report(service, job.run_id, 1, 4)
    progress = ProgressRecord(seq=5, time=0, phase="training", step=4, total_steps=8, examples_per_s=3.0, eta_s=1.0)
    service._store.ingest(job.run_id, [progress])
    (row,) = reader.jobs(JobFilter(), sort=JobSort.NEWEST, limit=5, cursor=None).rows
    assert (row.loss, row.auc, row.step, row.total_steps, row.examples_per_s) == (0.25, 0.5, 4, 8, 3.0)
    assert not row.final


def test_a_job_has_its_spec_as_yaml_and_all_its_runs(service: CountingService) -> None:
    spec = JobSpec(name="whole")
    job = service.submit_job(spec)
    detail = Reader(service).job(job.id)
    assert parse_spec(detail.spec_yaml) == spec
    assert [(run.number, run.state) for run in detail.runs] == [(1, "pending")]
    assert detail.summary is None
    with pytest.raises(NotFoundError):
        Reader(service).job("job-none")


def test_events_come_once_each_by_cursor(service: CountingService) -> None:
    reader, job = Reader(service), service.submit_job(JobSpec(name="events"))
    service._store.ingest(
        job.run_id, [EventRecord(seq=seq, time=seq, name="evaluated", reason=str(seq)) for seq in range(1, 1501)]
    )
    seen: list[str] = []
    cursor = 0
    for _ in range(3):
        events, cursor = reader.events(job.id, after=cursor)
        seen += [event.reason for event in events if event.name == "evaluated"]
    assert seen == [str(seq) for seq in range(1, 1501)]
    assert reader.events(job.id, after=cursor) == ([], cursor)


def test_a_log_begins_near_its_end_with_a_whole_line_and_says_what_it_left_out(service: CountingService) -> None:
    reader, job = Reader(service), service.submit_job(JobSpec(name="log"))
    path = service.run_dir(job.run_id).path
    assert reader.log(job.id, job.run_id, at=-1).text == ""
    path.mkdir(parents=True)
    lines = [f"line {number} é\n" for number in range(20_000)]
    (path / "log").write_text("".join(lines))
    piece = reader.log(job.id, job.run_id, at=-1)
    assert piece.text.splitlines(keepends=True) == lines[-piece.text.count("\n") :]
    assert len(piece.text.encode()) <= LOG_TAIL_BYTES
    assert piece.skipped == (path / "log").stat().st_size - LOG_TAIL_BYTES
    assert piece.at_end
    with (path / "log").open("a") as log:
        log.write("new")
    more = reader.log(job.id, job.run_id, at=piece.next)
    assert (more.text, more.skipped) == ("new", 0)
