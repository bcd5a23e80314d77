"""Every error the API answers with, as RFC 9457 problem details: the one map from the error tree to HTTP.

Each problem names what is wrong, where, what was given, what is allowed and what to do. No traceback and no secret
ever leaves here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from twinstep.platform.api.limits import EACH_S
from twinstep.platform.store.entry import current_entry
from twinstep.platform.store.records import View
from twinstep.platform.store.troubles import TransientError
from twinstep.spec.errors import (
    AuthError,
    CompileError,
    ConflictError,
    DataError,
    Fault,
    ForbiddenError,
    NotFoundError,
    SpecError,
    StateError,
    TrainError,
    TwinstepError,
    UnavailableError,
)
from twinstep.spec.parse import show

MEDIA_TYPE = "application/problem+json"
SAFE_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer. A foreign page may show none of ours in a frame, to have the user click what it lies under."""


class RequestError(TwinstepError):
    """A query, a header or a body is not valid."""

    code = "invalid_request"


class TooLargeError(TwinstepError):
    """A body is larger than the API takes."""

    code = "too_large"


class MediaTypeError(TwinstepError):
    """A body is of a type the API does not take."""

    code = "media_type"


class OriginError(TwinstepError):
    """A request came by a name or from a page that this control plane does not serve."""

    code = "forbidden_origin"


class LimitError(TwinstepError):
    """Too much of something from one address."""

    code = "too_many_requests"


class MethodError(TwinstepError):
    """The path is right, the method is not."""

    code = "method_not_allowed"


STATUS: dict[type[TwinstepError], int] = {
    SpecError: 422,
    DataError: 422,
    CompileError: 422,
    RequestError: 422,
    StateError: 409,
    ConflictError: 409,
    NotFoundError: 404,
    MethodError: 405,
    AuthError: 401,
    OriginError: 403,
    ForbiddenError: 403,
    LimitError: 429,
    TooLargeError: 413,
    MediaTypeError: 415,
    UnavailableError: 503,
    TransientError: 503,
    TrainError: 500,
    TwinstepError: 500,
}
"""Status of each kind of error; a subclass without a row has its parent's."""


class FaultModel(View):
    """One thing that is wrong, named by field."""

    field: str
    """Dotted path of the field, as it was written; empty for the whole."""
    problem: str
    """What is wrong."""
    given: str = ""
    """What was given, cut to 120 characters."""
    allowed: str = ""
    """What is allowed."""
    remedy: str = ""
    """What to do, the nearest valid value first."""


class Problem(View):
    """RFC 9457 problem details."""

    type: str
    """`urn:twinstep:problem:` and the code."""
    title: str
    """The status in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What is wrong, in one sentence."""
    instance: str
    """The path that was asked for."""
    code: str
    """Machine name of the kind of error: stable."""
    remedy: str = ""
    """What to do."""
    faults: list[FaultModel] = Field(default_factory=list)
    """Each field that is wrong."""


def status_of(error: TwinstepError) -> int:
    """Return the HTTP status of an error."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def problem_response(error: TwinstepError, *, instance: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the problem details of an error."""
    status = status_of(error)
    if (entry := current_entry()) is not None:
        entry.reason = error.problem
    content = {
        "type": f"urn:twinstep:problem:{error.code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": error.problem,
        "instance": instance,
        "code": error.code,
        "remedy": error.remedy,
        "faults": [
            {
                "field": fault.field,
                "problem": fault.problem,
                "given": fault.given,
                "allowed": fault.allowed,
                "remedy": fault.remedy,
            }
            for fault in error.faults
        ],
    }
    extra = {**SAFE_HEADERS, **(headers or {})}
    if status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    if status == 429:
        extra["Retry-After"] = str(int(EACH_S))
    # ASCII: what was given may hold lone surrogates, which UTF-8 cannot.
    return Response(json.dumps(content), status_code=status, media_type=MEDIA_TYPE, headers=extra)


def add_handlers(app: FastAPI) -> None:
    """Make `app` answer every error as a problem."""

    async def twinstep_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TwinstepError)  # noqa: S101  as registered below
        return problem_response(error, instance=request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101  as registered below
        return problem_response(request_error(error.errors()), instance=request.url.path)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101  as registered below
        known: dict[int, TwinstepError] = {
            404: no_such_path(request.url.path),
            405: MethodError(
                f"{request.method} is not a method of {request.url.path}",
                remedy=f"use one of: {(error.headers or {}).get('Allow', 'GET')}",
            ),
        }
        found = known.get(error.status_code) or RequestError(str(error.detail), remedy="mend the request")
        return problem_response(found, instance=request.url.path, headers=error.headers)

    async def ours(request: Request, error: Exception) -> Response:
        problem = TwinstepError(
            "the control plane failed on this request; that is its fault, not yours",
            remedy="look into its log, and report what stands there",
        )
        told = {"X-Request-Id": request.state.request_id} if hasattr(request.state, "request_id") else {}
        return problem_response(problem, instance=request.url.path, headers=told)

    app.add_exception_handler(TwinstepError, twinstep_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, ours)


def no_such_path(path: str) -> NotFoundError:
    """Return the error of a path the API does not have."""
    return NotFoundError(f"there is nothing at {path[:200]}", remedy="the paths there are: GET /openapi.json")


def request_error(errors: Any) -> RequestError:
    """Turn pydantic's complaints about a request into one error that names each field."""
    faults = []
    for item in list(errors)[:20]:
        where = [str(part) for part in item["loc"] if part not in ("query", "path", "body", "header")]
        faults.append(
            Fault(
                field=".".join(where),
                problem=item["msg"][:1].lower() + item["msg"][1:],
                given=show(item.get("input")) if "input" in item else "",
                remedy=f"mend {where[-1]}" if where else "mend the body",
            )
        )
    named = ", ".join(fault.field or "body" for fault in faults)
    return RequestError(f"the request is not valid: {named}", remedy="mend the fields named", faults=tuple(faults))


def from_validation(error: ValidationError) -> RequestError:
    """Turn a ValidationError of a body into a RequestError."""
    return request_error(error.errors(include_url=False))


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI is told of the problems a route answers with; some every route may."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({*statuses, 403, 422, 503})
    }
