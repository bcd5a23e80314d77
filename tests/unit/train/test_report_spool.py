"""A worker's reports: on disk before they are sent, sent once each, kept while nobody takes them.

The receiver is a real HTTP server with the rule of docs/architecture.md, which can be told to misbehave.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.spec.errors import UnavailableError
from twinstep.spec.report import RunSummary
from twinstep.worker.train import report
from twinstep.worker.train.environment import RunContext
from twinstep.worker.train.report import SpoolReporter
from twinstep.worker.train.spool import Spool, SpoolReader


class Receiver:
    """Stores a record iff it is the next one; `answers` are status codes to give first instead."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.posts: list[list[int]] = []
        self.tokens: set[str] = set()
        self.answers: list[int] = []
        self.lose_answers = 0
        self.odd_answers: list[bytes] = []
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
                if receiver.odd_answers:
                    answer = receiver.odd_answers.pop(0)
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


def test_records_that_the_receiver_has_already_are_not_sent_again_by_a_worker_that_comes_back(
    receiver: Receiver, tmp_path: Path
) -> None:
    reports = reporter(receiver, tmp_path)
    for step in range(1, 3001):
        reports.metric(step, {"loss": 1.0})
    reports.close()
    receiver.posts.clear()
    reports = reporter(receiver, tmp_path)
    reports.metric(3001, {"loss": 1.0})
    reports.close()
    assert receiver.records[-1]["seq"] == 3001
    assert sum(len(post) for post in receiver.posts) <= 1000 + 1


def test_reading_on_costs_what_is_read_and_not_what_was_read_before(tmp_path: Path) -> None:
    path = tmp_path / "spool.jsonl"
    path.write_bytes(b"".join(b'{"seq": %d}\n' % seq for seq in range(1, 1001)))
    content = path.read_bytes()
    reader = SpoolReader(path)
    assert len(reader.after(0, limit=500)) == 500
    reader.after(500, limit=1)
    behind = content.index(b'{"seq": 501}')
    path.write_bytes(b"x" * behind + content[behind:])  # what was read is spoilt: whoever reads it again is found out
    assert [json.loads(line)["seq"] for line in reader.after(500, limit=3)] == [501, 502, 503]
    assert [json.loads(line)["seq"] for line in reader.after(998, limit=9)] == [999, 1000]


@given(acks=st.lists(st.integers(0, 30), max_size=12), limit=st.integers(1, 7))
def test_a_reader_gives_the_records_behind_any_acknowledgement_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, acks: list[int], limit: int
) -> None:
    path = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    path.write_bytes(b"".join(b'{"seq": %d}\n' % seq for seq in range(1, 31)) + b'{"seq": 31')
    reader = SpoolReader(path)
    for acked in acks:
        found = [json.loads(line)["seq"] for line in reader.after(acked, limit=limit)]
        assert found == list(range(acked + 1, min(acked + limit, 30) + 1))


@pytest.mark.parametrize(
    "spoilt", [b'{"kind": "metric", "seq": 3, "ti', b"\x00" * 50, b"garbage\n", b"[1]\n{}\n", b'{"seq": null}\n']
)
def test_what_a_crash_left_behind_the_last_record_is_cut_off(tmp_path: Path, spoilt: bytes) -> None:
    path = tmp_path / "spool.jsonl"
    Spool(path).append("metric", {"step": 1})
    Spool(path).append("metric", {"step": 2})
    whole = path.read_bytes()
    path.write_bytes(whole + spoilt)
    assert Spool(path).append("metric", {"step": 3})
    assert [(record["seq"], record["step"]) for record in spooled(tmp_path)] == [(1, 1), (2, 2), (3, 3)]


# RLIMIT_FSIZE is the one full disk that any machine has: writes stop in the middle of a record, with EFBIG.
FULL_DISK = """
import resource, sys
from pathlib import Path
from twinstep.worker.train.spool import Spool
spool = Spool(Path(sys.argv[1]))
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
written = []
for step in range(1, 31):
    if step == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, most))
    if step == 25:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if spool.append("metric", {"step": step, "values": {"loss": 0.5}}):
        written.append(step)
    assert Path(sys.argv[1]).read_bytes().endswith(b"\\n"), "half a record was left"
spool.close()
print(written)
"""


