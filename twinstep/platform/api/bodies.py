"""Bodies of requests that are one small model: read by hand, so that type and size are checked first."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from twinstep.platform.api.guard import JSON_TYPE, load_json, read_body, require_type
from twinstep.platform.api.problems import from_validation

MAX_BODY = 16 * 1024
_Body = TypeVar("_Body", bound=BaseModel)


def body_of(model: type[BaseModel]) -> dict[str, object]:
    """Return what OpenAPI is told of a JSON body that a route reads by hand."""
    content = {JSON_TYPE: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


async def read_model(request: Request, model: type[_Body]) -> _Body:
    """Return what the body holds, or raise the error that names each field."""
    require_type(request, JSON_TYPE)
    data = load_json(await read_body(request, limit=MAX_BODY))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
