"""What answers while a control plane waits for its database: probes are told what it waits for, others to come back.

A pod that did not listen would be killed by its liveness probe for what its database does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from twinstep.platform.api.problems import problem_response
from twinstep.platform.scheduler.service import Readiness
from twinstep.spec.errors import UnavailableError

RETRY_AFTER_S = 2


class Waiting:
    """An ASGI app: `/healthz` says that the process is there, everything else that it is not ready."""

    def __init__(self, *, tells_addresses: bool) -> None:
        """`tells_addresses`: nobody but this machine's users can ask, so they may know what the database says."""
        self._tells = tells_addresses
        self.problem = ""
        """What keeps the database from answering, once it was asked."""

    def on_wait(self, problem: str) -> None:
        """Take in what the database's trouble is."""
        self.problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 to `/healthz`, 503 to everything else; close sockets."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": "the control plane is starting"})
            return
        answer = self._answer(scope["path"])
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
        await answer(scope, receive, send)

    def _answer(self, path: str) -> Response:
        detail = "waits for the database"
        if self.problem:
            detail += f": {self.problem}" if self._tells else ", which does not answer"
        if path == "/healthz":
            return JSONResponse({"status": "ok", "detail": detail})
        if path == "/readyz":
            readiness = Readiness(ready=False, reconciler_age_seconds=None, detail=detail)
            return JSONResponse(readiness.model_dump(), status_code=503)
        error = UnavailableError(f"the control plane {detail}", remedy="ask again in a moment")
        return problem_response(error, instance=path)


@contextmanager
def answering(listener: socket, waiting: Waiting) -> Iterator[None]:
    """Let `waiting` answer at a listening socket meanwhile. Whoever connects after that waits for who comes next."""
    config = uvicorn.Config(
        waiting, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=1
    )
    server, mine = uvicorn.Server(config), listener.dup()  # it closes what it is given
    thread = threading.Thread(target=server.run, kwargs={"sockets": [mine]}, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        server.should_exit = True
        thread.join()
