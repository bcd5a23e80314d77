"""Routes of jobs and what belongs to them. Each reads the request, asks the service, answers with its record."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request

from twinstep.platform.api.access import Caller
from twinstep.platform.api.guard import no_body
from twinstep.platform.api.problems import responses
from twinstep.platform.scheduler.explain import Explanation
from twinstep.platform.scheduler.service import MAX_BUCKETS, MAX_PAGE, MAX_POINTS, Service
from twinstep.platform.store.logs import MAX_LOG_READ
from twinstep.platform.store.records import (
    EventPage,
    JobDetail,
    JobPage,
    LogFilter,
    LogPart,
    MetricNames,
    MetricPage,
    Run,
    SeriesPage,
    View,
)
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.spec.catalogue import catalogue
from twinstep.spec.parse import spec_json_schema
from twinstep.spec.states import RunState

router = APIRouter(prefix="/v1", tags=["jobs"])

CURSOR_MAX = 2**63 - 1
MAX_SERIES = 100
PLACE_MAX = 2**31 - 1
After = Annotated[int, Query(ge=0, le=CURSOR_MAX, description="Give the `next_after` of the page before.")]
JobId = Annotated[
    str,
    Path(
        description="The job's id, or its name: then the newest job of that name among those the user may see. "
        "What has the form of an id is one. Routes that change a job take its id alone. "
        "To page or follow, take the id that the first answer gives: by then a name may be another job's."
    ),
]
RunId = Annotated[str | None, Query(max_length=64, description="A run of the job; the newest one where left out.")]
Kind = Literal["cpu", "tpu", "gpu"]
Backend = Literal["inductor", "xla", "eager"]
Order = Literal["newest", "oldest", "name", "-name"]


class RunList(View):
    """A job's runs, first attempt first."""

    items: list[Run]


async def service_of(request: Request) -> Service:
    """Return the service the app was made with."""
    service: Service = request.app.state.service
    return service


Asked = Annotated[Service, Depends(service_of)]


async def wanted_jobs(
    caller: Caller,
    state: Annotated[list[RunState] | None, Query(description="Only jobs in one of these states.")] = None,
    accelerator: Annotated[list[Kind] | None, Query(description="Only jobs on one of these accelerators.")] = None,
    backend: Annotated[list[Backend] | None, Query(description="Only jobs with one of these compile.backend.")] = None,
    min_attempt: Annotated[int, Query(ge=1, le=10_000, description="2: only jobs that were tried again.")] = 1,
    name: Annotated[str | None, Query(max_length=200, description="Only jobs of this very name.")] = None,
    id_prefix: Annotated[str | None, Query(max_length=64, description="Only jobs whose id begins so.")] = None,
    q: Annotated[
        str, Query(max_length=200, description="Words in name, id or spec; `lr=0.01` is a field and its value.")
    ] = "",
    project: Annotated[str | None, Query(max_length=63, description="Only jobs of this project.")] = None,
) -> JobFilter:
    """Return which jobs a request asks for, and whoever asks may see."""
    projects = caller.projects()
    if project is not None:
        projects = frozenset({project}) if projects is None else projects & {project}
    return JobFilter(
        states=tuple(state or ()),
        accelerators=tuple(accelerator or ()),
        backends=tuple(backend or ()),
        min_attempt=min_attempt,
        name=name,
        id_prefix=id_prefix,
        text=q,
        projects=projects,
    )


@router.get("/jobs", responses=responses(), summary="List jobs")
def list_jobs(
    service: Asked,
    wanted: Annotated[JobFilter, Depends(wanted_jobs)],
    sort: Annotated[Order, Query(description="By time of submission, or by name; - is backwards.")] = "newest",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=128, description="The `next_cursor` of the page before.")] = None,
) -> JobPage:
    """Return one page of the jobs that fit all that is asked, of the projects the user is a member of.

    A page with fewer items than asked for, or none, has a `next_cursor` where older jobs were not looked through yet.
    """
    return service.list_jobs(wanted, sort=JobSort(sort), limit=limit, cursor=cursor)


@router.get("/jobs/{job_id}", responses=responses(404), summary="Look at a job")
def get_job(service: Asked, job_id: JobId) -> JobDetail:
    """Return a job with its spec, and the state, progress and summary of its newest run."""
    return service.get_job(job_id)


@router.post(
    "/jobs/{job_id}/cancel",
    responses=responses(404, 409, 413, 415),
    dependencies=[Depends(no_body)],
    summary="Cancel a job",
)
def cancel(service: Asked, caller: Caller, job_id: str) -> JobDetail:
    """Ask for a job to stop. Asking again changes nothing; 409 where it had succeeded or failed before."""
    return service.cancel_job(job_id, actor=caller.user)


@router.get("/jobs/{job_id}/runs", responses=responses(404), summary="List a job's runs")
def list_runs(service: Asked, job_id: JobId) -> RunList:
    """Return a job's runs, first attempt first."""
    return RunList(items=service.list_runs(job_id))


