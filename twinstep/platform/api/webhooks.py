"""Routes of webhooks: who is told of what happens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field

from twinstep.platform.api.bodies import body_of, read_model
from twinstep.platform.api.guard import no_body
from twinstep.platform.api.jobs import Asked
from twinstep.platform.api.problems import responses
from twinstep.platform.store.outbox import Webhook
from twinstep.platform.store.records import View
from twinstep.spec.base import Spec

router = APIRouter(prefix="/v1", tags=["webhooks"])


class NewWebhook(Spec):
    """Whom to tell, and of what."""

    url: str
    """Where messages are posted: https, at a public address."""
    types: list[str] = Field(default_factory=list)
    """Types of event: `run.failed`, `run.succeeded`, `job.submitted`, …; none: all."""


class MadeWebhook(View):
    """A webhook that was just made, with the secret that is not shown again."""

    webhook: Webhook
    secret: str
    """`whsec_…`: verify a message's signature with it, by the Standard Webhooks scheme."""


class WebhookList(View):
    """All webhooks."""

    items: list[Webhook]


async def webhook_in(request: Request) -> NewWebhook:
    """Return the webhook in the body, or raise an error naming each field."""
    return await read_model(request, NewWebhook)


@router.post(
    "/webhooks",
    status_code=201,
    openapi_extra=body_of(NewWebhook),
    responses=responses(409, 413, 415),
    summary="Make a webhook",
)
def create_webhook(service: Asked, wanted: Annotated[NewWebhook, Depends(webhook_in)]) -> MadeWebhook:
    """Have events posted to an address, signed. The secret is in this answer and in no other."""
    webhook, secret = service.webhooks.create(wanted.url, wanted.types)
    return MadeWebhook(webhook=webhook, secret=secret)


@router.get("/webhooks", responses=responses(), summary="List webhooks")
def list_webhooks(service: Asked) -> WebhookList:
    """Return every webhook, the oldest first, with what waits for it and what is wrong with it."""
    return WebhookList(items=service.webhooks.list())


@router.get("/webhooks/{webhook_id}", responses=responses(404), summary="Look at a webhook")
def get_webhook(service: Asked, webhook_id: str) -> Webhook:
    """Return a webhook."""
    return service.webhooks.get(webhook_id)


@router.delete(
    "/webhooks/{webhook_id}",
    status_code=204,
    responses=responses(404, 413, 415),
    dependencies=[Depends(no_body)],
    summary="Delete a webhook",
)
async def delete_webhook(service: Asked, webhook_id: str) -> None:
    """Tell it nothing any more, not even what waits."""
    await run_in_threadpool(service.webhooks.delete, webhook_id)
