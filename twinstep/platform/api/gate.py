"""Who asks: every request, page and socket passes here before anything else sees it, and leaves its line in the log.

`Audited` gives a request its id and writes the audit log; `LoginGate` finds whoever asks, by bearer token or by cookie,
and turns away those it does not know: with 401, from a page to the login page. What they may do is `access.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinstep.platform import logs
from twinstep.platform.api.access import is_public
from twinstep.platform.api.limits import Failures
from twinstep.platform.api.problems import LimitError, OriginError, problem_response
from twinstep.platform.scheduler.accounts import LOCAL, NOBODY, Accounts, Principal
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.audit import Outcome
from twinstep.platform.store.entry import Entry, current_entry, under_way
from twinstep.spec.errors import AuthError, TwinstepError

COOKIE = "twinstep_session"
LOGIN_PAGE = "/login"
OPEN_PAGES = frozenset({LOGIN_PAGE, "/favicon.ico"})
"""Of pages, what is shown without a login; the login page is plain HTML, for sockets are closed to those without."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
API_PATHS = ("/v1", "/v1/", "/openapi.json", "/metrics")
_log = logging.getLogger(__name__)


class Audited:
    """ASGI middleware: an id for every request, and a line in the audit log for each that changes or is refused."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._noted = Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; before its answer goes out, write what is to be written."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        entry = Entry(
            actor=NOBODY.user,
            action="",
            target=scope["path"],
            request_id=f"{random.getrandbits(64):016x}",  # a name, no secret
            address=_address(scope),
        )
        scope.setdefault("state", {})["request_id"] = entry.request_id
        logs.note(request_id=entry.request_id)
        service: Service = scope["app"].state.service

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = entry.request_id
                outcome = self._outcome(entry, scope["method"], message["status"])
                if outcome is not None:
                    await run_in_threadpool(_write, service.accounts, entry, outcome)
            await send(message)

        with under_way(entry):
            try:
                await self.app(scope, receive, send_noted)
            except Exception as error:
                # Answered further out, as 500; what was meant to change may be half done, and is written down.
                if entry.action and scope["method"] not in SAFE_METHODS and not entry.written:
                    entry.reason = f"the control plane failed: {type(error).__name__}"
                    await run_in_threadpool(_write, service.accounts, entry, "failed")
                raise

    def _outcome(self, entry: Entry, method: str, status: int) -> Outcome | None:
        """Return what is to be written of an answer; None where nothing is, or it is written already."""
        if status in (401, 403, 429) or entry.refused:
            entry.action = entry.action or "request"
            # Whoever is not known may not fill the log.
            return "refused" if entry.actor != NOBODY.user or self._noted.note(entry.address) is None else None
        if not entry.action or method in SAFE_METHODS or status == 503:
            return None  # a database that is away has changed nothing, and takes no line either
        if status < 400:
            return None if entry.written else "done"
        return "refused" if status < 500 else "failed"


def _write(accounts: Accounts, entry: Entry, outcome: Outcome) -> None:
    try:
        accounts.audit.add(entry, outcome=outcome, reason=entry.reason)
    except TwinstepError as error:
        # What is lost of the log there is kept here.
        _log.error("the audit log cannot be written (%s): %s", error.problem, asdict(entry) | {"outcome": outcome})


class LoginGate:
    """ASGI middleware: puts whoever asks into the request's state, or answers in their place."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its principal, or answer 401 or 429 (a page: go to log in; a socket: close it)."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        service: Service = scope["app"].state.service
        state: dict[str, Any] = scope.setdefault("state", {})
        method, path = scope.get("method", "GET"), scope["path"]
        public = is_public(method, path, service.settings) or path in OPEN_PAGES
        try:
            principal = None if public else await _who(scope, service)
        except TwinstepError as error:
            await _turn_away(error, scope, receive, send)
            return
        if principal is None and not public:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "log in first"})
                return
            if not path.startswith(API_PATHS):
                to = quote(path if method == "GET" else "/", safe="/")
                await RedirectResponse(f"{LOGIN_PAGE}?next={to}", status_code=303)(scope, receive, send)
                return
            missing = AuthError(
                "no token came with the request, and this control plane asks for one",
                remedy="send `Authorization: Bearer TOKEN`; with the command: twinstep login URL, or TWINSTEP_TOKEN",
            )
            await _turn_away(missing, scope, receive, send)
            return
        state["principal"] = principal or NOBODY
        await self.app(scope, receive, send)


