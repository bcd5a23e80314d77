"""The control plane as the command sees it: find it, ask it, and turn what it answers into data or one of our errors.

Answers stay plain dictionaries, read leniently: an older command must live with a newer control plane.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from twinstep.cli.credentials import find_token
from twinstep.cli.output import RemoteError, UnreachableError
from twinstep.spec.address import web_address
from twinstep.spec.errors import (
    AuthError,
    ConflictError,
    Fault,
    ForbiddenError,
    NotFoundError,
    SpecError,
    TwinstepError,
    UnavailableError,
)

DEFAULT_URL = "http://127.0.0.1:8765"
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
PAGE = 200
RETRY_S = (0.5, 2.0)  # between tries of a submit whose answer did not come

_BY_CODE: dict[str, type[TwinstepError]] = {
    kind.code: kind for kind in (SpecError, NotFoundError, ConflictError, AuthError, ForbiddenError, UnavailableError)
}
_BY_STATUS: dict[int, type[TwinstepError]] = {
    401: AuthError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    422: SpecError,
}


def find_url(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the control plane's address: as given, else TWINSTEP_URL, else what `up` wrote, else the default.

    Raises:
        UnavailableError: what was given is no HTTP address.
    """
    url = given or environ.get("TWINSTEP_URL") or _written_url(environ) or DEFAULT_URL
    if web_address(url) is None:
        raise UnavailableError(
            f"{url!r} is not the address of a control plane", remedy=f"give one of the form {DEFAULT_URL}"
        )
    return url.rstrip("/")


def is_here(url: str, environ: Mapping[str, str]) -> bool:
    """Say whether an address is that of this machine's control plane: the one in DATA_DIR/server.json, if it lives.

    That it is a loopback address does not say so: a tunnel to another machine has one too.
    """
    from twinstep.platform.settings import is_loopback

    try:
        written, asked = urlsplit(_written_url(environ) or ""), urlsplit(url)
        if not all(is_loopback(each.hostname or "") for each in (written, asked)) or written.port != asked.port:
            return False
        pid = int(_written(environ, "pid") or 0)
        if pid > 0:
            os.kill(pid, 0)
    except PermissionError:  # another user's process
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return pid > 0


def _written_url(environ: Mapping[str, str]) -> str | None:
    """Return the address in DATA_DIR/server.json, None where there is none that can be read."""
    return _written(environ, "url")


