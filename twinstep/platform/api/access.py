"""Who may use which route: one table, checked before a route sees its request. A route without a line here is refused
when the app is made, so none is ever open by oversight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.routing import compile_path

from twinstep.platform import logs
from twinstep.platform.api.guard import asked_once
from twinstep.platform.scheduler.accounts import Principal
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings
from twinstep.platform.store.entry import current_entry
from twinstep.spec.errors import ForbiddenError, NotFoundError, TwinstepError
from twinstep.spec.roles import Permission


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteAccess:
    """What a route asks of whoever uses it."""

    who: Literal["anybody", "worker", "user"] = "user"
    """worker: the run's own token, which is good for nothing else."""
    permission: Permission | None = None
    """In the project that the path's job, run or project belongs to; None: a login is enough."""
    filters: bool = False
    """The route looks at the user's projects itself. Without it, and without a project in the path, it is only for
    those who have the permission in every project."""
    action: str = ""
    """In the audit log, of what changes something."""


ANYBODY = RouteAccess(who="anybody")
SIGNED_IN = RouteAccess()
READ = RouteAccess(permission=Permission.READ)
ADMINISTER = RouteAccess(permission=Permission.ADMINISTER)

ROUTES: dict[tuple[str, str], RouteAccess] = {
    ("GET", "/healthz"): ANYBODY,
    ("GET", "/readyz"): ANYBODY,
    ("GET", "/metrics"): READ,
    ("POST", "/v1/jobs"): RouteAccess(permission=Permission.SUBMIT, filters=True, action="job.submit"),
    ("GET", "/v1/jobs"): RouteAccess(permission=Permission.READ, filters=True),
    ("POST", "/v1/jobs:plan"): RouteAccess(permission=Permission.SUBMIT, filters=True),
    ("GET", "/v1/jobs/{job_id}"): READ,
    ("POST", "/v1/jobs/{job_id}/cancel"): RouteAccess(permission=Permission.SUBMIT, action="job.cancel"),
    ("POST", "/v1/jobs/{job_id}/retry"): RouteAccess(permission=Permission.SUBMIT, action="job.retry"),
    ("POST", "/v1/jobs/{job_id}/suspend"): RouteAccess(permission=Permission.SUBMIT, action="job.suspend"),
    ("POST", "/v1/jobs/{job_id}/resume"): RouteAccess(permission=Permission.SUBMIT, action="job.resume"),
    ("POST", "/v1/jobs/{job_id}/resize"): RouteAccess(permission=Permission.SUBMIT, action="job.resize"),
    ("GET", "/v1/jobs/{job_id}/runs"): READ,
    ("GET", "/v1/jobs/{job_id}/events"): READ,
    ("GET", "/v1/jobs/{job_id}/metrics"): READ,
    ("GET", "/v1/jobs/{job_id}/metrics/names"): READ,
    ("GET", "/v1/jobs/{job_id}/metrics/series"): READ,
    ("GET", "/v1/jobs/{job_id}/logs"): READ,
    ("GET", "/v1/jobs/{job_id}/explain"): READ,
    ("GET", "/v1/jobs/{job_id}/stream"): READ,
    ("GET", "/v1/topologies"): SIGNED_IN,
    ("GET", "/v1/schema/job"): SIGNED_IN,
    ("POST", "/v1/runs/{run_id}/reports"): RouteAccess(who="worker"),
    ("POST", "/v1/webhooks"): RouteAccess(permission=Permission.ADMINISTER, action="webhook.create"),
    ("GET", "/v1/webhooks"): RouteAccess(permission=Permission.ADMINISTER),
    ("GET", "/v1/webhooks/{webhook_id}"): RouteAccess(permission=Permission.ADMINISTER),
    ("DELETE", "/v1/webhooks/{webhook_id}"): RouteAccess(permission=Permission.ADMINISTER, action="webhook.delete"),
    ("POST", "/v1/session"): RouteAccess(who="anybody", action="session.open"),
    ("GET", "/v1/session"): SIGNED_IN,
    ("DELETE", "/v1/session"): SIGNED_IN,
    ("GET", "/v1/tokens"): ADMINISTER,
    ("POST", "/v1/tokens"): RouteAccess(permission=Permission.ADMINISTER, action="token.create"),
    ("DELETE", "/v1/tokens/{token_id}"): RouteAccess(permission=Permission.ADMINISTER, action="token.revoke"),
    ("GET", "/v1/projects"): SIGNED_IN,
    ("POST", "/v1/projects"): RouteAccess(permission=Permission.ADMINISTER, action="project.create"),
    ("DELETE", "/v1/projects/{project}"): RouteAccess(permission=Permission.ADMINISTER, action="project.delete"),
    ("GET", "/v1/projects/{project}/members"): READ,
    ("PUT", "/v1/projects/{project}/members/{user}"): RouteAccess(permission=Permission.MANAGE, action="member.set"),
    ("DELETE", "/v1/projects/{project}/members/{user}"): RouteAccess(
        permission=Permission.MANAGE, action="member.remove"
    ),
    ("GET", "/v1/audit"): ADMINISTER,
}

