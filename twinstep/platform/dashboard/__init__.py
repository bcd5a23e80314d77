"""The web pages: a list of jobs and a page per job, drawn on the server and kept live over one socket per browser.

They read the control plane through its service, in this process, and never through its API. What a spec, a log or a
worker says is shown as text and never becomes HTML, script or a file's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from twinstep.platform.scheduler.service import Service
    from twinstep.platform.settings import Settings


def mount(app: FastAPI, service: Service, settings: Settings) -> None:
    """Add the pages to `app`, under every path that no route before this call takes.

    NiceGUI has one set of pages per process: where several apps are mounted in one process, the last one is served.
    """
    from twinstep.platform.dashboard.pages import add_pages

    add_pages(app, service, settings)
