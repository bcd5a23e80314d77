"""Routes by which a job that is there is tried again, suspended, resumed, resized."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response

from twinstep.platform.api.access import Caller
from twinstep.platform.api.bodies import body_of, read_model
from twinstep.platform.api.guard import no_body
from twinstep.platform.api.jobs import Asked
from twinstep.platform.api.problems import responses
from twinstep.platform.scheduler.attempts import Resize
from twinstep.platform.store.records import JobDetail

router = APIRouter(prefix="/v1", tags=["jobs"])

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key again makes no second run: safe to send again after a time-out.",
    ),
]


def _answer(response: Response, job: JobDetail, new: bool) -> JobDetail:
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@router.post(
    "/jobs/{job_id}/retry",
    status_code=201,
    responses={
        200: {"model": JobDetail, "description": "This key had made the run before"},
        **responses(404, 409, 413, 415),
    },
    dependencies=[Depends(no_body)],
    summary="Try a job again",
)
def retry(service: Asked, caller: Caller, job_id: str, response: Response, key: Key = None) -> JobDetail:
    """Run a job that failed or was cancelled again, from its start: a new run of it.

    201 where a run was made now, 200 where this key had made it before, 409 where the job has not ended or succeeded.
    """
    return _answer(response, *service.verbs.retry(job_id, actor=caller.user, key=key))


@router.post(
    "/jobs/{job_id}/suspend",
    responses=responses(404, 409, 413, 415),
    dependencies=[Depends(no_body)],
    summary="Suspend a job",
)
def suspend(service: Asked, caller: Caller, job_id: str) -> JobDetail:
    """Give a job's nodes back until it is resumed. Asking again changes nothing; 409 where it has ended or is local."""
    return service.verbs.suspend(job_id, actor=caller.user)


@router.post(
    "/jobs/{job_id}/resume",
    responses={201: {"model": JobDetail, "description": "A new run was made"}, **responses(404, 409, 413, 415)},
    dependencies=[Depends(no_body)],
    summary="Resume a job",
)
def resume(service: Asked, caller: Caller, job_id: str, response: Response, key: Key = None) -> JobDetail:
    """Let a suspended job go on; or one that failed or was cancelled, by a new run that goes on from it.

    201 where a run was made, 200 where not, 409 where the job has succeeded or is being cancelled.
    """
    return _answer(response, *service.verbs.resume(job_id, actor=caller.user, key=key))


async def size_in(request: Request) -> Resize:
    """Return the body of a resize."""
    return await read_model(request, Resize)


@router.post(
    "/jobs/{job_id}/resize",
    responses={201: {"model": JobDetail, "description": "A new run was made"}, **responses(404, 409, 413, 415)},
    openapi_extra=body_of(Resize),
    summary="Change a job's size",
)
def resize(
    service: Asked,
    caller: Caller,
    job_id: str,
    size: Annotated[Resize, Depends(size_in)],
    response: Response,
    key: Key = None,
) -> JobDetail:
    """Run a job on another number of chips: a new run with the changed spec, started once the one before has stopped.

    201 where a run was made, 200 where the job has that size already, 422 where there is no such size.
    """
    return _answer(response, *service.verbs.resize(job_id, size, actor=caller.user, key=key))