_PUBLIC = frozenset(route for route, access in ROUTES.items() if access.who != "user")
_PUBLIC_FORMS = [(method, path.partition("{")[0], compile_path(path)[0]) for method, path in _PUBLIC if "{" in path]


def is_public(method: str, path: str, settings: Settings) -> bool:
    """Say whether a path is for those without a user's token: anybody, or workers with their run's."""
    if path == "/metrics" and settings.open_metrics:
        return True
    if (method, path) in _PUBLIC:
        return True
    return any(
        method == its_method and path.startswith(begins) and pattern.fullmatch(path) is not None
        for its_method, begins, pattern in _PUBLIC_FORMS
    )


def check_table(routers: Iterable[APIRouter]) -> None:
    """Raise where a route has no line in the table, or a line no route."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    there = {(method, route.path) for route in routes for method in route.methods or ()}
    if missing := sorted(there - ROUTES.keys()):
        raise AssertionError(f"routes without a line in api/access.py:ROUTES, which says who may use them: {missing}")
    if unknown := sorted(ROUTES.keys() - there):
        raise AssertionError(f"lines of api/access.py:ROUTES without a route: {unknown}")


def principal_of(request: Request) -> Principal:
    """Return whoever asks, as the gate found them."""
    principal: Principal = request.state.principal
    return principal


async def caller_of(request: Request) -> Principal:
    """Return whoever asks: `principal_of` for routes, which need no thread for it."""
    return principal_of(request)


Caller = Annotated[Principal, Depends(caller_of)]


async def authorize(request: Request) -> None:
    """Raise unless whoever asks may use this route; a dependency of every one."""
    access = ROUTES[request.method, request.scope["route"].path]
    entry = current_entry()
    params = request.path_params
    # A job is noted once it is known which is meant: what a path says may be a name.
    logs.note(**{name: str(value)[:64] for name, value in params.items() if name in logs.FACTS and name != "job_id"})
    if entry is not None:
        entry.action = access.action or entry.action
        entry.target = next(iter(params.values()), entry.target)
    if access.who != "user" or access.permission is None:
        return
    service: Service = request.app.state.service
    principal = principal_of(request)
    if is_public(request.method, request.scope["path"], service.settings):
        return
    try:
        if named := params.get("job_id"):
            # What changes a job takes its id: by then a name may be another job's.
            reads = request.method == "GET"
            params["job_id"] = await run_in_threadpool(
                _job_meant, service, principal, access.permission, named, by_name=reads
            )
            logs.note(job_id=params["job_id"])
        elif project := params.get("project"):
            if entry is not None:
                entry.project = project
            service.accounts.check(principal, access.permission, project)
        elif not access.filters:
            _check_everywhere(principal, access.permission)
        elif (project := request.query_params.get("project")) is not None and access.permission != Permission.READ:
            # Before the body is read; a list of a project that is not one's own is empty instead.
            service.accounts.check(principal, access.permission, project)
    except TwinstepError as error:
        if entry is not None:
            # What is nowhere was not refused, only not found.
            entry.refused = entry.project is not None or not isinstance(error, NotFoundError)
        raise


def _job_meant(service: Service, principal: Principal, permission: Permission, named: str, *, by_name: bool) -> str:
    """Return the id of the job that a path names, for its route to see, or raise what `check_job` does.

    Where a name will not do, and a job that they may see has it, the error says its id.
    """
    job_id = service.id_of(named, principal.projects())
    if job_id != named and not by_name:
        raise NotFoundError(
            f"there is no job of the id {named!r}: what changes a job takes its id, since a name may be another job's",
            remedy=f"the newest job of that name is {job_id}: send it there",
        )
    service.accounts.check_job(principal, permission, job_id)
    return job_id


def _check_everywhere(principal: Principal, permission: Permission) -> None:
    if not (principal.everywhere and principal.may(permission)):
        raise ForbiddenError(
            f"{principal.user} may not {permission} in all projects with this token",
            remedy="use a token that is good everywhere; an admin makes one: twinstep token create USER --everywhere",
        )


EVERY_ROUTE = (authorize, asked_once)
"""What every route asks of a request, in this order, before anything else."""


def still_reads(request: Request, job_id: str) -> Callable[[], bool]:
    """Return what says, for an answer that goes on for long, whether whoever asked may still read the job."""
    service: Service = request.app.state.service
    principal = principal_of(request)

    def still() -> bool:
        now = service.accounts.still(principal)
        if now is None:
            return False
        try:
            service.accounts.check_job(now, Permission.READ, job_id)
        except NotFoundError:
            return False
        return True

    return still