@router.get("/jobs/{job_id}/events", responses=responses(404), summary="Read a job's events")
def list_events(
    service: Asked, job_id: JobId, after: After = 0, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 200
) -> EventPage:
    """Return events after a cursor, oldest first."""
    return service.list_events(job_id, after=after, limit=limit)


@router.get("/jobs/{job_id}/metrics", responses=responses(404), summary="Read a run's metrics")
def list_metrics(
    service: Asked,
    job_id: JobId,
    after: After = 0,
    names: Annotated[list[str] | None, Query(description="Only metrics of these names.", max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 1000,
    run_id: RunId = None,
) -> MetricPage:
    """Return metric points after a cursor, in the order they came."""
    wanted = [name for item in names or [] for name in item.split(",") if name]
    return service.list_metrics(job_id, after=after, names=wanted, limit=limit, run_id=run_id)


@router.get("/jobs/{job_id}/metrics/names", responses=responses(404), summary="Name a run's metrics")
def list_metric_names(service: Asked, job_id: JobId, run_id: RunId = None) -> MetricNames:
    """Return the names of a run's metrics, in order; of very many the first 200."""
    return service.metric_names(job_id, run_id=run_id)


@router.get("/jobs/{job_id}/metrics/series", responses=responses(404), summary="Read metrics for a chart")
def read_series(
    service: Asked,
    job_id: JobId,
    names: Annotated[list[str], Query(description="Metrics, also several in one, comma between.", max_length=100)],
    max_points: Annotated[int, Query(ge=1, le=MAX_BUCKETS, description="Of each metric, at most.")] = 500,
    from_step: Annotated[int | None, Query(ge=0, le=CURSOR_MAX, description="Leave out steps before.")] = None,
    to_step: Annotated[int | None, Query(ge=0, le=CURSOR_MAX, description="Leave out steps after.")] = None,
    width: Annotated[
        int, Query(ge=1, le=2**40, description="Least steps of a bucket: an earlier answer's, to add to that one.")
    ] = 1,
    run_id: RunId = None,
) -> SeriesPage:
    """Return metrics in few buckets that keep spikes, gaps and what is undefined, however many points there are.

    To follow a run, ask again with the `width` of the answer before and `from_step` in its last bucket.
    """
    wanted = [name for item in names for name in item.split(",") if name]
    return service.metric_series(
        job_id,
        wanted[:MAX_SERIES],
        max_points=max_points,
        from_step=from_step,
        to_step=to_step,
        width=width,
        run_id=run_id,
    )


@router.get("/jobs/{job_id}/logs", responses=responses(404), summary="Read a run's log")
def read_log(
    service: Asked,
    job_id: JobId,
    offset: Annotated[int, Query(ge=0, le=CURSOR_MAX, description="Byte to begin at.")] = 0,
    limit: Annotated[int, Query(ge=4, le=MAX_LOG_READ, description="Bytes at most.")] = 65536,
    tail: Annotated[int | None, Query(ge=1, le=10_000, description="Only the last lines; offset is ignored.")] = None,
    run_id: RunId = None,
    slice_: Annotated[int | None, Query(alias="slice", ge=0, le=PLACE_MAX, description="Only of this slice.")] = None,
    host: Annotated[int | None, Query(ge=0, le=PLACE_MAX, description="Only of this host of its slice.")] = None,
    restart: Annotated[int | None, Query(ge=0, le=PLACE_MAX, description="Only since this restart.")] = None,
) -> LogPart:
    """Return a part of the log by byte cursor; `spans` says whose text it is, in order.

    404 says which slices, hosts and restarts there are. Bytes that are not UTF-8 are shown as U+FFFD. Of a very long
    log of a cluster's run the middle is not kept; a line says so in its place.
    """
    wanted = LogFilter(slice=slice_, host=host, restart=restart)
    service.check_place(job_id, wanted, run_id=run_id)
    return service.read_log(job_id, offset=offset, limit=limit, tail=tail, run_id=run_id, wanted=wanted)


@router.get("/topologies", tags=["schema"], responses=responses(), summary="The table of accelerators")
def list_topologies(
    up_to: Annotated[int, Query(ge=1, le=9216, description="Leave out slices of more chips.")] = 256,
) -> dict[str, list[dict[str, Any]]]:
    """Return TPU generations with their slices, and GPU models."""
    return catalogue(up_to=up_to)


@router.get("/jobs/{job_id}/explain", responses=responses(404), summary="Why is a job where it is?")
def explain(service: Asked, job_id: JobId) -> Explanation:
    """Say in one paragraph why a job waits, is silent or has failed, and what to do about it."""
    return service.explain_job(job_id)


@router.get("/schema/job", tags=["schema"], summary="The JSON Schema of a job spec")
def job_schema() -> dict[str, Any]:
    """Return the JSON Schema that a job spec must fit."""
    return spec_json_schema()
