"""Routes of the pages, and how NiceGUI is put on the control plane's app. NiceGUI's globals are this file's alone."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from nicegui import Client, core, ui
from nicegui.page import page as nicegui_page

from twinstep.platform.dashboard import compare_page, job_page, jobs_page, login_page, queue_page, reference_page, theme
from twinstep.platform.dashboard.filters import from_query
from twinstep.platform.dashboard.reader import Counts, Reader
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings

BUILD_SECONDS = 15.0  # a page waits so long for its first data; a disk under load can take a second


def add_pages(app: FastAPI, service: Service, settings: Settings) -> None:
    """Define the pages and mount them on `app`."""
    counts = Counts(service)

    def reader_of(request: Request) -> Reader:
        return Reader(service, principal=request.state.principal, counts=counts)

    @ui.page("/", title="Jobs · Twinstep", response_timeout=BUILD_SECONDS)
    async def _jobs(request: Request) -> None:
        wanted = from_query(request.query_params.multi_items())
        await jobs_page.build(reader_of(request), wanted, url=str(request.base_url).rstrip("/"))

    @ui.page("/jobs/{job_id}", title="Job · Twinstep", response_timeout=BUILD_SECONDS)
    async def _job(request: Request, job_id: str) -> None:
        await job_page.build(reader_of(request), job_id)

    @ui.page("/compare", title="Compare · Twinstep", response_timeout=BUILD_SECONDS)
    async def _compare(request: Request, jobs: str = "", x: str = "step", smooth: str = "0") -> None:
        await compare_page.build(reader_of(request), jobs=jobs, axis=x, smoothing=smooth)

    @ui.page("/queue", title="Queue · Twinstep", response_timeout=BUILD_SECONDS)
    async def _queue(request: Request) -> None:
        await queue_page.build(reader_of(request))

    app.add_route(login_page.PATH, login_page.answer, include_in_schema=False)
    app.add_route(reference_page.PATH, reference_page.answer, include_in_schema=False)
    # A second control plane in one process (tests have them) finds NiceGUI's app started; its middleware is built anew.
    core.app.middleware_stack = None
    core.app.add_exception_handler(404, _missing)
    ui.run_with(
        app,
        title="Twinstep",
        favicon=theme.LOGO,
        dark=None,
        tailwind=False,
        reconnect_timeout=10.0,
        show_welcome_message=False,
    )


async def _missing(request: Request, error: Exception) -> Response:
    """Answer with a page for a path that leads nowhere; a missing part of a page is no page."""
    if request.url.path.startswith("/_nicegui"):
        return PlainTextResponse("not found", status_code=404)
    with Client(nicegui_page(""), request=request) as client:
        job_page.build_missing("This address leads nowhere.")
        return client.build_response(request, 404)
