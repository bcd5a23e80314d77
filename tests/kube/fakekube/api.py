"""Requests, answered as an API server answers them: verbs, parameters, watches, logs; and the faults asked for."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import yaml
from aiohttp import web
from kmock import Request

from .faults import Fault, Faults
from .logs import Logs, Shown, tail
from .objects import Change, Objects
from .resources import BY_PATH, Object, Refusal, Resource, bad_request, gone, invalid
from .selectors import Selector, selector

PATCHES = {
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/json-patch+json": "json",
}
APPLY = ("application/apply-patch+yaml", "application/apply-patch+json")
ADMIN_TOKEN = "an-admins-token"  # noqa: S105
NAMESPACES = "namespaces-themselves"
"""In the path, for `namespaces` where it is the last word."""
_LOOK_S = 0.01  # how often a log that is followed is looked at


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request, read."""

    request: Request
    method: str
    resource: Resource
    version: str
    namespace: str
    name: str
    subresource: str

    def text(self, key: str) -> str:
        return str(self.request.params.get(key, ""))

    def flag(self, key: str) -> bool:
        return self.text(key).lower() in ("true", "1")

    def number(self, key: str) -> int | None:
        return int(self.text(key)) if self.text(key) else None

    @property
    def watch(self) -> bool:
        return self.method == "GET" and not self.name and self.flag("watch")

    @property
    def verb(self) -> str:
        """The verb of a Role that the request needs."""
        if self.method == "GET":
            return "watch" if self.watch else "get" if self.name else "list"
        if self.method == "DELETE":
            return "delete" if self.name else "deletecollection"
        return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(self.method, "")

    @property
    def manager(self) -> str:
        agent = str(self.request.headers.get("User-Agent", "unknown"))
        return self.text("fieldManager") or agent.split("/")[0]

    @property
    def dry_run(self) -> bool:
        return self.text("dryRun") == "All"

    @property
    def selector(self) -> Selector:
        return selector(self.resource.kind, self.text("labelSelector"), self.text("fieldSelector"))


