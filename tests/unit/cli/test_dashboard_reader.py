"""What the pages read, on a real store: rows, lines that grow by what is new, events, the end of a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from twinstep.platform.dashboard.reader import LINE_POINTS, LOG_TAIL_BYTES, Counts, Reader
from twinstep.platform.scheduler.accounts import Principal
from twinstep.platform.scheduler.attempts import Resize
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.platform.store.store import Store
from twinstep.spec.errors import AuthError, ForbiddenError, NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import parse_spec
from twinstep.spec.report import EventRecord, MetricRecord, ProgressRecord, Record
from twinstep.spec.roles import Role


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    settings = Settings(data_dir=tmp_path)
    store = Store(settings.database)
    yield Service(store, settings)
    store.close()


def report(service: Service, run_id: str, first: int, count: int) -> None:
    """Report `count` steps, two drawn metrics each and one that is not."""
    for begin in range(first, first + count, 5000):
        records: list[Record] = [
            MetricRecord(seq=step, time=0, step=step, values={"loss": 1 / step, "eval/auc": 0.5, "step_ms": 2.0})
            for step in range(begin, min(begin + 5000, first + count))
        ]
        service._store.ingest(run_id, records)


def test_a_line_has_few_points_however_long_the_run_and_goes_on_to_the_newest(service: Service) -> None:
    reader, job = Reader(service), service.submit_job(JobSpec(name="long"))
    report(service, job.run_id, 1, 12_000)
    lines = reader.series(job.id, ["loss", "eval/auc", "none"])
    assert set(lines) == {"loss", "eval/auc"}
    assert len(lines["loss"].steps) <= LINE_POINTS
    assert (lines["loss"].steps[-1], lines["loss"].highs[0]) == (12_000, 1.0)
    report(service, job.run_id, 12_001, 1)
    assert reader.series(job.id, ["loss"])["loss"].steps[-1] == 12_001
    near = reader.series(job.id, ["loss"], from_step=100, to_step=200)["loss"]
    assert (near.width, near.steps) == (1, list(range(100, 201)))
    assert reader.metric_names(job.id) == ["eval/auc", "loss", "step_ms"]


def test_counts_are_of_the_projects_one_may_see_and_asked_for_once(service: Service) -> None:
    service.submit_job(JobSpec(name="one"))
    counts, asked = Counts(service), []
    count = service.count_jobs
    service.count_jobs = lambda projects=None: asked.append(projects) or count(projects)  # type: ignore[method-assign]
    member = Principal(user="ada", role=Role.VIEWER, everywhere=False, members={"else": Role.VIEWER})
    for _ in range(3):
        assert Reader(service, counts=counts).counts() == {"pending": 1}
        assert Reader(service, principal=member, counts=counts).counts() == {}
    assert asked == [None, frozenset({"else"})]


def test_who_is_no_member_sees_and_steers_nothing(service: Service) -> None:
    job = service.submit_job(JobSpec(name="secret"))
    stranger = Principal(user="eve", role=Role.ADMIN, everywhere=False, members={"else": Role.ADMIN}, by="token")
    reader = Reader(service, principal=stranger)
    assert reader.jobs(JobFilter(), sort=JobSort.NEWEST, limit=5, cursor=None).rows == ()
    asks = (
        lambda: reader.job(job.id), lambda: reader.series(job.id, ["loss"]), lambda: reader.metric_names(job.id),
        lambda: reader.events(job.id, after=0), lambda: reader.log(job.id, job.run_id, at=-1),
        lambda: reader.explain(job.id), lambda: reader.document(job.id, 1, "spec"),
        lambda: reader.cancel(job.id), lambda: reader.steer(job.id, "retry"), lambda: reader.resize(job.id, Resize()),
    )  # fmt: skip
    for ask in asks:
        with pytest.raises(NotFoundError):
            ask()
    assert not reader.may_steer(job.id)
    assert service.get_job(job.id).cancel_requested_at is None


def test_who_may_look_may_not_cancel_and_who_cancels_is_written_down(service: Service) -> None:
    users, job = service.accounts.users, service.submit_job(JobSpec(name="watched"))
    users.create_token("ada", role=Role.ADMIN, everywhere=True, created_by="user")
    found = {}
    for user, role in (("vera", Role.VIEWER), ("sam", Role.SUBMITTER)):
        users.set_member("default", user, role)
        _, secret = users.create_token(user, role=role, everywhere=False, created_by="ada")
        found[user] = service.accounts.by_token(secret)
        assert found[user] is not None
    viewer, submitter = (Reader(service, principal=found[user]) for user in ("vera", "sam"))
    assert viewer.job(job.id).row.name == "watched"
    assert (viewer.may_steer(job.id), submitter.may_steer(job.id)) == (False, True)
    with pytest.raises(ForbiddenError):
        viewer.cancel(job.id)
    submitter.cancel(job.id)
    told = [(each.actor, each.action, each.outcome) for each in service.accounts.audit.page(limit=10).items]
    assert ("vera", "job.cancel", "refused") in told
    assert ("sam", "job.cancel", "done") in told
    assert [event.actor for event in viewer.events(job.id, after=0)[0]][-1] == "sam"


def test_a_page_closes_soon_after_its_token_was_revoked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    token, secret = service.accounts.users.create_token("ada", role=Role.ADMIN, everywhere=True, created_by="user")
    principal = service.accounts.by_token(secret)
    assert principal is not None
    reader = Reader(service, principal=principal)
    service.accounts.users.create_token("bea", role=Role.ADMIN, everywhere=True, created_by="ada")
    service.accounts.users.revoke_token(token.id)
    monkeypatch.setattr("twinstep.platform.dashboard.reader.STILL_EVERY_S", 0.0)
    with pytest.raises(AuthError, match="not logged in"):
        reader.jobs(JobFilter(), sort=JobSort.NEWEST, limit=5, cursor=None)


def test_a_row_shows_the_newest_numbers_of_a_run_without_summary(service: Service) -> None:
    reader, job = Reader(service), service.submit_job(JobSpec(name="live"))
    (row,) = reader.jobs(JobFilter(), sort=JobSort.NEWEST, limit=5, cursor=None).rows
    assert (row.loss, row.step, row.model, row.dataset, row.backend) == (None, 0, "dlrmv3", "ml-100k", "inductor")
    report(service, job.run_id, 1, 4)
    progress = ProgressRecord(seq=5, time=0, phase="training", step=4, total_steps=8, examples_per_s=3.0, eta_s=1.0)
    service._store.ingest(job.run_id, [progress])
    (row,) = reader.jobs(JobFilter(), sort=JobSort.NEWEST, limit=5, cursor=None).rows
    assert (row.loss, row.auc, row.step, row.total_steps, row.examples_per_s) == (0.25, 0.5, 4, 8, 3.0)
    assert not row.final


def test_a_job_has_its_spec_as_yaml_and_all_its_runs(service: Service) -> None:
    spec = JobSpec(name="whole")
    job = service.submit_job(spec)
    detail = Reader(service).job(job.id)
    assert parse_spec(detail.spec_yaml) == spec
    assert [(run.number, run.state) for run in detail.runs] == [(1, "pending")]
    assert detail.summary is None
    with pytest.raises(NotFoundError):
        Reader(service).job("job-none")


def test_events_come_once_each_by_cursor(service: Service) -> None:
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


def test_a_log_begins_near_its_end_with_a_whole_line_and_says_what_it_left_out(service: Service) -> None:
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
