"""What every request passes before a route sees it: the name it came by, and the page it came from.

A browser lets any page send requests to this machine. A page that rebinds its own name to 127.0.0.1 is told by the
Host header; one that posts across origins by the Origin header, for sockets too; one that frames our pages is told to
the browser by headers on every answer. The body's type and size are checked where a body is read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import lru_cache
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinstep.platform.api.problems import (
    SAFE_HEADERS,
    MediaTypeError,
    OriginError,
    RequestError,
    TooLargeError,
    problem_response,
)
from twinstep.platform.settings import is_loopback
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import MAX_SPEC_BYTES
from twinstep.spec.text import is_text

MAX_REPORT_BYTES = 8 * 1024 * 1024  # a full batch of records is some hundred KiB
JSON_TYPE = "application/json"
PROBED = ("/healthz", "/readyz", "/metrics")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")


_SAFE = {name.lower().encode(): value.encode() for name, value in SAFE_HEADERS.items()}


class OriginGuard:
    """ASGI middleware: names that this control plane is reached by, and pages of our own, only."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403 (a socket: close it)."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] not in _SAFE]
                message["headers"] += _SAFE.items()
            await send(message)

        problem = _foreign(scope)
        if problem is None:
            await self.app(scope, receive, send_safe)
        elif scope["type"] == "http":
            error = OriginError(
                problem,
                remedy="use the address it printed; it is told of others by --public-url and --allowed-host",
            )
            await problem_response(error, instance=scope["path"])(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "foreign origin"})


def _foreign(scope: Scope) -> str | None:
    headers, service = Headers(scope=scope), scope["app"].state.service
    # Probes and scrapers come by a pod's address; what they are told is no secret of a user's.
    if scope["path"] in PROBED and service.accounts.knows():
        return None
    host = headers.get("host", "")
    if len(headers.getlist("host")) > 1 or len(headers.getlist("origin")) > 1:
        return "the request names two hosts, or two pages that it came from"
    name = _name_of(host)
    # A page that rebinds its own name has no token of ours to send, so whatever is sent with one is no page's. Where
    # no login is asked for there is no such proof.
    by_token = "authorization" in headers and service.accounts.knows()
    if not (is_loopback(name) or by_token or (name in service.settings.hosts and service.accounts.knows())):
        return f"the host name {host[:100]!r} is not one that this control plane is reached by"
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        return f"the page at {origin[:100]!r} is not one of this control plane's"
    return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def media_type(request: Request) -> str:
    """Return the body's type, without parameters, in lower case; "" where none is given."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def require_type(request: Request, *allowed: str) -> None:
    """Raise MediaTypeError unless the body is of an allowed type."""
    given = media_type(request)
    if given not in allowed:
        raise MediaTypeError(
            f"the body's type is {given or 'not given'}, not {' or '.join(allowed)}",
            remedy=f"send the header Content-Type: {allowed[0]}",
        )


async def read_body(request: Request, *, limit: int) -> bytes:
    """Return the body, or raise TooLargeError where it has more than `limit` bytes; never holds more than that."""
    body, length = bytearray(), 0
    async for chunk in request.stream():
        length += len(chunk)
        if length <= limit:
            body += chunk
        elif length > 4 * limit:  # up to here it is read to the end, so that the sender hears the answer
            break
    if length > limit:
        raise TooLargeError(
            f"the body has more than the {limit:,} bytes it may have", remedy="send less; a spec is a page or two"
        )
    return bytes(body)


def takes_several(route: APIRoute) -> frozenset[str]:
    """Return the names of a route's query parameters that take several values."""
    found, parts = set(), [route.dependant]
    while parts:
        part = parts.pop()
        parts += part.dependencies
        # `list[str] | None`, as much as `list[str]`
        for each in part.query_params:
            kinds = (each.field_info.annotation, *get_args(each.field_info.annotation))
            found |= {each.alias} if any(get_origin(kind) is list for kind in kinds) else set()
    return frozenset(found)


async def asked_once(request: Request) -> None:
    """Raise RequestError where a query parameter that takes one value stands twice: which is meant is not guessed."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    doubled = {name for name, count in counts.items() if count > 1}
    if doubled and (doubled := doubled - takes_several(request.scope["route"])):
        name = min(doubled)
        raise RequestError(
            f"the query gives {name[:100]!r} {counts[name]} times; it takes one value", remedy="give it once"
        )


async def no_body(request: Request) -> None:
    """Take no body, or a JSON one (`{}`) that says nothing: a form sent by a foreign page is neither."""
    body = await read_body(request, limit=MAX_SPEC_BYTES)
    if body or media_type(request):
        require_type(request, JSON_TYPE)


def load_json(body: bytes) -> Any:
    """Return what JSON text holds.

    Raises:
        SpecError: it is no JSON, is nested too deeply, a key stands twice, or text in it is none.
    """
    try:
        found = json.loads(body, object_pairs_hook=_no_doubles)
        # UTF-8 holds no surrogate, so only an escape can bring one.
        if _SURROGATE.search(body) and not is_text(json.dumps(found, ensure_ascii=False)):
            raise ValueError("an escape is half a character (a lone surrogate)")
        return found
    except RecursionError:
        raise SpecError("the body is nested too deeply", remedy="a spec has at most three levels") from None
    except json.JSONDecodeError as error:
        raise SpecError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            remedy="mend the place named, or send YAML as application/yaml",
        ) from None
    except ValueError as error:
        raise SpecError(f"the body is not valid JSON: {str(error)[:200]}", remedy="mend the place named") from None


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {next(key for key, count in counts.items() if count > 1)[:100]!r} stands twice")
    return found