def test_a_full_disk_costs_the_records_that_did_not_fit_and_leaves_no_gap(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "spool.jsonl")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    *said, written = found.stdout.splitlines()
    steps = json.loads(written)
    assert steps[:4] == [1, 2, 3, 4]
    assert steps[-6:] == [25, 26, 27, 28, 29, 30]
    assert 10 < len(steps) < 30
    records = spooled(tmp_path)
    assert [record["step"] for record in records] == steps
    assert [record["seq"] for record in records] == list(range(1, len(steps) + 1))
    assert [line.split(" (")[0].split(str(tmp_path))[0] for line in said] == [
        "a report cannot be written to ",
        f"{30 - len(steps)} reports could not be written to ",
    ]


FULL_AT_THE_END = """
import resource, sys
from pathlib import Path
from twinstep.spec.report import RunSummary
from twinstep.worker.train.environment import RunContext
from twinstep.worker.train.report import SpoolReporter
directory, room = Path(sys.argv[1]), sys.argv[2] == "room again"
reports = SpoolReporter(RunContext(run_id="run-1", run_dir=directory, api_url="http://127.0.0.1:9", token="x"))
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
reports.metric(1, {"loss": 0.5})
resource.setrlimit(resource.RLIMIT_FSIZE, ((directory / "spool.jsonl").stat().st_size, most))
for step in range(2, 10):
    reports.metric(step, {"loss": 0.5})
numbers = dict.fromkeys(("steps", "examples", "examples_per_s", "compile_s", "train_s", "eval_s", "eval_examples"), 1)
reports.result(RunSummary(backend="eager", final_loss=0.5, auc=0.5, ne=1.0, **numbers))
if room:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
reports.close()
"""


@pytest.mark.parametrize("disk", ["room again", "still full"])
def test_what_a_full_disk_cost_is_reported_and_the_result_is_saved_once_there_is_room(
    tmp_path: Path, disk: str
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FULL_AT_THE_END, str(tmp_path), disk],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    point, *rest = spooled(tmp_path)
    assert (point["seq"], point["step"]) == (1, 1)
    if disk == "still full":
        assert rest == []
        assert "9 reports could not be written to" in found.stdout
        return
    result, lost = rest
    assert (result["kind"], result["seq"], result["summary"]["auc"]) == ("result", 2, 0.5)
    assert (lost["kind"], lost["seq"], lost["name"], lost["data"]) == ("event", 3, "reports_lost", {"count": 8})
    assert "8 reports could not be written to" in found.stdout


def test_a_run_directory_that_is_not_there_costs_the_records_until_it_is(
    receiver: Receiver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "later"
    reports = reporter(receiver, run_dir)
    reports.metric(1, {"loss": 1.0})
    reports.metric(2, {"loss": 1.0})
    run_dir.mkdir()
    reports.metric(3, {"loss": 1.0})
    reports.close()
    point, lost = receiver.records
    assert (point["seq"], point["step"]) == (1, 3)
    assert (lost["seq"], lost["name"], lost["data"]) == (2, "reports_lost", {"count": 2})
    assert "2 reports could not be written" in capsys.readouterr().out


def test_data_that_json_has_no_word_for_is_written_all_the_same(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.jsonl")
    assert spool.append("event", {"data": {"a": math.nan, "b": [math.inf, Path("x")], 3: {"c": {4}}}})
    assert spooled(tmp_path)[0]["data"] == {"a": None, "b": [None, "x"], "3": {"c": "{4}"}}


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"acked": null}', b"no json", b'{"acked": -5}'])
def test_an_answer_that_is_none_is_taken_for_a_server_that_is_away(
    receiver: Receiver, tmp_path: Path, answer: bytes
) -> None:
    receiver.odd_answers = [answer] * 2
    reports = reporter(receiver, tmp_path)
    for step in range(1, 4):
        reports.metric(step, {"loss": 1.0})
    deadline = time.monotonic() + 10
    while receiver.odd_answers and time.monotonic() < deadline:
        time.sleep(0.01)
    reports.metric(4, {"loss": 1.0})
    reports.close()
    assert not receiver.odd_answers
    assert [record["step"] for record in receiver.records] == [1, 2, 3, 4]
