"""A worker's reports: on disk before they are sent, sent once each, kept while nobody takes them.

The receiver is a real HTTP server with the rule of docs/architecture.md, which can be told to misbehave.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from twinstep.spec.errors import UnavailableError
from twinstep.spec.report import RunSummary
from twinstep.worker.train import report
from twinstep.worker.train.environment import RunContext
from twinstep.worker.train.report import SpoolReporter


class Receiver:
    """Stores a record iff it is the next one; `answers` are status codes to give first instead."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.posts: list[list[int]] = []
        self.tokens: set[str] = set()
        self.answers: list[int] = []
        self.lose_answers = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.tokens.add(self.headers["Authorization"])
                if receiver.answers and (code := receiver.answers.pop(0)) != 200:
                    self.send_error(code)
                    return
                receiver.posts.append([record["seq"] for record in body["records"]])
                for record in body["records"]:
                    if record["seq"] == len(receiver.records) + 1:
                        receiver.records.append(record)
                if receiver.lose_answers:
                    receiver.lose_answers -= 1
                    self.close_connection = True
                    return
                answer = json.dumps({"acked": len(receiver.records)}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._handler = Handler
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self._serve()

    def _serve(self) -> None:
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def start_again(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self._serve()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(report, "SEND_EVERY", 0.01)
    monkeypatch.setattr(report, "FIRST_WAIT", 0.02)
    found = Receiver()
    yield found
    found.stop()


def reporter(receiver: Receiver, run_dir: Path) -> SpoolReporter:
    url = f"http://127.0.0.1:{receiver.port}"
    return SpoolReporter(RunContext(run_id="run-1", run_dir=run_dir, api_url=url, token="secret-token"))


def spooled(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "spool.jsonl").read_text().splitlines()]


def test_every_kind_of_record_arrives_once_in_order(receiver: Receiver, tmp_path: Path) -> None:
    reports = reporter(receiver, tmp_path)
    reports.event("started", "worker started", {"pid": 1})
    for step in range(1, 300):
        reports.metric(step, {"loss": 1 / step})
        if step % 100 == 0:
            reports.progress("training", step, 300, examples_per_s=1.0, eta_s=2.0)
    reports.result(
        RunSummary(
            backend="eager",
            steps=1,
            examples=1,
            examples_per_s=1,
            compile_s=0,
            train_s=1,
            eval_s=1,
            final_loss=None,
            auc=None,
            ne=None,
            eval_examples=0,
        )
    )
    reports.close()
    assert [record["seq"] for record in receiver.records] == list(range(1, len(receiver.records) + 1))
    assert receiver.records == spooled(tmp_path)
    assert [record["kind"] for record in receiver.records if record["kind"] != "metric"] == [
        "event", "progress", "progress", "result",
    ]  # fmt: skip
    assert receiver.tokens == {"Bearer secret-token"}
    assert len(receiver.posts) < 100, "records go in batches"


def test_what_is_not_finite_is_null_and_a_long_reason_is_cut(receiver: Receiver, tmp_path: Path) -> None:
    reports = reporter(receiver, tmp_path)
    reports.metric(1, {"loss": math.nan, "auc": None, "step_ms": math.inf})
    reports.event("failed", "x" * 100_000)
    reports.close()
    assert receiver.records[0]["values"] == {"loss": None, "auc": None, "step_ms": None}
    assert len(receiver.records[1]["reason"]) == 4096


def test_a_control_plane_that_comes_back_gets_everything(receiver: Receiver, tmp_path: Path) -> None:
    reports = reporter(receiver, tmp_path)
    reports.metric(1, {"loss": 1.0})
    deadline = time.monotonic() + 10
    while not receiver.records and time.monotonic() < deadline:
        time.sleep(0.01)
    receiver.stop()
    for step in range(2, 50):
        reports.metric(step, {"loss": 1.0})
    time.sleep(0.1)
    receiver.start_again()
    reports.metric(50, {"loss": 1.0})
    reports.close()
    assert [record["step"] for record in receiver.records] == list(range(1, 51))


def test_an_answer_that_was_lost_doubles_nothing(receiver: Receiver, tmp_path: Path) -> None:
    receiver.lose_answers = 2
    receiver.answers = [200, 500, 429]
    reports = reporter(receiver, tmp_path)
    for step in range(1, 20):
        reports.metric(step, {"loss": 1.0})
    reports.close()
    assert [record["step"] for record in receiver.records] == list(range(1, 20))
    assert sum(len(post) for post in receiver.posts) > 19, "something was sent again"


def test_without_a_control_plane_the_run_goes_on_and_its_spool_keeps_all(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LAST_TRY", 0.2)
    receiver.stop()
    reports = reporter(receiver, tmp_path)
    for step in range(1, 11):
        reports.metric(step, {"loss": 1.0})
    started = time.monotonic()
    reports.close()
    assert time.monotonic() - started < 5
    assert [record["step"] for record in spooled(tmp_path)] == list(range(1, 11))
    receiver.start_again()


def test_a_worker_that_comes_back_counts_on_behind_a_half_written_line(receiver: Receiver, tmp_path: Path) -> None:
    reports = reporter(receiver, tmp_path)
    reports.metric(1, {"loss": 1.0})
    reports.metric(2, {"loss": 1.0})
    reports.close()
    with (tmp_path / "spool.jsonl").open("a") as spool:
        spool.write('{"kind": "metric", "seq": 3, "ti')
    reports = reporter(receiver, tmp_path)
    reports.metric(3, {"loss": 1.0})
    reports.close()
    assert [(record["seq"], record["step"]) for record in receiver.records] == [(1, 1), (2, 2), (3, 3)]


def test_a_receiver_that_lost_records_is_sent_them_again(receiver: Receiver, tmp_path: Path) -> None:
    reports = reporter(receiver, tmp_path)
    for step in range(1, 6):
        reports.metric(step, {"loss": 1.0})
    deadline = time.monotonic() + 10
    while len(receiver.records) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    del receiver.records[2:]  # restored from an older copy
    reports.metric(6, {"loss": 1.0})
    reports.close()
    assert [record["step"] for record in receiver.records] == list(range(1, 7))


@pytest.mark.parametrize("code", [401, 404, 422])
def test_a_refusal_ends_the_sending_and_not_the_run(
    receiver: Receiver, tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.answers = [code] * 100
    reports = reporter(receiver, tmp_path)
    reports.metric(1, {"loss": 1.0})
    reports.close()
    assert len(receiver.answers) == 99
    said = capsys.readouterr().out
    assert str(code) in said
    assert "secret-token" not in said
    assert len(spooled(tmp_path)) == 1


def test_half_an_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunContext.from_environment() is None
    monkeypatch.setenv("TWINSTEP_RUN_ID", "run-1")
    with pytest.raises(UnavailableError, match="TWINSTEP_RUN_TOKEN"):
        RunContext.from_environment()
