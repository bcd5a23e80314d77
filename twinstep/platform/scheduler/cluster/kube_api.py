"""Requests to a Kubernetes API server: the one place that imports its client. One request, one answer or one error.

The client gives configuration, TLS and credentials; objects go in and out as plain dicts, as the server has them. It
repeats nothing by itself: a create whose answer was lost may have been stored, and whoever asked has to look.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from twinstep.platform.scheduler.cluster.kinds import KINDS, Kind
from twinstep.spec.errors import ConflictError, Fault, NotFoundError, SpecError, UnavailableError

log = logging.getLogger(__name__)

FIELD_MANAGER = "twinstep"
CONNECT_S = 5.0
READ_S = 30.0  # an admission webhook may take ten seconds, and there can be several
MAX_ANSWER = 64 * 1024 * 1024  # bytes of one answer; a page of 500 objects is a few mebibytes
RELOAD_S = 5.0  # credentials are read again at most so often
POOL = 32  # connections that are kept: watches, the log collector, the reconciler

Body: TypeAlias = Mapping[str, Any]
Steps: TypeAlias = Sequence[Mapping[str, Any]]
"""Of a JSON patch."""


class RefusedError(UnavailableError):
    """The API server does not know this control plane, or does not let it do what it needs to.

    It is mended at the cluster, without anything here being done again: so a kind of UnavailableError.
    """


class ExpiredError(UnavailableError):
    """A list or a watch went on from a place that the API server has forgotten (410): list anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """How a cluster is reached."""

    kubeconfig: Path | None = None
    """File with its address and credentials; None: the one that KUBECONFIG names, or ~/.kube/config."""
    context: str | None = None
    """Entry of the kubeconfig; None: its current one."""
    in_cluster: bool = False
    """By the service account of the pod that this process is in."""


@dataclass(slots=True)
class ApiCounts:
    """What was asked so far, for /metrics and for the test that compares it with the table of kinds."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (verb, kind)."""
    errors: Counter[str] = field(default_factory=Counter)
    """By status code; `timeout` and `connection` where there was no answer."""


