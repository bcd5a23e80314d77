"""A submit whose answer is lost on its way is sent again with its key."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from twinstep.cli import client
from twinstep.cli.client import PlaneClient
from twinstep.cli.jobs import submit
from twinstep.cli.output import UnreachableError


class Flaky(BaseHTTPRequestHandler):
    """Takes every submit, and answers from the one number `answers_from` on."""

    keys: list[str] = []  # noqa: RUF012  set anew by the fixture
    answers_from = 1
    body = b'{"id": "job-1", "name": "a"}'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).keys.append(self.headers["Idempotency-Key"])
        if len(self.keys) < self.answers_from:
            self.close_connection = True
            return
        body = self.body
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


def test_what_speaks_against_a_job_that_was_taken_is_printed(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["no kubernetes.queue: pods wait", "preflight: the table\x1b[31m item_id is too large"]
    monkeypatch.setattr(Flaky, "body", json.dumps({"id": "job-1", "name": "a", "warnings": told}).encode())
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: a")
    assert submit(spec, url=url) == 0
    said = capsys.readouterr()
    assert said.out.startswith("submitted a as job-1")
    assert said.err.splitlines()[0] == "warning: no kubernetes.queue: pods wait"
    assert said.err.splitlines()[1].startswith("warning: preflight: the table")
    assert "\x1b" not in said.err
    assert submit(spec, as_json=True, url=url) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["job"]["warnings"], printed.err) == (told, "")


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