def _written(environ: Mapping[str, str], key: str) -> str | None:
    """Return what DATA_DIR/server.json has under `key`, None where there is none that can be read."""
    from twinstep.platform.settings import default_data_dir

    try:
        data = json.loads(Path(default_data_dir(environ), "server.json").read_bytes())
        return str(data[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _looked_in(url: str, environ: Mapping[str, str]) -> tuple[Path, bool] | None:
    """Return the data directory by which an address was found, and whether that names it; None where a user did."""
    from twinstep.platform.settings import default_data_dir

    if environ.get("TWINSTEP_URL"):
        return None
    try:
        written, directory = _written_url(environ), default_data_dir(environ)
    except UnavailableError:
        return None
    return (directory, written is not None) if url == (written or DEFAULT_URL).rstrip("/") else None


class PlaneClient:
    """One control plane over HTTP. Use it as a context manager."""

    def __init__(self, url: str, *, token: str | None = None, found: bool = False) -> None:
        """`token` is what to show; None: the one that is found for the address, if any.

        `found`: the address was looked for, and not given by the user.
        """
        self.url = url
        self._found = found
        token = token or find_token(url, os.environ)
        # No proxy from the environment: a control plane on loopback is not the proxy's. No redirect: a token is for
        # the address it was found for.
        self._http = httpx.Client(
            base_url=url,
            timeout=TIMEOUT,
            trust_env=False,
            follow_redirects=False,
            headers={"Authorization": f"Bearer {token}"} if token else None,
        )

    @classmethod
    def of(cls, given: str | None) -> Self:
        """Return the control plane at the address that is given, or found; raises as `find_url` does."""
        return cls(environ_url(given), found=not given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """Return what GET `path` answers, as JSON."""
        return self._ask("GET", path, params=_given(**params))

    def post(self, path: str, body: Any = None) -> Any:
        """Return what POST `path` answers, as JSON."""
        return self._ask("POST", path, json=body)

    def delete(self, path: str) -> None:
        """Ask with DELETE `path`; nothing is answered."""
        self._ask("DELETE", path)

    def ask(self, method: str, path: str, *, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        """Return what a request is answered with, as JSON; None where there is nothing to say."""
        return self._ask(method, path, json=body, params=params)

    def submit(self, spec: Any, *, project: str | None = None) -> dict[str, Any]:
        """Submit a job, once."""
        return self.post_once("/v1/jobs", spec, project=project)

    def post_once(self, path: str, body: Any = None, **params: Any) -> dict[str, Any]:
        """Ask for a job or a run to be made; where the answer is lost on its way, ask again.

        The key that goes with it lets no second one come of that.
        """
        key, job = {"Idempotency-Key": str(uuid.uuid4())}, None
        for wait in (*RETRY_S, None):
            try:
                job = self._ask("POST", path, json=body, headers=key, params=_given(**params))
                break
            except UnreachableError as error:
                if wait is None or isinstance(error.__cause__, httpx.ConnectError):
                    raise
                time.sleep(wait)
        found: dict[str, Any] = job or {}
        return found

    def jobs(self, *, limit: int = PAGE, **only: str | None) -> Iterator[dict[str, Any]]:
        """Yield jobs, newest first, page by page; `only` are filters of `GET /v1/jobs`: state, name, id_prefix."""
        cursor: str | None = None
        while True:
            page = self.get("/v1/jobs", limit=min(limit, PAGE), cursor=cursor, **only)
            yield from page["items"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def job(self, job_id: str) -> dict[str, Any]:
        """Return one job with its spec."""
        answer: dict[str, Any] = self.get(f"/v1/jobs/{quote(job_id, safe='')}")
        return answer

    def runs(self, job_id: str) -> list[dict[str, Any]]:
        """Return a job's runs, first attempt first."""
        found: list[dict[str, Any]] = self.get(f"/v1/jobs/{quote(job_id, safe='')}/runs")["items"]
        return found

    def check_project(self, name: str) -> None:
        """Raise NotFoundError, which names those there are, where the user knows no project of this name."""
        names = [str(each["name"]) for each in self.get("/v1/projects")["items"]]
        if name in names:
            return
        close = get_close_matches(name, names, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        some = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        raise NotFoundError(f"there is no project {name[:63]!r}", remedy=f"{meant}yours are: {some or 'none'}")

    def find(self, ref: str) -> dict[str, Any]:
        """Return the job that `ref` means: an id, the newest job of that name, or the one id it begins.

        Raises:
            NotFoundError: nothing fits, or more than one id begins so.
        """
        if ref.startswith("job-"):
            try:
                return self.job(ref)
            except NotFoundError:
                pass
        for job in self._some(name=ref[:200]):
            if job["name"] == ref:  # newest first, so the first is the newest
                return self.job(job["id"])
        prefix = (ref if "job-".startswith(ref[:4]) else f"job-{ref}")[:64]
        begins = [job["id"] for job in self._some(id_prefix=prefix) if job["id"].startswith(prefix)]
        if len(begins) == 1:
            return self.job(begins[0])
        if begins:
            some = ", ".join(begins[:3]) + (", …" if len(begins) > 3 else "")
            raise NotFoundError(
                f"{ref!r} begins the ids of several jobs: {some}", remedy="give more of the id, or all of it"
            )
        raise NotFoundError(f"no job has the id or the name {ref!r}", remedy="twinstep ls lists them")

    def _some(self, **only: str) -> list[dict[str, Any]]:
        """Return the newest few jobs that fit, in one question."""
        found: list[dict[str, Any]] = self.get("/v1/jobs", limit=4, **only)["items"]
        return found

    @contextmanager
    def stream(self, path: str, *, params: Mapping[str, Any], last_event_id: str = "") -> Iterator[Iterator[str]]:
        """Open a stream of server-sent events and give its lines.

        Raises:
            UnreachableError: the connection cannot be made, or is lost while lines are read.
        """
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        timeout = httpx.Timeout(5.0, read=60.0)  # the server says something every few seconds, if only a comment
        try:
            with self._http.stream("GET", path, params=dict(params), headers=headers, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    raise problem(response)
                yield sse_lines(response.iter_text())
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise problem(response)
        if response.status_code == 204:
            return None
        try:
            return response.json()
        except ValueError:
            raise RemoteError(
                f"{self.url}{path} did not answer with JSON", remedy="is it Twinstep's control plane? check --url"
            ) from None

    def _unreachable(self, error: Exception) -> UnreachableError:
        detail = " ".join(str(error).split()) or type(error).__name__
        if self._found and (looked := _looked_in(self.url, os.environ)) is not None:
            directory, named = looked
            why = f"which its server.json names, does not answer: {detail}"
            if not named:
                why = f"where one is by default, does not answer: {detail}; there is no server.json"
            return UnreachableError(
                f"no control plane is running on {directory}: {self.url}, {why}",
                remedy=f"start one with `twinstep up --data-dir {shlex.quote(str(directory))}`, or name another with "
                "TWINSTEP_DATA_DIR, --url or TWINSTEP_URL",
            )
        return UnreachableError(
            f"the control plane at {self.url} does not answer: {detail}",
            remedy="start one with `twinstep up`, or name another with --url or TWINSTEP_URL",
        )


def _given(**params: Any) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value is not None}


def sse_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of an event stream. Only a newline ends one: JSON may hold U+2028 and U+0085, which end a line
    to str.splitlines and to httpx."""
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def problem(response: httpx.Response) -> TwinstepError:
    """Turn an answer that is an error (RFC 9457 problem details, or anything) into one of our errors."""
    try:
        data = response.json()
    except ValueError:
        data = None
    if not isinstance(data, dict):
        data = {}
    said = data.get("detail")
    if not isinstance(said, str) or not said:
        return RemoteError(
            f"{response.url} answered {response.status_code} {response.reason_phrase}, and not as Twinstep does",
            remedy="is it Twinstep's control plane? check --url",
        )
    if response.status_code >= 500:
        return RemoteError(f"the control plane failed: {said}", remedy=str(data.get("remedy", "")))
    kind = _BY_CODE.get(str(data.get("code", ""))) or _BY_STATUS.get(response.status_code, TwinstepError)
    faults = data.get("faults")
    return kind(
        said,
        remedy=str(data.get("remedy", "")),
        faults=tuple(_fault(item) for item in faults if isinstance(item, dict)) if isinstance(faults, list) else (),
    )


def _fault(item: Mapping[str, Any]) -> Fault:
    keys = ("field", "problem", "given", "allowed", "remedy")
    return Fault(**{key: str(item.get(key, "")) for key in keys})


def environ_url(given: str | None) -> str:
    """Return `find_url` with this process's environment."""
    return find_url(given, os.environ)