async def _who(scope: Scope, service: Service) -> Principal | None:
    """Return whoever asks; None where nothing says who.

    Raises:
        AuthError: something does, and it is not good (any more).
        LimitError: it was not good too often.
        OriginError: a cookie came with a change that no page of ours has sent.
    """
    accounts, headers = service.accounts, Headers(scope=scope)
    found: Principal | None = None
    if not await _asks_for_login(scope["app"], accounts):
        found = LOCAL
    elif (secret := bearer(headers)) is not None:
        found = await run_in_threadpool(accounts.by_token, secret)
        if found is None:
            raise failed(scope, "the token is wrong, revoked or expired")
    elif (cookie := session_cookie(headers)) is not None:
        found = await run_in_threadpool(accounts.by_session, cookie)
        if found is not None and scope.get("method", "GET") not in SAFE_METHODS and not _from_our_page(headers):
            raise OriginError("a change came with a cookie and no Origin", remedy="send a token: Authorization: Bearer")
    entry = current_entry()
    if found is not None and entry is not None:
        entry.actor, entry.token_id = found.user, found.token_id
    return found


async def _asks_for_login(app: Any, accounts: Accounts) -> bool:
    """Say whether a token is asked for. Of many requests at once one looks into the database, and all are told."""
    asks = accounts.knows()
    if asks is not None:
        return asks
    looking: asyncio.Task[bool] | None = getattr(app.state, "looking", None)
    if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
        looking = app.state.looking = asyncio.ensure_future(run_in_threadpool(accounts.asks_for_login))
    return await asyncio.shield(looking)  # the others still wait where this request is given up


def knows_whoever_asks(request: Request) -> bool:
    """Say whether no login is asked for, or a good token came with a request to what is open to anybody; blocks.

    Raises:
        LimitError: a token came that is not good, and too many such before it.
    """
    accounts: Accounts = request.app.state.service.accounts
    if not accounts.asks_for_login():
        return True
    if (secret := bearer(request.headers)) is None:
        return False
    if accounts.by_token(secret) is not None:
        return True
    if isinstance(error := failed(request.scope, "the token is wrong, revoked or expired"), LimitError):
        raise error
    return False


def failed(scope: Scope, problem: str) -> TwinstepError:
    """Count a login that failed; return what to answer."""
    failures: Failures = scope["app"].state.failures
    if (wait := failures.note(_address(scope))) is not None:
        return LimitError(
            "too many logins have failed from this address", remedy=f"wait {wait:.0f} seconds; a right token is let in"
        )
    return AuthError(problem, remedy="ask an admin for another; log in again: twinstep login URL, or the login page")


def bearer(headers: Headers) -> str | None:
    """Return the bearer token of a request; "" where Authorization says something else, None where it is not there."""
    given = headers.getlist("authorization")
    if not given:
        return None
    scheme, _, secret = given[0].partition(" ")
    return secret.strip() if len(given) == 1 and scheme.lower() == "bearer" else ""


def session_cookie(headers: Headers) -> str | None:
    """Return the session's cookie; None where it is not there."""
    return cookie_parser("; ".join(headers.getlist("cookie"))).get(COOKIE)


def _from_our_page(headers: Headers) -> bool:
    """Say whether a page of ours sent it: the guard has held the Origin, which browsers send with a change, to Host."""
    return "origin" in headers or headers.get("sec-fetch-site") == "same-origin"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


async def _turn_away(error: TwinstepError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": error.problem})
    else:
        await problem_response(error, instance=scope["path"])(scope, receive, send)
