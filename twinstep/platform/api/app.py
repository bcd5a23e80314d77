"""Assemble the API: routes, guards, problems, OpenAPI. Starts nothing and keeps nothing but the service it is given."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.routing import Match

from twinstep import __version__
from twinstep.platform.api import attempts, jobs, observe, sessions, stream, submits, users, webhooks, workers
from twinstep.platform.api.access import EVERY_ROUTE, ROUTES, RouteAccess, check_table
from twinstep.platform.api.gate import COOKIE, Audited, LoginGate, knows_whoever_asks
from twinstep.platform.api.guard import OriginGuard
from twinstep.platform.api.jobs import Asked
from twinstep.platform.api.limits import Failures
from twinstep.platform.api.observe import Observed, RequestTimer
from twinstep.platform.api.problems import FaultModel, MethodError, Problem, add_handlers, no_such_path, responses
from twinstep.platform.api.sessions import Login
from twinstep.platform.scheduler.attempts import Resize
from twinstep.platform.scheduler.service import Readiness, Service
from twinstep.platform.store.records import View
from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import ReportBatch

_REF = "#/components/schemas/{model}"
health = APIRouter(tags=["health"])
_API = (
    submits.router,
    submits.plans,
    jobs.router,
    attempts.router,
    stream.router,
    workers.router,
    sessions.router,
    users.router,
    webhooks.router,
)
_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "A user's token: twinstep token create."},
    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "What POST /v1/session sets."},
    "run_token": {"type": "http", "scheme": "bearer", "description": "TWINSTEP_RUN_TOKEN of the run."},
}


class Health(View):
    """The process answers."""

    status: str = "ok"
    version: str = __version__


@health.get("/healthz", summary="Is the process there?")
async def healthz() -> Health:
    """Answer as long as the process does."""
    return Health()


@health.get("/readyz", summary="Does it do its work?", responses={429: responses(429)[429], 503: {"model": Readiness}})
def readyz(request: Request, service: Asked, response: Response) -> Readiness:
    """Say whether the database answers and the scheduler passes over the runs; 503 where not.

    What keeps it from them names addresses: it is told where no login is asked for, or with a token.
    """
    try:
        known = knows_whoever_asks(request)
        readiness = service.readiness() if known else service.readiness().without_addresses()
    except UnavailableError as error:
        if service.accounts.knows() is not True:
            raise
        raise UnavailableError("the database does not answer", remedy="look into the control plane's log") from error
    if not readiness.ready:
        response.status_code = 503
    return readiness


def create_app(service: Service) -> FastAPI:
    """Return the API over `service`, ready to have pages mounted beside it."""
    app = FastAPI(
        title="Twinstep",
        version=__version__,
        summary="Submit training jobs, follow them, read what they reported.",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours are in `observe.py`
        dependencies=[Depends(check) for check in EVERY_ROUTE],
    )
    app.state.service = service
    app.state.observed = Observed(service)
    app.state.failures = Failures()
    routers = (*_API, health, observe.router)
    check_table(routers)
    for router in routers:
        app.include_router(router)
    _add_unknown_paths(app)
    add_handlers(app)
    # The last one added is the first a request passes.
    app.add_middleware(submits.QuickSubmits)
    app.add_middleware(LoginGate)
    app.add_middleware(OriginGuard)
    app.add_middleware(Audited)
    app.add_middleware(RequestTimer, observed=app.state.observed)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_unknown_paths(app: FastAPI) -> None:
    """Answer paths under /v1 that no route has: pages mounted at / would answer them with HTML."""
    known = [route for router in _API for route in router.routes]

    async def unknown(request: Request) -> Response:
        methods: set[str] = set()
        for route in known:
            match, _ = route.matches(request.scope)
            if match is not Match.NONE:
                methods |= getattr(route, "methods", None) or set()
        if methods:
            raise MethodError(
                f"{request.method} is not a method of {request.url.path}",
                remedy=f"use one of: {', '.join(sorted(methods))}",
            )
        raise no_such_path(request.url.path)

    every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
    app.add_route("/v1/{rest:path}", unknown, methods=every, include_in_schema=False)
    app.add_route("/v1", unknown, methods=every, include_in_schema=False)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the bodies that routes read by hand and the problems they answer with."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (JobSpec, ReportBatch, Problem, FaultModel, Login, Resize, webhooks.NewWebhook, *users.BODIES):
            schema = model.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        document["components"]["securitySchemes"] = _SCHEMES
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _tell_access(operation, ROUTES[method.upper(), path])
        app.openapi_schema = document
    return app.openapi_schema


def _tell_access(operation: dict[str, Any], access: RouteAccess) -> None:
    """Write into an operation what its line in the table says."""
    schemes: dict[str, list[str]] = {"user": ["token", "session"], "worker": ["run_token"], "anybody": []}
    operation["security"] = [{scheme: []} for scheme in schemes[access.who]]
    # 401 and 429 where a token is shown; 403 for a host or a page that is not ours, or a role that may not.
    told = responses(*((401, 429) if access.who != "anybody" or access.action else ()))
    told.pop(422)
    for status, answer in told.items():
        operation["responses"].setdefault(str(status), answer)
    operation["responses"] = dict(sorted(operation["responses"].items()))
    if access.permission is not None:
        operation["x-permission"] = access.permission.value
