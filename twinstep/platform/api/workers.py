"""The route by which workers report. The only one that asks for a token, and it is the run's own."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import ValidationError

from twinstep.platform.api.guard import JSON_TYPE, MAX_REPORT_BYTES, read_body, require_type
from twinstep.platform.api.jobs import Asked
from twinstep.platform.api.problems import from_validation, responses
from twinstep.spec.report import ReportAck, ReportBatch

router = APIRouter(prefix="/v1", tags=["workers"])
_bearer = HTTPBearer(auto_error=False, description="TWINSTEP_RUN_TOKEN of the run")

_BATCH_BODY = {
    "requestBody": {
        "required": True,
        "content": {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/ReportBatch"}}},
    }
}


@router.post(
    "/runs/{run_id}/reports",
    openapi_extra=_BATCH_BODY,
    responses=responses(401, 413, 415),
    summary="Report what a worker saw",
)
async def report(
    request: Request,
    service: Asked,
    run_id: str,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> ReportAck:
    """Store the records that are next in line, and say up to which seq all are stored."""
    token = credentials.credentials if credentials else ""
    # The one check, before the body is read: who has no token may not make us hold eight mebibytes.
    await run_in_threadpool(service.check_token, run_id, token)
    require_type(request, JSON_TYPE)
    body = await read_body(request, limit=MAX_REPORT_BYTES)

    def take() -> ReportAck:
        try:
            batch = ReportBatch.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from None
        request.app.state.observed.records.inc(len(batch.records))
        return service.report(run_id, batch)

    return await run_in_threadpool(take)