class Api:
    """Answers for one cluster."""

    def __init__(self, objects: Objects, logs: Logs, faults: Faults, *, token: str, bookmark_seconds: float) -> None:
        self._objects = objects
        self._logs = logs
        self._faults = faults
        self._token = token
        self._bookmark_seconds = bookmark_seconds
        self.open_watches: dict[asyncio.Task[Any], str] = {}
        self.allowed: set[tuple[str, str, str]] | None = None
        """(group, resource, verb) that its user has a right to; None: to everything. Its admin has every right."""
        self.refuse_token = False
        """Answer 401, as to a token that has run out."""

    async def answer(self, request: Request) -> web.StreamResponse | None:
        """Answer a request, or None where it is for no resource."""
        raw = request._raw_request
        assert raw is not None
        path, method = raw.path, raw.method
        watch = str(request.params.get("watch", "")).lower() in ("true", "1")
        fault = self._faults.take(method, path, watch)
        try:
            self._check_token(raw)
            asked = _read(request)
            if fault is not None and (not watch or fault.kind in ("status", "hang", "drop")):
                return await self._struck(fault, asked, raw)
            if asked is None:
                return None
            self._check_right(asked)
            if asked.watch:
                return await self._watch(asked, fault)
            if asked.resource.kind == "Pod" and asked.subresource == "log":
                return await self._log(asked)
            code, body, warnings = self._do(asked)
            return _json(body, code, warnings)
        except Refusal as refusal:
            return _json(refusal.status, refusal.code)

    def close_watches(self, path: str) -> int:
        """Close watches whose path holds `path`; return how many."""
        found = [task for task, where in self.open_watches.items() if path in where]
        for task in found:
            task.cancel()
        return len(found)

    def _check_token(self, raw: web.BaseRequest) -> None:
        given = raw.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.refuse_token or given not in (self._token, ADMIN_TOKEN):
            raise Refusal(401, "Unauthorized", "Unauthorized")

    def _check_right(self, asked: _Asked) -> None:
        kind = asked.resource
        plural = f"{kind.plural}/{asked.subresource}" if asked.subresource else kind.plural
        raw = asked.request._raw_request
        admin = raw is not None and raw.headers.get("Authorization", "").endswith(ADMIN_TOKEN)
        if not admin and self.allowed is not None and (kind.group, plural, asked.verb) not in self.allowed:
            where = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
            message = (
                f'{kind.full} is forbidden: User "twinstep" cannot {asked.verb} resource "{plural}" '
                f'in API group "{kind.group}"{where}'
            )
            raise Refusal(403, "Forbidden", message)

    async def _struck(self, fault: Fault, asked: _Asked | None, raw: web.BaseRequest) -> web.StreamResponse:
        if fault.stored and asked is not None:
            self._do(asked)
        if fault.kind == "hang":
            await asyncio.sleep(fault.seconds)
        if fault.kind in ("hang", "drop"):
            if raw.transport is not None:
                raw.transport.abort()
            raise asyncio.CancelledError
        words = {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}
        reason = fault.reason or words.get(fault.code, "Unknown")
        refusal = Refusal(fault.code, reason, f"an error on the server ({reason}) has prevented the request")
        answer = _json(refusal.status, fault.code)
        if fault.retry_after is not None:
            answer.headers["Retry-After"] = str(fault.retry_after)
        return answer

    # ---- verbs ----

    def _do(self, asked: _Asked) -> tuple[int, Object, list[str]]:
        warnings: list[str] = []
        if asked.method == "GET":
            body = self._get(asked) if asked.name else self._list(asked)
            return 200, body, warnings
        body = self._body(asked)
        if asked.method == "POST" and not asked.name:
            made = self._objects.create(
                asked.resource, asked.namespace, body, manager=asked.manager, dry_run=asked.dry_run,
                unknown=_unknown(asked), warnings=warnings,
            )  # fmt: skip
            return 201, self._out(asked, made), warnings
        if asked.method == "PUT" and asked.name:
            if asked.resource.custom and not (body.get("metadata") or {}).get("resourceVersion"):
                causes = [("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")]
                raise invalid(asked.resource, asked.name, causes)
            done = self._objects.replace(
                asked.resource, asked.namespace, asked.name, body, manager=asked.manager, dry_run=asked.dry_run,
                subresource=asked.subresource, unknown=_unknown(asked), warnings=warnings,
            )  # fmt: skip
            return 200, self._out(asked, done), warnings
        if asked.method == "PATCH" and asked.name:
            return self._patch(asked, body, warnings)
        if asked.method == "DELETE":
            return 200, self._delete(asked, body), warnings
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _get(self, asked: _Asked) -> Object:
        return self._out(asked, self._objects.get(asked.resource.kind, asked.namespace, asked.name))

    def _patch(self, asked: _Asked, body: Any, warnings: list[str]) -> tuple[int, Object, list[str]]:
        kind = str(asked.request.headers.get("Content-Type", "")).split(";")[0]
        if kind in APPLY:
            found, made = self._objects.apply(
                asked.resource, asked.namespace, asked.name, body, manager=asked.text("fieldManager"),
                force=asked.flag("force"), dry_run=asked.dry_run, subresource=asked.subresource, warnings=warnings,
            )  # fmt: skip
            return 201 if made else 200, self._out(asked, found), warnings
        if kind not in PATCHES or (kind == "application/strategic-merge-patch+json" and asked.resource.custom):
            raise Refusal(
                415, "UnsupportedMediaType",
                f"the body of the request was in an unknown format - accepted media types include: {list(PATCHES)}",
            )  # fmt: skip
        found = self._objects.patch(
            asked.resource, asked.namespace, asked.name, body, kind=PATCHES[kind], manager=asked.manager,
            dry_run=asked.dry_run, subresource=asked.subresource, unknown=_unknown(asked), warnings=warnings,
        )  # fmt: skip
        return 200, self._out(asked, found), warnings

    def _delete(self, asked: _Asked, body: Any) -> Object:
        options = body if isinstance(body, dict) else {}
        before = options.get("preconditions") or {}
        how: dict[str, Any] = {
            "propagation": asked.text("propagationPolicy") or options.get("propagationPolicy") or "",
            "grace": asked.number("gracePeriodSeconds"),
            "dry_run": asked.dry_run or "All" in (options.get("dryRun") or ()),
        }
        if how["grace"] is None:
            how["grace"] = options.get("gracePeriodSeconds")
        if not asked.name:
            chosen = [each for each in self._objects.of(asked.resource, asked.namespace) if asked.selector(each)]
            for each in chosen:
                metadata = each["metadata"]
                self._objects.delete(asked.resource, metadata.get("namespace", ""), metadata["name"], **how)
            return {**_list_of(asked), "items": chosen}
        uid, version = before.get("uid") or "", before.get("resourceVersion") or ""
        last = self._objects.delete(
            asked.resource, asked.namespace, asked.name, uid=uid, version=version, **how
        )  # fmt: skip
        if last["metadata"].get("deletionTimestamp"):
            return self._out(asked, last)
        details = {"name": asked.name, "group": asked.resource.group, "kind": asked.resource.plural}
        details["uid"] = last["metadata"]["uid"]
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _list(self, asked: _Asked) -> Object:
        with self._objects.lock:
            version = self._objects.version
            items = [each for each in self._objects.of(asked.resource, asked.namespace) if asked.selector(each)]
        start = 0
        if token := asked.text("continue"):
            told = json.loads(base64.b64decode(token))
            version, start = told["version"], told["start"]
            if version < self._objects.oldest:
                raise gone("The provided continue parameter is too old to display a consistent list result.")
            key = told["after"]
            start = next((i for i, each in enumerate(items) if _place(each) > key), len(items))
        metadata: Object = {"resourceVersion": str(version)}
        limit = asked.number("limit")
        if limit and start + limit < len(items):
            after = _place(items[start + limit - 1])
            told = {"version": version, "start": start + limit, "after": after}
            metadata["continue"] = base64.b64encode(json.dumps(told).encode()).decode()
            if not (asked.text("labelSelector") or asked.text("fieldSelector")):
                metadata["remainingItemCount"] = len(items) - start - limit
            items = items[start : start + limit]
        else:
            items = items[start:]
        return {**_list_of(asked), "metadata": metadata, "items": [self._item(asked, each) for each in items]}

    def _item(self, asked: _Asked, value: Object) -> Object:
        """Return an object of a list: those of built-in kinds come without their kind."""
        if asked.resource.custom:
            return self._out(asked, value)
        return {key: each for key, each in value.items() if key not in ("apiVersion", "kind")}

    def _out(self, asked: _Asked, value: Object) -> Object:
        return {**value, "apiVersion": asked.resource.in_version(asked.version)}

    def _body(self, asked: _Asked) -> Any:
        raw = asked.request.body
        if not raw:
            if asked.method == "DELETE":
                return {}
            raise bad_request("the body of the request is empty")
        try:
            value = json.loads(raw)
        except ValueError:
            try:
                value = yaml.safe_load(raw)
            except yaml.YAMLError as error:
                raise bad_request(f"error decoding the body: {error}") from None
        if isinstance(value, dict) and asked.method != "DELETE" and value.get("apiVersion"):
            given = value["apiVersion"]
            if given != asked.resource.in_version(asked.version):
                wanted = asked.resource.in_version(asked.version)
                raise bad_request(
                    f"the API version in the data ({given}) does not match the expected API version ({wanted})"
                )
            value["apiVersion"] = asked.resource.api_version
        return value

    # ---- watches ----

    async def _watch(self, asked: _Asked, fault: Fault | None) -> web.StreamResponse:
        queue: asyncio.Queue[Change] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(change: Change) -> None:
            if change.resource is asked.resource:
                loop.call_soon_threadsafe(queue.put_nowait, change)

        wanted = asked.selector
        with self._objects.lock:
            given = asked.text("resourceVersion")
            initial: list[Object] = []
            if given in ("", "0") or asked.flag("sendInitialEvents"):
                initial = [each for each in self._objects.of(asked.resource, asked.namespace) if wanted(each)]
                given = str(self._objects.version)
            for change in self._objects.since(asked.resource, int(given), listen):
                queue.put_nowait(change)
        task = asyncio.current_task()
        assert task is not None
        raw = asked.request._raw_request
        assert raw is not None
        self.open_watches[task] = f"{raw.path}?{raw.query_string}"
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
        sender = _Sender(response, fault, self._objects)
        try:
            await response.prepare(raw)
            for each in initial:
                await sender.send("ADDED", self._out(asked, each))
            if asked.flag("sendInitialEvents"):
                await sender.bookmark(asked, self._objects.version, initial=True)
            await self._stream(asked, queue, sender, wanted)
            await response.write_eof()
        except (_Cut, ConnectionError):
            if raw.transport is not None:
                raw.transport.abort()
        except asyncio.CancelledError:
            if raw.transport is not None:
                raw.transport.close()
            raise
        finally:
            self._objects.unlisten(listen)
            self.open_watches.pop(task, None)
        return response

    async def _stream(self, asked: _Asked, queue: asyncio.Queue[Change], sender: _Sender, wanted: Selector) -> None:
        loop = asyncio.get_running_loop()
        seconds = asked.number("timeoutSeconds")
        ends = loop.time() + seconds if seconds else float("inf")
        await sender.begin()
        while not sender.over and loop.time() < ends:
            version = self._objects.version
            try:
                wait = min(self._bookmark_seconds, max(0.0, ends - loop.time()), sender.wait())
                change = await asyncio.wait_for(queue.get(), wait)
            except TimeoutError:
                if asked.flag("allowWatchBookmarks") and queue.empty():
                    await sender.bookmark(asked, version)
                continue
            kind = _seen(change, asked.namespace, wanted)
            if kind:
                await sender.send(kind, self._out(asked, change.object))

    # ---- logs ----

    async def _log(self, asked: _Asked) -> web.StreamResponse:
        pod = self._objects.get("Pod", asked.namespace, asked.name)
        container = self._container(asked, pod)
        state = next(
            (each for each in (pod.get("status") or {}).get("containerStatuses") or () if each["name"] == container), {}
        )
        restart = int(state.get("restartCount", 0)) - (1 if asked.flag("previous") else 0)
        key = (pod["metadata"]["uid"], container, restart)
        if asked.flag("previous") and restart < 0:
            raise bad_request(f'previous terminated container "{container}" in pod "{asked.name}" not found')
        waiting = (state.get("state") or {}).get("waiting") or ({} if state else {"reason": "ContainerCreating"})
        if waiting and not self._logs.known(key):
            reason = waiting.get("reason", "ContainerCreating")
            raise bad_request(f'container "{container}" in pod "{asked.name}" is waiting to start: {reason}')
        shown = Shown(since=self._since(asked), timestamps=asked.flag("timestamps"), limit=asked.number("limitBytes"))
        entries, ended = self._logs.read(key, 0)
        at = len(entries)
        lines = asked.number("tailLines")
        if lines is not None:
            entries = tail(entries, lines)
        raw = asked.request._raw_request
        assert raw is not None
        response = web.StreamResponse(headers={"Content-Type": "text/plain", "Transfer-Encoding": "chunked"})
        await response.prepare(raw)
        try:
            if first := shown.bytes(entries):
                await response.write(first)
            while asked.flag("follow") and not ended and shown.left != 0:
                await asyncio.sleep(_LOOK_S)
                entries, ended = self._logs.read(key, at)
                at += len(entries)
                if part := shown.bytes(entries):
                    await response.write(part)
            await response.write_eof()
        except ConnectionError:
            pass
        return response

    def _container(self, asked: _Asked, pod: Object) -> str:
        spec = pod["spec"]
        names = [each["name"] for each in [*spec["containers"], *spec.get("initContainers", ())]]
        given = asked.text("container")
        if not given and len(names) > 1:
            raise bad_request(
                f"a container name must be specified for pod {asked.name}, choose one of: [{' '.join(names)}]"
            )
        if given and given not in names:
            raise bad_request(f"container {given} is not valid for pod {asked.name}")
        return given or str(names[0])

    def _since(self, asked: _Asked) -> float | None:
        if text := asked.text("sinceTime"):
            return datetime.fromisoformat(text).timestamp()
        seconds = asked.number("sinceSeconds")
        return None if seconds is None else self._objects.clock() - seconds


