"""Requests that no client of ours sends, written by hand. Each is refused in words, and nothing breaks."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.platform.conftest import settings_in
from twinstep.platform.api.access import ROUTES
from twinstep.platform.server import _Server, assemble
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import parse_spec

DATABASES = ("sqlite",)
WITH_BODY = sorted(
    (method, path) for method, path in ROUTES if method in ("POST", "PUT", "DELETE") and not path.endswith("/reports")
)


def raw(live: Any, request: bytes, *, more: bytes = b"", wait: float = 20) -> bytes:
    """Send bytes; return what comes back until the other side closes, or says no more."""
    port = live.plane.settings.port
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        connection.sendall(request)
        try:
            for _ in range(512):
                if not more:
                    break
                connection.sendall(more)
        except OSError:
            pass  # it has heard enough
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
                head, _, body = found.partition(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if length and len(body) >= int(length[0].split(b":")[1]):
                    break
        except OSError:
            pass
        return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def filled(path: str) -> str:
    return path.replace("{job_id}", "job-0").replace("{project}", "default").replace("{", "").replace("}", "")


@pytest.mark.parametrize(("method", "path"), WITH_BODY, ids=[" ".join(each) for each in WITH_BODY])
def test_a_body_of_a_wrong_type_or_size_is_refused_by_every_route_that_takes_one(
    shared, method: str, path: str
) -> None:
    there = filled(path)
    for kind in (
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "application/xml",
    ):
        answer = shared.http.request(method, there, content=b"a=b", headers={"content-type": kind})
        assert answer.status_code in (404, 415, 422), (kind, answer.text)
    huge = b'"' + b"x" * (2 * 1024 * 1024) + b'"'
    answer = shared.http.request(method, there, content=huge, headers={"content-type": "application/json"})
    assert answer.status_code in (404, 413, 422), answer.text
    for body in (b"\x00", b"\xff\xfe", b"[" * 50_000, b'{"a":1,"a":2}', b"1e999", b"NaN", b'"\\ud800"', b"null", b"[]"):
        answer = shared.http.request(method, there, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 204, 404, 409, 413, 422), (body[:20], answer.text)
        assert answer.status_code in (200, 204) or answer.headers["content-type"] == "application/problem+json"


def test_a_body_without_an_end_is_not_held(shared) -> None:
    """A chunked body that goes on and on is cut off; memory stays what it was."""
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    before = memory()
    answer = raw(shared, head + b"Transfer-Encoding: chunked\r\n\r\n", more=chunk)
    assert status(answer) in (0, 413)  # what it answers may be lost where it closes while more comes
    answer = raw(shared, head + b"Content-Length: 999999999999\r\n\r\n", more=b" " * 65536)
    assert status(answer) in (0, 413)
    assert memory() - before < 64 * 2**20
    assert shared.http.get("/healthz").status_code == 200


def memory() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\n\r\n",
        b"GET http://evil.example/v1/jobs HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nOrigin: http://evil.example\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        b"Content-Length: 30\r\n\r\n{}",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n{}",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/jobs\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(12),
)
def test_what_is_no_request_of_ours_is_refused_or_closed(shared, head: bytes) -> None:
    answer = raw(shared, head, wait=2)
    assert status(answer) == 0 or 400 <= status(answer) < 500, answer[:200]
    assert b"Traceback" not in answer
    assert shared.http.get("/healthz").status_code == 200


def test_two_authorizations_are_none(live, admin) -> None:
    told = f"Authorization: Bearer {admin}\r\n".encode()
    wrong = b"Authorization: Bearer tsp_" + b"x" * 43 + b"\r\n"
    for headers in (told + wrong, wrong + told, told + told):
        answer = raw(live, b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        assert status(answer) == 401, answer[:100]
    for told, code in ((f"Basic {admin}", 401), (f"bearer  {admin}", 200), (admin, 401), (f"Bearer{admin}", 401)):
        assert live.http.get("/v1/jobs", headers={"authorization": told}).status_code == code, told


ODD = [
    "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "%0d%0aX-Injected:%20b", "%ed%a0%80", "%f0%9f%92%a9", "%25", "*",
    "a" * 4000, "job-0%3Fa=b", "job-0%23", "';--", "%22%3E%3Cscript%3E", "%E2%80%AE", "$(id)", "{0}", "%",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_part_of_a_path_is_only_what_is_not_there_on_every_route(live, admin, ask, odd: str) -> None:
    for (method, path), access in ROUTES.items():
        if "{" not in path:
            continue
        there = "/".join(odd if part.startswith("{") else part for part in path.split("/"))
        body = {"json": {"role": "viewer"}} if method == "PUT" else {}
        answer = ask(admin, method, there, **body)
        told = f"{method} {there} -> {answer.status_code} {answer.text[:200]}"
        assert answer.status_code in (404, 405, 409, 422) or access.who == "worker", told
        assert answer.status_code < 500, told
        assert "x-injected" not in answer.headers, told
    assert not list(live.plane.settings.data_dir.parent.glob("etc"))


@pytest.mark.parametrize(
    "name", ["na\r\nX-Injected: b", "\u202eabc", "\u0000", "\ud800", "💩", "<script>", "a" * 10_000]
)
def test_odd_text_in_a_query_or_a_body_comes_back_as_text_or_not_at_all(live, name: str) -> None:
    for params in ({"name": name}, {"q": name}, {"cursor": name}, {"project": name}, {"id_prefix": name}):
        answer = live.http.get("/v1/jobs", params={k: v.encode(errors="surrogatepass") for k, v in params.items()})
        assert answer.status_code in (200, 422), answer.text
        assert "x-injected" not in answer.headers
    for path in ("/v1/jobs", "/v1/tokens", "/v1/projects", "/v1/session"):
        body = json.dumps({"name": name, "user": name, "token": name})
        answer = live.http.post(path, content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, answer.text
        assert "x-injected" not in answer.headers
    assert live.http.get("/v1/audit").status_code == 200


def test_a_token_that_is_none_is_only_wrong(live, admin) -> None:
    for odd in ("x", "tsp_", "tsp_" + "x" * 5000, "\u00e9" * 43, "tsp_" + "%00" * 20, "null", "' OR 1=1 --"):
        answer = live.http.get("/v1/jobs", headers={"authorization": f"Bearer {odd}".encode()})
        assert answer.status_code in (401, 429), odd
        answer = live.http.get("/v1/jobs", headers={"cookie": f"twinstep_session={odd}".encode()})
        assert answer.status_code in (401, 429), odd
    assert live.http.get("/v1/jobs", headers={"authorization": f"Bearer {admin}"}).status_code == 200


def test_slow_senders_keep_nobody_else_waiting(shared) -> None:
    """Forty requests that never end their headers or bodies; others are answered all the while."""
    port, held = shared.plane.settings.port, []
    for number in range(40):
        connection = socket.create_connection(("127.0.0.1", port))
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
        rest = b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{" if number % 2 else b"X: "
        connection.sendall(head + rest)
        held.append(connection)
    answers: list[int] = []

    def reads() -> None:
        with httpx.Client(base_url=shared.http.base_url, timeout=20) as client:
            answers.extend(client.get("/v1/jobs").status_code for _ in range(5))

    threads = [threading.Thread(target=reads) for _ in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 20
    assert time.monotonic() - started < 20
    for connection in held:
        connection.close()


def test_from_afar_headers_have_an_end(tmp_path: Path) -> None:
    """On loopback the quick parser is used, which holds what comes; whoever reaches that can fill the disk as well."""
    kinds = {}
    for host in ("127.0.0.1", "10.255.255.1"):
        plane = assemble(replace(settings_in(tmp_path / host), host=host), pages=False)
        kinds[host] = _Server(plane, lambda url: None).config.http
        plane.close()
    assert kinds == {"127.0.0.1": "auto", "10.255.255.1": "h11"}


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", "a\x00b"], ids=ascii)
@pytest.mark.parametrize("kind", ["application/json", "application/yaml"])
def test_text_that_no_process_and_no_database_takes_is_refused_wherever_a_spec_has_text(
    shared, text: str, kind: str
) -> None:
    tpu = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
    for more in (
        {"name": text},
        {text: 1},
        {"accelerator": text},
        {"accelerator": tpu | {"topology": text}},
        {"compile": {"cache_dir": text}},
        {"compile": {"strategies": [text]}},
        {"data": {"rows": {text: 1}}},
        *({"kubernetes": {field: text}} for field in ("image", "namespace", "queue", "priority", "service_account")),
        *({"kubernetes": {field: {text: "a/b"}}} for field in ("env", "secret_env")),
        *({"kubernetes": {field: {"A": text}}} for field in ("env", "secret_env")),
    ):
        body = json.dumps({"name": "odd", **more})  # with escapes, so that it is YAML too
        for path in ("/v1/jobs", "/v1/jobs:plan"):
            answer = shared.http.post(path, content=body, headers={"content-type": kind})
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), (body, answer.text)
    assert not [job for job in shared.http.get("/v1/jobs").json()["items"] if job["name"] == "odd"]


def test_a_text_of_very_many_values_is_not_read_to_its_end() -> None:
    for text in ("\n".join(f"k{n}: 1" for n in range(20_000)), "[" + "1," * 100_000 + "1]", "{" + "a: [" * 3000):
        with pytest.raises(SpecError) as caught:
            parse_spec(text)
        assert "10,000 it may have" in caught.value.problem or "too deeply" in caught.value.problem
