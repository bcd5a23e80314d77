"""A submit whose answer is lost on its way is sent again with its key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from twinstep.cli import client
from twinstep.cli.client import PlaneClient
from twinstep.cli.output import UnreachableError


class Flaky(BaseHTTPRequestHandler):
    """Takes every submit, and answers from the one number `answers_from` on."""

    keys: list[str] = []  # noqa: RUF012  set anew by the fixture
    answers_from = 1

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).keys.append(self.headers["Idempotency-Key"])
        if len(self.keys) < self.answers_from:
            self.close_connection = True
            return
        body = b'{"id": "job-1", "name": "a"}'
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(client, "RETRY_S", (0.01, 0.01))
    Flaky.keys, Flaky.answers_from = [], 1
    server = HTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_lost_answer_is_asked_for_again_with_the_same_key(url: str) -> None:
    Flaky.answers_from = 3
    with PlaneClient(url) as plane:
        assert plane.submit({"name": "a"})["id"] == "job-1"
    assert len(Flaky.keys) == 3
    assert len(set(Flaky.keys)) == 1


def test_each_submit_has_a_key_of_its_own(url: str) -> None:
    with PlaneClient(url) as plane:
        plane.submit({"name": "a"})
        plane.submit({"name": "a"})
    assert len(set(Flaky.keys)) == 2


def test_it_is_given_up_after_a_few_tries(url: str) -> None:
    Flaky.answers_from = 99
    with PlaneClient(url) as plane, pytest.raises(UnreachableError):
        plane.submit({"name": "a"})
    assert len(Flaky.keys) == 3


def test_a_control_plane_that_is_not_there_is_asked_once() -> None:
    with PlaneClient("http://127.0.0.1:9") as plane, pytest.raises(UnreachableError, match="does not answer"):
        plane.submit({"name": "a"})
