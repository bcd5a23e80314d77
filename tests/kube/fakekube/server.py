"""A Kubernetes API server for tests: real HTTP on a free port of the loopback interface, real rules, no cluster.

kmock reads the requests, keeps them for assertions and answers discovery; all that it lacks is here: what the official
client needs is answered as a real API server answers it, in the same words and with the same codes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kmock import KubernetesScaffold, Request

from .api import ADMIN_TOKEN, NAMESPACES, Api
from .faults import Faults
from .logs import Logs
from .objects import Objects
from .resources import RESOURCES, Object

TOKEN = "a-token-for-tests"  # noqa: S105


class _Handler(KubernetesScaffold):
    """kmock's handler, whose requests go to ours first; what is no resource (discovery, /version) is kmock's."""

    api: Api

    async def __call__(self, raw_request: web.BaseRequest) -> web.StreamResponse:
        if raw_request.path.rstrip("/") == "/api/v1/namespaces":  # which kmock cannot read
            where = raw_request.rel_url.with_path(f"/api/v1/{NAMESPACES}").with_query(raw_request.rel_url.query)
            raw_request = raw_request.clone(rel_url=where)
        return await super().__call__(raw_request)

    async def _handle(self, request: Request) -> web.StreamResponse:
        answer = await self.api.answer(request)
        return answer if answer is not None else await super()._handle(request)


def _handler(api: Api) -> _Handler:
    found = _Handler()
    found.api = api
    for each in RESOURCES:
        for version in each.versions:
            found.resources[each.group, version, each.plural] = {
                "kind": each.kind,
                "namespaced": each.namespaced,
                "verbs": {"get", "list", "watch", "create", "update", "patch", "delete"},
                "subresources": {"status"} if each.status else set(),
            }
    # The official client asks with a slash at the end.
    found.fallback["get", re.compile(r"/apis/[^/]+/[^/]+/")] << found._serve_version
    found.fallback["get", re.compile(r"/api/[^/]+/")] << found._serve_version
    found.fallback["get /version/"] << found._serve_server_version
    return found


class FakeServer:
    """A handle on the server, for the test that started it.

    >>> with FakeServer(directory) as server:
    ...     Settings(cluster=..., kubeconfig=server.kubeconfig)
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time, bookmark_seconds: float = 0.5):
        self.shift = 0.0
        """Seconds that the cluster's clock is ahead."""
        self.objects = Objects(lambda: clock() + self.shift)
        self.logs = Logs(self.objects.clock)
        self.faults = Faults()
        self.api = Api(self.objects, self.logs, self.faults, token=TOKEN, bookmark_seconds=bookmark_seconds)
        self.kubeconfig = directory / "kubeconfig.yaml"
        self.admin = directory / "admin.yaml"
        """The kubeconfig of an admin, whose rights are not limited."""
        self.port = 0
        self._handlers: list[_Handler] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ---- life ----

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Answer, on the same port as before where there was one; what is stored has stayed."""
        ready: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="fake-api-server", daemon=True)
        self._thread.start()
        self.port = ready.result(timeout=20)
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.write_text(yaml.safe_dump(self._config(TOKEN)))
        self.admin.write_text(yaml.safe_dump(self._config(ADMIN_TOKEN)))

    def stop(self) -> None:
        """Answer no more: connections are closed, and new ones refused."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout=20)
        self._loop = self._thread = None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Be away for a while."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def close_watches(self, path: str = "") -> int:
        """Close the connections of watches that are open; return how many."""
        return self._call(lambda: self.api.close_watches(path))

    @property
    def watches(self) -> int:
        """Watches that are open now."""
        return len(self.api.open_watches)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Request]:
        """All requests so far, as kmock read them."""
        return [request for handler in self._handlers for request in handler._requests]

    def asked(self, method: str, path: str = "", **params: str) -> list[Request]:
        """Return requests of a method whose path holds `path` and whose parameters are these."""
        return [
            each
            for each in self.requests
            if each.method.value.upper() == method.upper()
            and path in each.url.path
            and all(each.params.get(key) == text for key, text in params.items())
        ]

    # ---- what a test does in the cluster ----

    def put(self, value: Object) -> Object:
        """Create an object as somebody else would."""
        return self.objects.put(value)

    def all(self, kind: str, namespace: str = "", **labels: str) -> list[Object]:
        """Return objects of a kind."""
        return self.objects.list(kind, namespace, labels={key.replace("__", "/"): text for key, text in labels.items()})

    # ---- inside ----

    def _call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=20)

    def _run(self, ready: Future[int]) -> None:
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        handler = _handler(self.api)  # one for each time it is started: kmock's belong to one event loop
        self._handlers.append(handler)
        async with handler:
            runner = web.ServerRunner(
                web.Server(handler, handler_cancellation=True, access_log=None),
                shutdown_timeout=0.1,
            )
            try:
                await runner.setup()
                listener = socket.create_server(("127.0.0.1", self.port))
                await web.SockSite(runner, listener).start()
            except Exception as error:
                ready.set_exception(error)
                raise
            ready.set_result(listener.getsockname()[1])
            await self._ended.wait()
            self.api.close_watches("")
            await runner.cleanup()

    def _config(self, token: str) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "twinstep", "user": {"token": token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "twinstep", "namespace": "default"}}],
        }
