"""Routes of tokens, projects, members and the audit log."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field, StrictBool, StrictInt

from twinstep.platform.api.access import Caller
from twinstep.platform.api.bodies import body_of, read_model
from twinstep.platform.api.guard import no_body
from twinstep.platform.api.jobs import CURSOR_MAX, Asked
from twinstep.platform.api.problems import responses
from twinstep.platform.scheduler.accounts import check_name
from twinstep.platform.store.audit import AuditPage, Outcome
from twinstep.platform.store.records import View
from twinstep.platform.store.users import Member, Project, Token
from twinstep.spec.accelerator import IMAGE, LABEL_VALUE
from twinstep.spec.roles import NAME, NAME_MAX, Role

router = APIRouter(prefix="/v1", tags=["users"])
UserName = Annotated[str, Field(min_length=1, max_length=NAME_MAX, pattern=NAME)]
Label = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]


class NewToken(View):
    """A token to be made."""

    model_config = ConfigDict(extra="forbid")
    user: UserName
    """Whose it is: 1 to 32 letters, digits and `. _ @ + -`."""
    role: Role = Role.SUBMITTER
    """The most it allows."""
    everywhere: StrictBool = False
    """Good in every project, member or not; with the role admin also for tokens, projects and the audit log."""
    expires_in_days: Annotated[StrictInt, Field(ge=1, le=3650)] | None = None
    """null: it does not expire."""


class ShownToken(View):
    """A token that was just made, with its secret."""

    token: Token
    secret: str
    """What to send; it is shown here and never again."""


class TokenList(View):
    """Tokens, the newest first."""

    items: list[Token]


class NewProject(View):
    """A project to be made."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    namespace: Label | None = None
    """Kubernetes namespace of its jobs; null: the project's name."""
    queue: Label | None = None
    """Kueue LocalQueue that admits its jobs; null: a job names its own, or none."""
    image: Annotated[str, Field(max_length=512, pattern=IMAGE)] | None = None
    """Container image of workers, where a job names none."""


class ProjectList(View):
    """Projects by name."""

    items: list[Project]


class NewMember(View):
    """What a user is to be in a project."""

    model_config = ConfigDict(extra="forbid")
    role: Role


class MemberList(View):
    """Members of a project by name."""

    items: list[Member]


BODIES = (NewToken, NewProject, NewMember)
"""Models of bodies, which OpenAPI is told of by name."""


async def token_in(request: Request) -> NewToken:
    """Return the body of a request for a token."""
    return await read_model(request, NewToken)


async def project_in(request: Request) -> NewProject:
    """Return the body of a request for a project."""
    return await read_model(request, NewProject)


async def member_in(request: Request) -> NewMember:
    """Return the body of a request for a member."""
    return await read_model(request, NewMember)


@router.post(
    "/tokens",
    status_code=201,
    openapi_extra=body_of(NewToken),
    responses=responses(409, 413, 415),
    summary="Make a token",
)
def create_token(service: Asked, caller: Caller, wanted: Annotated[NewToken, Depends(token_in)]) -> ShownToken:
    """Make a token for a user. Its secret is in this answer alone.

    The first token must be an admin's for all projects: from then on a login is asked for.
    """
    check_name(wanted.user)
    days = wanted.expires_in_days
    token, secret = service.accounts.users.create_token(
        wanted.user,
        role=wanted.role,
        everywhere=wanted.everywhere,
        created_by=caller.user,
        expires_at=None if days is None else time.time() + days * 86400,
    )
    service.accounts.look_again()
    return ShownToken(token=token, secret=secret)


@router.get("/tokens", responses=responses(), summary="List tokens")
def list_tokens(
    service: Asked, user: Annotated[str | None, Query(max_length=64, description="Only this user's.")] = None
) -> TokenList:
    """Return every token, revoked and expired ones too, the newest first."""
    return TokenList(items=service.accounts.users.list_tokens(user=user))


@router.delete(
    "/tokens/{token_id}",
    dependencies=[Depends(no_body)],
    responses=responses(404, 409, 413, 415),
    summary="Revoke a token",
)
def revoke_token(service: Asked, token_id: str) -> Token:
    """Refuse a token from now on, everywhere, and the sessions made with it; again changes nothing.

    409 where no admin of all projects would be left who can log in.
    """
    return service.accounts.users.revoke_token(token_id)


@router.get("/projects", responses=responses(), summary="List projects")
def list_projects(service: Asked, caller: Caller) -> ProjectList:
    """Return the projects the user is a member of, by name; an admin of all projects sees every one."""
    mine = caller.projects()
    found = service.accounts.users.projects()
    return ProjectList(items=[project for project in found if mine is None or project.name in mine])


@router.post(
    "/projects",
    status_code=201,
    openapi_extra=body_of(NewProject),
    responses=responses(409, 413, 415),
    summary="Make a project",
)
def create_project(service: Asked, wanted: Annotated[NewProject, Depends(project_in)]) -> Project:
    """Make a project: a namespace and a queue for jobs that belong together. It has no members yet."""
    return service.accounts.users.create_project(
        wanted.name, namespace=wanted.namespace or wanted.name, queue=wanted.queue, image=wanted.image
    )


@router.delete(
    "/projects/{project}",
    status_code=204,
    dependencies=[Depends(no_body)],
    responses=responses(404, 409, 413, 415),
    summary="Delete a project",
)
def delete_project(service: Asked, project: str) -> None:
    """Delete a project and its members. Its jobs stay, for admins of all projects; 409 while one has not ended."""
    service.accounts.users.delete_project(project)


@router.get("/projects/{project}/members", responses=responses(404), summary="List a project's members")
def list_members(service: Asked, project: str) -> MemberList:
    """Return a project's members by name."""
    return MemberList(items=service.accounts.users.members(project))


@router.put(
    "/projects/{project}/members/{user}",
    openapi_extra=body_of(NewMember),
    responses=responses(404, 413, 415),
    summary="Set a member",
)
def set_member(
    service: Asked, project: str, user: UserName, wanted: Annotated[NewMember, Depends(member_in)]
) -> Member:
    """Make a user a member of a project, or give a member another role. The user need not have a token yet."""
    check_name(user)
    return service.accounts.users.set_member(project, user, wanted.role)


@router.delete(
    "/projects/{project}/members/{user}",
    status_code=204,
    dependencies=[Depends(no_body)],
    responses=responses(404, 413, 415),
    summary="Remove a member",
)
def remove_member(service: Asked, project: str, user: str) -> None:
    """Take a member away: the next request of theirs is refused, whatever token it comes with."""
    service.accounts.users.remove_member(project, user)


@router.get("/audit", responses=responses(), summary="Read the audit log")
def list_audit(
    service: Asked,
    before: Annotated[
        int | None, Query(ge=1, le=CURSOR_MAX, description="The `next_before` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    actor: Annotated[str | None, Query(max_length=64, description="Only what this user did.")] = None,
    action: Annotated[str | None, Query(max_length=64, description="Only this, as `job.submit`.")] = None,
    project: Annotated[str | None, Query(max_length=63, description="Only in this project.")] = None,
    outcome: Annotated[Outcome | None, Query(description="Only what ended so.")] = None,
) -> AuditPage:
    """Return who changed what, and what was refused, the newest first. Nothing can be changed or taken out."""
    return service.accounts.audit.page(
        before=before, limit=limit, actor=actor, action=action, project=project, outcome=outcome
    )
