"""Routes by which a browser logs in: a token is shown once, and a cookie that scripts cannot read stands for it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import ConfigDict, Field

from twinstep.platform.api.access import Caller
from twinstep.platform.api.bodies import body_of, read_model
from twinstep.platform.api.gate import COOKIE, failed, session_cookie
from twinstep.platform.api.guard import no_body
from twinstep.platform.api.jobs import Asked
from twinstep.platform.api.problems import responses
from twinstep.platform.scheduler.accounts import By, Principal
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.entry import current_entry
from twinstep.platform.store.records import View
from twinstep.spec.roles import Permission, Role

router = APIRouter(prefix="/v1", tags=["session"])


class Login(View):
    """What a browser logs in with."""

    model_config = ConfigDict(extra="forbid")
    token: str = Field(min_length=1, max_length=1024)
    """A user's token."""


class WhoAmI(View):
    """Who asks, and what they may do."""

    user: str
    """`user` where no login is asked for."""
    login: bool
    """Whether a login is asked for."""
    by: By
    """How they are known: by nothing (no login is asked for), a token, or a session."""
    role: Role
    """The most they may by way of this token."""
    everywhere: bool
    """Whether they reach every project."""
    administers: bool
    """Whether tokens, projects and the audit log are theirs to look after."""
    projects: dict[str, Role]
    """What they may be in each project they are a member of."""
    token_id: str | None


async def login_in(request: Request) -> Login:
    """Return the body of a login."""
    return await read_model(request, Login)


def who_am_i(service: Service, principal: Principal) -> WhoAmI:
    """Return what a principal is told of itself."""
    return WhoAmI(
        user=principal.user,
        login=not principal.is_local,
        by=principal.by,
        role=principal.role,
        everywhere=principal.everywhere,
        administers=principal.may(Permission.ADMINISTER),
        projects={name: role for name in sorted(principal.members) if (role := principal.role_in(name))},
        token_id=principal.token_id,
    )


@router.post("/session", status_code=201, openapi_extra=body_of(Login), responses=responses(413, 415), summary="Log in")
async def open_session(
    request: Request, service: Asked, login: Annotated[Login, Depends(login_in)], response: Response
) -> WhoAmI:
    """Take a token, and set the cookie `twinstep_session` that stands for it, for twelve hours.

    The cookie is HttpOnly and SameSite=Strict, and ends with the token.
    """
    principal = await run_in_threadpool(service.accounts.by_token, login.token)
    if principal is None or principal.token_id is None:
        raise failed(request.scope, "the token is wrong, revoked or expired")
    if (entry := current_entry()) is not None:
        entry.actor, entry.token_id = principal.user, principal.token_id
    cookie, seconds = await run_in_threadpool(service.accounts.users.open_session, principal.token_id)
    response.set_cookie(
        COOKIE, cookie, max_age=seconds, httponly=True, samesite="strict", secure=service.settings.secure_cookies
    )
    return who_am_i(service, principal)


@router.get("/session", responses=responses(), summary="Who am I?")
def get_session(service: Asked, caller: Caller) -> WhoAmI:
    """Say who asks, and what they may do."""
    return who_am_i(service, caller)


@router.delete(
    "/session", status_code=204, dependencies=[Depends(no_body)], responses=responses(413, 415), summary="Log out"
)
def close_session(request: Request, service: Asked, response: Response) -> None:
    """Forget the session the cookie stands for, and the cookie. The token stays good."""
    if (cookie := session_cookie(request.headers)) is not None:
        service.accounts.users.close_session(cookie)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=service.settings.secure_cookies)
