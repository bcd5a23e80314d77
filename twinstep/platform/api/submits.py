"""Routes that take a spec: submit a job, and plan one. A submit is on the way of many; it costs as little as it can.

What is quick is done where the request is read, not in a thread: to hand a request over and back takes longer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from twinstep.platform.api.access import Caller, authorize, principal_of
from twinstep.platform.api.guard import JSON_TYPE, YAML_TYPES, load_json, media_type, read_body, require_type
from twinstep.platform.api.jobs import Asked, service_of
from twinstep.platform.api.problems import problem_response, responses
from twinstep.platform.scheduler.accounts import Principal
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.entry import current_entry
from twinstep.platform.store.records import JobDetail, View
from twinstep.platform.store.submits import HomeChangedError
from twinstep.preflight.check import SECONDS_OF_A_SUBMIT, preflight
from twinstep.preflight.report import Preflight
from twinstep.spec.errors import NotFoundError, SpecError, TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import MAX_SPEC_BYTES, parse_spec, validate_spec
from twinstep.spec.roles import Permission

KEY = r"^[\x21-\x7e]+$"
KEY_MAX = 255


PATH = "/v1/jobs"


class QuickSubmits:
    """ASGI middleware: works out plain submits itself, and leaves all other requests to the app within.

    FastAPI's way from a request to its route and parameters, the same for each of them, takes as long as everything
    else that a submit takes. What it would say of a request that is not plain, it says.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        (self._route,) = (each for each in router.routes if isinstance(each, APIRoute) and each.path == PATH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a plain submit, or pass the request on."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST" or scope["query_string"]:
            await self.app(scope, receive, send)
            return
        keys = [value.decode("latin-1") for name, value in scope["headers"] if name == b"idempotency-key"]
        if len(keys) > 1 or any(not _plain(key) for key in keys):
            await self.app(scope, receive, send)
            return
        scope.update(route=self._route, path_params={})
        request = Request(scope, receive)
        try:
            await authorize(request)  # of the checks of every route the one that concerns a request without a query
            service, caller = await service_of(request), principal_of(request)
            response = await answer(service, caller, await spec_in(request), None, keys[0] if keys else None)
        except TwinstepError as error:
            response = problem_response(error, instance=PATH)
        await response(scope, receive, send)


def _plain(key: str) -> bool:
    return len(key) <= KEY_MAX and re.fullmatch(KEY, key) is not None


router = APIRouter(prefix="/v1", tags=["jobs"])
plans = APIRouter(prefix="/v1", tags=["jobs"])

QUICK_BYTES = 8 * 1024
"""JSON up to so long is read at once; whatever takes longer, or is wrong somewhere, is read in a thread."""
_SPEC_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": {"$ref": "#/components/schemas/JobSpec"}} for kind in (JSON_TYPE, "application/yaml")
        },
    }
}


async def spec_in(request: Request) -> JobSpec:
    """Return the JobSpec in the body, or raise SpecError naming each field."""
    require_type(request, JSON_TYPE, *YAML_TYPES)
    body = await read_body(request, limit=MAX_SPEC_BYTES)
    if media_type(request) != JSON_TYPE:
        return await run_in_threadpool(parse_spec, body)
    if len(body) <= QUICK_BYTES:
        try:
            return JobSpec.model_validate(load_json(body))
        except (ValidationError, SpecError):
            pass  # to say what is wrong, and what would be right, takes its time
    return await run_in_threadpool(lambda: validate_spec(load_json(body)))


class Submitted(JobDetail):
    """A job that was submitted, and what speaks against it though it was let through."""

    warnings: list[str]
    """Of what it renders to, and of preflight; also an event of its run. Empty for a job of the processors here."""


ProjectQuery = Annotated[
    str | None,
    Query(
        max_length=63,
        description="The project; else `default`, or the only one the user may submit to. It fills in or limits "
        "`kubernetes.namespace`, `kubernetes.queue` and `kubernetes.image`.",
    ),
]