class KubeApi:
    """One API server. Safe from several threads."""

    def __init__(self, access: Access, *, read_s: float = READ_S) -> None:
        """Read the configuration; nothing is asked of the server yet.

        Args:
            read_s: seconds without a byte after which an answer is given up.

        Raises:
            UnavailableError: there is no such file or context, or it is not valid.
        """
        self.counts = ApiCounts()
        self._access = access
        self._read_s = read_s
        self._lock = threading.Lock()
        self._client: Any = _client(access)
        self._loaded_at = time.monotonic()

    def close(self) -> None:
        """Close the connections that are idle."""
        self._client.close()

    # ---- one object ----

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object; None where it is not there."""
        try:
            return self._json("get", KINDS[kind], KINDS[kind].path(namespace, name))
        except NotFoundError:
            return None

    def create(self, body: Body) -> dict[str, Any]:
        """Create an object, or raise ConflictError where there is one of its name."""
        kind, metadata = KINDS[body["kind"]], body["metadata"]
        return self._json(
            "create", kind, kind.path(metadata["namespace"]), body=body, query={"fieldManager": FIELD_MANAGER}
        )

    def replace(self, body: Body) -> dict[str, Any]:
        """Replace an object, if it is still of the `resourceVersion` in `body`; else raise ConflictError."""
        kind, metadata = KINDS[body["kind"]], body["metadata"]
        return self._json("update", kind, kind.path(metadata["namespace"], metadata["name"]), body=body)

    def apply(self, body: Body, *, force: bool) -> dict[str, Any]:
        """Create or update an object by server-side apply; with `metadata.uid`, only that very one.

        Args:
            force: take over fields that others have set. Without, they are a ConflictError.
        """
        kind, metadata = KINDS[body["kind"]], body["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false", "fieldValidation": "Strict"}
        path = kind.path(metadata["namespace"], metadata["name"])
        if "uid" not in metadata:
            self.counts.requests["create", kind.kind] += 1  # one that is not there yet needs that right as well
        return self._json("patch", kind, path, body=body, query=query, content="application/apply-patch+yaml")

    def merge(self, kind: str, namespace: str, name: str, patch: Body) -> dict[str, Any]:
        """Change fields of an object that is there; with `metadata.uid` in the patch, only of that very one."""
        row = KINDS[kind]
        path = row.path(namespace, name)
        query = {"fieldManager": FIELD_MANAGER}
        return self._json("patch", row, path, body=patch, query=query, content="application/merge-patch+json")

    def amend(self, kind: str, namespace: str, name: str, steps: Steps) -> bool:
        """Change an object by a JSON patch; False where it is not there, or one of the patch's tests fails."""
        row = KINDS[kind]
        query = {"fieldManager": FIELD_MANAGER}
        content = "application/json-patch+json"
        try:
            self._json("patch", row, row.path(namespace, name), body=steps, query=query, content=content)
        except (NotFoundError, SpecError):
            return False
        return True

    def delete(self, kind: str, namespace: str, name: str, *, uid: str) -> bool:
        """Delete what an object of that uid owns, and then itself; False where it is not there (any more).

        It is there as long as its pods are, which may take their time to save where they are: whoever comes after
        them, to go on from there, must not come before they have.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground",
        }
        try:
            self._json("delete", KINDS[kind], KINDS[kind].path(namespace, name), body=options)
        except (NotFoundError, ConflictError):  # gone; or another one has its name by now
            return False
        return True

    def delete_all(self, kind: str, namespace: str, *, selector: str) -> None:
        """Delete every object with those labels; none is no error."""
        self._json("deletecollection", KINDS[kind], KINDS[kind].path(namespace), query={"labelSelector": selector})

    # ---- many ----

    def list(self, kind: str, namespace: str | None, query: Mapping[str, str]) -> dict[str, Any]:
        """Return one page of a list.

        Raises:
            NotFoundError: the cluster has no such kind.
            ExpiredError: the page to go on from is forgotten.
        """
        return self._json("list", KINDS[kind], KINDS[kind].path(namespace), query=query)

    def watch(self, kind: str, namespace: str | None, query: Mapping[str, str], *, silence_s: float) -> Stream:
        """Return the lines of a watch; they end with an UnavailableError where nothing comes for `silence_s`."""
        query = {**query, "watch": "true"}
        return self._open("watch", KINDS[kind], KINDS[kind].path(namespace), query=query, read_s=silence_s)

    def pod_log(self, namespace: str, pod: str, query: Mapping[str, str]) -> Stream:
        """Return the bytes of a container's log. NotFoundError: there is no such pod (any more)."""
        path = KINDS["Pod"].path(namespace, pod, "log")
        return self._open("get", KINDS["PodLog"], path, query=query, accept="*/*")

    # ---- requests ----

    def _json(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        body: Body | Steps | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> dict[str, Any]:
        with self._open(verb, kind, path, body=body, query=query, content=content) as stream:
            data = stream.all()
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.counts.errors["connection"] += 1
            raise UnavailableError(
                f"the API server's answer to {verb} {kind.resource} is no JSON object, or is cut off",
                remedy="it is tried again; see whether a proxy stands before the API server",
            )
        return found

    def _open(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        body: Body | Steps | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
        read_s: float | None = None,
    ) -> Stream:
        """Send one request; return its answer, whose body is still to be read, or raise what it says."""
        if verb not in kind.verbs:
            raise ValueError(f"{verb} {kind.resource} is not in the table of kinds: no role allows it")
        self.counts.requests[verb, kind.kind] += 1
        asked = f"{verb} {kind.resource}"
        for last in (False, True):
            loaded_at = self._loaded_at
            answer = self._send(asked, METHODS[verb], path, body, query or {}, content, accept, read_s or self._read_s)
            if answer.status == 401 and not last and self._reload(loaded_at):
                answer.close()  # whoever is not known has changed nothing: this may be sent again
                continue
            break
        stream = Stream(self, asked, answer)
        if 200 <= answer.status < 300:
            return stream
        self.counts.errors[str(answer.status)] += 1
        with stream:
            text = stream.all()
        raise refusal(answer.status, _status_object(text), verb=verb, kind=kind, path=path)

    def _send(
        self,
        asked: str,
        method: str,
        path: str,
        body: Body | Steps | None,
        query: Mapping[str, str],
        content: str,
        accept: str,
        read_s: float,
    ) -> Any:
        headers = {"Accept": accept, **({"Content-Type": content} if body is not None else {})}
        try:
            with self._lock:  # credentials may be refreshed here, and written into the one configuration
                client = self._client
                request = client.param_serialize(
                    method,
                    path,
                    query_params=list(query.items()),
                    header_params=headers,
                    body=dict(body) if isinstance(body, Mapping) else body,
                    auth_settings=["BearerToken"],
                )
            return client.call_api(*request, _request_timeout=(CONNECT_S, read_s)).response
        except Exception as error:
            raise self.lost(asked, error) from error

    def lost(self, asked: str, error: Exception) -> UnavailableError:
        """Return what is told where a request got no answer, or only the beginning of one."""
        timeout = "timeout" in type(error).__name__.lower() or isinstance(error, TimeoutError)
        self.counts.errors["timeout" if timeout else "connection"] += 1
        problem = "did not answer in time" if timeout else f"cannot be reached: {' '.join(str(error).split())[:300]}"
        return UnavailableError(
            f"the API server {problem} ({asked})",
            remedy="it is tried again; see that the cluster is up and that its address and credentials are right",
        )

    def _reload(self, loaded_at: float) -> bool:
        """Read the credentials anew, once for all who found the old ones refused; False: they are new already."""
        with self._lock:
            if self._loaded_at != loaded_at:
                return True
            if time.monotonic() - self._loaded_at < RELOAD_S:
                return False
            self._loaded_at = time.monotonic()
            try:
                # The old one is not closed: its watches go on until they end.
                self._client = _client(self._access)
            except UnavailableError as error:
                log.warning("the cluster's credentials are refused, and cannot be read again: %s", error)
                return False
            return True


class Stream:
    """The body of an answer. Close it; one that was not read to its end costs its connection."""

    def __init__(self, api: KubeApi, asked: str, response: Any) -> None:
        self._api = api
        self._asked = asked
        self._response = response
        self._whole = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, most: int = 65536) -> bytes:
        """Return the bytes that have come, `most` at most; empty at the end.

        Raises:
            UnavailableError: nothing came for too long, or the connection broke.
        """
        try:
            data: bytes = self._response.read1(most)
        except Exception as error:
            raise self._api.lost(self._asked, error) from error
        self._whole = self._whole or not data
        return data

    def __iter__(self) -> Iterator[bytes]:
        """Yield the body as it comes."""
        while data := self.read():
            yield data

    def all(self) -> bytes:
        """Return the whole body, or raise UnavailableError."""
        parts, length = [], 0
        for data in self:
            parts.append(data)
            length += len(data)
            if length > MAX_ANSWER:
                raise UnavailableError(
                    f"the API server's answer to {self._asked} has more than {MAX_ANSWER >> 20} MiB",
                    remedy="look for a huge object among those of the run",
                )
        return b"".join(parts)

    def break_off(self) -> None:
        """End a read that waits in another thread."""
        with contextlib.suppress(Exception):
            self._response.connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back, or close it where there is more to come."""
        if not self._whole:
            self._response.close()
        self._response.release_conn()


METHODS: Mapping[str, str] = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}
"""HTTP's word for each verb of a Role."""