class _Cut(Exception):
    """The connection is to be cut."""


class _Sender:
    """Sends the events of one watch, and breaks it where a fault says so."""

    def __init__(self, response: web.StreamResponse, fault: Fault | None, objects: Objects) -> None:
        self._response = response
        self._fault = fault
        self._objects = objects
        self._sent = 0
        self._opened = asyncio.get_running_loop().time()
        self.over = False

    @property
    def _breaks(self) -> str:
        return self._fault.kind if self._fault and self._sent >= self._fault.events else ""

    def wait(self) -> float:
        """Seconds until a fault strikes by itself."""
        if self._breaks == "close" and self._fault is not None:
            left = self._fault.seconds - (asyncio.get_running_loop().time() - self._opened)
            self.over = left <= 0
            return max(0.0, left)
        return float("inf")

    async def begin(self) -> None:
        """Strike at once where nothing has to come through before."""
        if self._breaks == "gone":
            await self._gone()
        elif self._breaks == "garbage":
            await self._response.write(b"this is no JSON\n")
            self._fault = None
        elif self._breaks == "close":
            self.wait()

    async def send(self, kind: str, value: Object) -> None:
        """Send an event."""
        if self.over or self._breaks == "mute":
            return
        line = json.dumps({"type": kind, "object": value}, separators=(",", ":")).encode() + b"\n"
        if self._breaks == "half_line":
            await self._response.write(line[: len(line) // 2])
            await asyncio.sleep(0.02)
            raise _Cut
        await self._response.write(line)
        if self._breaks == "duplicate":
            await self._response.write(line)
        if self._breaks == "old":
            await self._older(kind, value)
        self._sent += 1
        if self._fault is not None and self._fault.events:
            await self.begin()

    async def bookmark(self, asked: _Asked, version: int, *, initial: bool = False) -> None:
        """Say up to which version everything was sent."""
        if self.over or self._breaks == "mute":
            return
        metadata: Object = {"resourceVersion": str(version)}
        if initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        value = {
            "kind": asked.resource.kind,
            "apiVersion": asked.resource.in_version(asked.version),
            "metadata": metadata,
        }
        await self._response.write(json.dumps({"type": "BOOKMARK", "object": value}).encode() + b"\n")

    async def _gone(self) -> None:
        status = gone(f"too old resource version: 1 ({self._objects.version})").status
        await self._response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        self.over = True

    async def _older(self, kind: str, value: Object) -> None:
        """Send states of the object that are older than the one just sent, newest first."""
        uid, version = value["metadata"]["uid"], int(value["metadata"]["resourceVersion"])
        for change in reversed(self._objects.history(value["kind"], value["metadata"]["name"])):
            if change.object["metadata"]["uid"] == uid and change.version < version:
                event = {"type": change.type, "object": change.object}
                await self._response.write(json.dumps(event).encode() + b"\n")


# ---- parts ----


def _read(request: Request) -> _Asked | None:
    resource = request.resource
    raw = request._raw_request
    assert raw is not None
    found = re.fullmatch(r"/api/v1/namespaces(?:/([^/]+)(?:/(status|finalize))?)?", raw.path)
    if resource is None or (resource.plural is None and not found):
        return None
    group, plural, namespace, name = resource.group or "", resource.plural or "", request.namespace, request.name
    subresource = request.subresource or ""
    plural = "namespaces" if plural == NAMESPACES else plural
    if found:  # kmock reads these as if they were within a namespace
        plural, namespace, name, subresource = "namespaces", "", found[1] or "", found[2] or ""
    kind = BY_PATH.get((group, plural))
    if kind is None or resource.version not in kind.versions:
        raise Refusal(404, "NotFound", "the server could not find the requested resource")
    return _Asked(
        request=request,
        method=raw.method,
        resource=kind,
        version=str(resource.version),
        namespace=namespace or "",
        name=name or "",
        subresource=subresource,
    )


def _unknown(asked: _Asked) -> str:
    return "strict" if asked.text("fieldValidation") == "Strict" else "warn"


def _seen(change: Change, namespace: str, wanted: Selector) -> str:
    """Return what a change is to a watch that has a selector; empty: nothing."""
    if namespace and change.object["metadata"].get("namespace") != namespace:
        return ""
    now = change.type != "DELETED" and wanted(change.object)
    before = change.before is not None and wanted(change.before)
    return {(True, False): "ADDED", (True, True): "MODIFIED", (False, True): "DELETED"}.get((now, before), "")


def _place(value: Object) -> list[str]:
    return [value["metadata"].get("namespace", ""), value["metadata"]["name"]]


def _list_of(asked: _Asked) -> Object:
    return {"kind": f"{asked.resource.kind}List", "apiVersion": asked.resource.in_version(asked.version)}


def _json(value: Any, code: int, warnings: list[str] | None = None) -> web.Response:
    body = json.dumps(value, separators=(",", ":")).encode()
    answer = web.Response(body=body, status=code, content_type="application/json")
    for each in warnings or ():
        answer.headers.add("Warning", f'299 - "{each}"')
    return answer