@router.post(
    "/jobs",
    status_code=201,
    response_model=Submitted,
    openapi_extra=_SPEC_BODY,
    responses={
        200: {"model": Submitted, "description": "This key had stored it before"},
        **responses(404, 409, 413, 415),
    },
    summary="Submit a job",
)
async def submit(
    service: Asked,
    caller: Caller,
    spec: Annotated[JobSpec, Depends(spec_in)],
    project: ProjectQuery = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=KEY_MAX,
            pattern=KEY,
            description="The same key and spec again give the job that is there: safe to send again after a time-out.",
        ),
    ] = None,
) -> Response:
    """Store a job from its spec; the scheduler takes it from there. `Location` says where it is.

    201 where it was stored now, 200 where this key had stored it before, 409 where the key came with another spec.
    """
    return await answer(service, caller, spec, project, idempotency_key)


async def answer(service: Service, caller: Principal, spec: JobSpec, project: str | None, key: str | None) -> Response:
    """Store a job; return its answer once it is committed."""
    try:
        job, new, content = await _stored(service, caller, spec, project, key, remembered=True)
    except (HomeChangedError, NotFoundError):  # the project that is remembered may be gone, or another
        job, new, content = await _stored(service, caller, spec, project, key, remembered=False)
    return Response(
        content,
        status_code=201 if new else 200,
        media_type=JSON_TYPE,
        headers={"Location": f"/v1/jobs/{job.id}"},
    )


def written(job: JobDetail, warnings: Sequence[str], spec: str | None) -> str:
    """Return a Submitted as JSON; `spec` is the job's as JSON where somebody has written it already."""
    if spec is None:
        return Submitted.model_construct(**dict(job), warnings=list(warnings)).model_dump_json()
    return f'{job.model_dump_json(exclude=_SPEC)[:-1]},"spec":{spec},"warnings":{json.dumps(warnings)}}}'


_SPEC = {"spec"}


async def _stored(
    service: Service, caller: Principal, spec: JobSpec, project: str | None, key: str | None, *, remembered: bool
) -> tuple[JobDetail, bool, str]:
    """Store a job, and return it, whether it is new, and the answer's content."""
    home = service.accounts.remembered_project(caller, project) if remembered else None
    if home is None:
        home = await run_in_threadpool(service.accounts.project_for, caller, project)
    placed = service.accounts.place_in(home, caller, spec)
    if (entry := current_entry()) is not None:
        entry.project = home.name
        entry.data = {"name": spec.name, "security": placed.kubernetes.security}
    if placed.accelerator.kind == "cpu":
        warnings = service.check_runnable(placed)
    else:
        warnings = await run_in_threadpool(service.check_runnable, placed)
    job, new, text = await service.submit(placed, home=home, actor=caller.user, key=key, warnings=warnings)
    return job, new, written(job, warnings, text)


class Plan(View):
    """What a spec would become in a cluster; nothing is stored or sent."""

    name: str
    """Of the workload."""
    namespace: str
    numbers: dict[str, int | str]
    """Chips, hosts, pods, processes, devices: what follows from the accelerator."""
    warnings: list[str]
    preflight: Preflight
    """What a step would take of each device, and how fast it could be."""
    objects: list[dict[str, Any]]
    """The Kubernetes objects, in the order in which they are applied."""
    diff: str | None = None
    """Unified diff of the manifests against those of a job's newest run, empty where nothing differs; null where no
    job was named."""


@plans.post("/jobs:plan", openapi_extra=_SPEC_BODY, responses=responses(404, 413, 415), summary="Plan a job")
def plan(
    service: Asked,
    caller: Caller,
    spec: Annotated[JobSpec, Depends(spec_in)],
    project: ProjectQuery = None,
    job_id: Annotated[
        str | None, Query(max_length=64, description="A job to compare with: `diff` says what would be different.")
    ] = None,
) -> Plan:
    """Render a spec for a cluster and check it as the cluster would, without creating anything.

    422 where it does not fit its accelerator: with the number that broke, and changes that make it fit.
    """
    spec = service.accounts.place(caller, spec, project)
    found, looked = service.plan_job(spec), preflight(spec, seconds=SECONDS_OF_A_SUBMIT)
    diff = None
    if job_id is not None:
        service.accounts.check_job(caller, Permission.READ, job_id)
        diff = service.plan_diff(spec, job_id)
    return Plan(
        name=found.name,
        namespace=found.namespace,
        numbers=found.numbers,
        warnings=list(found.warnings),
        preflight=looked,
        objects=list(found.objects),
        diff=diff,
    )