def _client(access: Access) -> Any:
    from kubernetes import client  # late: it is a large package, and most control planes have no cluster
    from kubernetes.config.config_exception import ConfigException

    config: Any = importlib.import_module("kubernetes.config")  # which has no types

    settings = type.__call__(client.Configuration)  # a new one; calling it would copy a default of the process
    file = None if access.kubeconfig is None else str(access.kubeconfig)
    settings.retries = False  # urllib3 would send a request thrice, and hide that it did
    settings.connection_pool_maxsize = POOL
    try:
        if access.in_cluster:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(file, context=access.context, client_configuration=settings, persist_config=False)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        where = "the pod's service account" if access.in_cluster else access.kubeconfig or "the default kubeconfig"
        raise UnavailableError(
            f"the cluster's configuration in {where} cannot be used: {' '.join(str(error).split())[:300]}",
            remedy="run in a pod with a mounted service account token, or give a kubeconfig"
            if access.in_cluster
            else "give a kubeconfig that `kubectl --kubeconfig FILE --context NAME get jobsets` works with",
        ) from None
    found = client.ApiClient(configuration=settings)
    found.user_agent = "twinstep"
    return found


def _status_object(text: bytes) -> Body:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": text[:300].decode("utf-8", errors="replace").strip()}


def refusal(code: int, status: Body, *, verb: str, kind: Kind, path: str) -> Exception:
    """Return the error that an API server's answer is."""
    message = str(status.get("message") or http.client.responses.get(code, ""))[:1000]
    asked = f"{verb} {kind.resource}"
    # Server-side apply of a field that the kind does not have is a 500 without a reason, and will stay one.
    if code in (400, 413, 422) or (code == 500 and "field not declared in schema" in message):
        faults = tuple(
            Fault(field=str(cause.get("field") or ""), problem=str(cause.get("message") or cause.get("reason") or ""))
            for cause in ((status.get("details") or {}).get("causes") or ())
        )
        return SpecError(
            f"the cluster refuses the {kind.kind}: {message}",
            remedy="mend the field it names; where the spec does not set it, the cluster's version may not fit",
            faults=faults,
        )
    if code in (401, 403):
        namespace = path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in path else ""
        where = f" in namespace {namespace}" if namespace else " in all namespaces"
        return RefusedError(
            f"the cluster does not know this control plane's credentials ({asked}): {message}"
            if code == 401
            else f"the cluster does not let this control plane {asked}{where}: {message}",
            remedy="renew the credentials in the kubeconfig, or the service account's token"
            if code == 401
            else f"allow its role the verb {verb} on {kind.resource}, or see what the message names (quota, policy)",
        )
    if code == 404:
        return NotFoundError(
            f"the cluster has no such object or kind ({asked}): {message}",
            remedy=f"install what defines {kind.resource}, or make the namespace, where it is missing",
        )
    if code == 409:
        return ConflictError(
            f"the cluster has the {kind.kind} otherwise ({asked}): {message}",
            remedy="look at the object: somebody else made or changed it",
        )
    if code == 410:
        return ExpiredError(f"the API server forgot where {asked} was: {message}", remedy="it is listed anew")
    return UnavailableError(
        f"the API server answered {code} to {asked}: {message}",
        remedy="it is tried again; if it stays so, see the API server's own log",
    )
