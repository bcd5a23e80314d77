"""Logs of runs in a cluster, as stored: each line once, bounded, readable from any byte, on SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinstep.platform.store.logs import Logs, LogSource, Place, cut_character
from twinstep.platform.store.records import LogFilter
from twinstep.platform.store.store import Store
from twinstep.spec.parse import validate_spec

TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}


@pytest.fixture
def run_id(store: Store) -> str:
    return store.create_job(validate_spec({"name": "a", "accelerator": TPU})).run_id


@pytest.fixture
def logs(store: Store) -> Logs:
    return Logs(store.database, store.changes)


def source(run_id: str, number: int = 0, **more: object) -> LogSource:
    given = {"host": number, "slice": 0, "restart": 0, "role": "worker", **more}
    return LogSource(run_id=run_id, pod_uid=f"u{number}", container="worker", pod=f"p{number}", **given)  # type: ignore[arg-type]


def opened(logs: Logs, wanted: LogSource) -> LogSource:
    found = logs.open(wanted)
    assert found is not None
    return found


def write(logs: Logs, at: LogSource, data: bytes) -> LogSource:
    found = logs.append(at, data, replace(at.place, time="t", count=at.place.count + len(data)))
    assert found is not None
    return found


def whole(logs: Logs, run_id: str, wanted: LogFilter = LogFilter(), limit: int = 1 << 20) -> str:  # noqa: B008
    text, offset = "", 0
    while True:
        part = logs.log(run_id).read_log(offset=offset, limit=limit, wanted=wanted)
        assert sum(span.length for span in part.spans) == len(part.text)
        text += part.text
        if part.next_offset == part.offset:
            assert part.size == offset
            return text
        offset = part.next_offset


def test_a_log_is_read_back_with_whose_it_is(logs: Logs, run_id: str) -> None:
    first = write(logs, opened(logs, source(run_id, 0)), b"one\n")
    write(logs, opened(logs, source(run_id, 1)), "zwei é\r\n".encode())
    write(logs, first, b"three")
    part = logs.log(run_id).read_log()
    assert part.text == "one\nzwei é\r\nthree"
    assert [(span.host, span.pod, span.length) for span in part.spans] == [
        (0, "p0", 4), (1, "p1", 8), (0, "p0", 5)
    ]  # fmt: skip
    assert whole(logs, run_id, LogFilter(host=0)) == "one\nthree"
    assert whole(logs, run_id, LogFilter(slice=1)) == ""


def test_where_a_source_was_read_up_to_is_stored_with_what_was_read(logs: Logs, run_id: str) -> None:
    at = opened(logs, source(run_id))
    write(logs, at, b"one\n")
    assert opened(logs, source(run_id)).place == Place(time="t", count=4)
    assert logs.append(at, b"one\n", Place(time="t", count=4)) is None  # read twice: another collector was quicker
    assert whole(logs, run_id) == "one\n"


def test_two_collectors_at_once_store_every_line_once(logs: Logs, run_id: str) -> None:
    lines = [f"{number}\n".encode() for number in range(60)]

    def collect() -> None:
        while True:
            at = opened(logs, source(run_id))
            if at.place.count == len(lines):
                return
            data = lines[at.place.count]
            logs.append(at, data, replace(at.place, time="t", count=at.place.count + 1))

    threads = [threading.Thread(target=collect) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole(logs, run_id) == "".join(line.decode() for line in lines)


def test_a_run_that_is_not_here_has_no_source(logs: Logs) -> None:
    assert logs.open(source("elsewhere")) is None


def test_a_restart_is_told_once_between_the_lines(logs: Logs, run_id: str) -> None:
    write(logs, opened(logs, source(run_id, 0)), b"a\n")
    write(logs, opened(logs, source(run_id, 1, restart=1)), b"b\n")
    write(logs, opened(logs, source(run_id, 2, restart=1)), b"c\n")
    assert whole(logs, run_id) == "a\n--- restart 1 ---\nb\nc\n"
    assert whole(logs, run_id, LogFilter(restart=1)) == "b\nc\n"


def test_workers_without_a_number_are_numbered_in_each_restart(logs: Logs, run_id: str) -> None:
    made = [opened(logs, source(run_id, number, host=None, restart=number // 2)) for number in range(4)]
    assert [each.host for each in made] == [0, 1, 0, 1]
    assert opened(logs, source(run_id, 9, host=None, role="head")).host is None
    assert opened(logs, source(run_id, 1, host=None)).host == 1


def test_of_a_long_log_the_beginning_and_the_end_are_kept(store: Store, run_id: str) -> None:
    logs = Logs(store.database, store.changes, keep_bytes=20_000)
    at = opened(logs, source(run_id))
    lines = [f"line {number:05}\n" for number in range(10_000)]
    middle = 0
    for begin in range(0, len(lines), 50):
        at = write(logs, at, "".join(lines[begin : begin + 50]).encode())
        if begin == 300:
            middle = logs.log(run_id).read_log().next_offset
    text = whole(logs, run_id)
    shown = text.splitlines()
    assert shown[0] == "line 00000"
    assert shown[-1] == "line 09999"
    (said,) = [line for line in shown if "not kept" in line]
    dropped = sum(map(len, lines)) - (len(text) - len(said) - 1)
    assert said == f"[{dropped:,} bytes of the log are not kept]"
    assert logs.dropped_bytes() == dropped
    assert 12_000 < len(text) < 21_000
    resumed = logs.log(run_id).read_log(offset=middle)  # from before: what it pointed to is gone
    assert resumed.text.splitlines()[-1] == "line 09999"
    assert logs.log(run_id).tail(3).text == "line 09997\nline 09998\nline 09999\n"


def test_one_line_of_a_mebibyte_is_kept_whole(logs: Logs, run_id: str) -> None:
    line = ("é" * 524_288 + "\n").encode()
    write(logs, opened(logs, source(run_id)), line)
    assert whole(logs, run_id, limit=100_001) == line.decode()


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 50])
def test_the_last_lines(logs: Logs, run_id: str, lines: int) -> None:
    first = write(logs, opened(logs, source(run_id, 0)), b"a\nb\n")
    second = write(logs, opened(logs, source(run_id, 1)), b"c\nd\n")
    write(logs, first, b"e\nf")
    assert second.host == 1
    every = ["a\n", "b\n", "c\n", "d\n", "e\n", "f"]
    assert logs.log(run_id).tail(lines).text == "".join(every[len(every) - min(lines, 6) :])
    assert logs.log(run_id).tail(lines, wanted=LogFilter(host=1)).text == "".join(
        ["c\n", "d\n"][-lines:] if lines else []
    )
    assert logs.log(run_id).last_line() == "f"


def test_an_empty_log_is_one(logs: Logs, run_id: str) -> None:
    part = logs.log(run_id).read_log(offset=10**9)
    assert (part.offset, part.next_offset, part.size, part.text) == (0, 0, 0, "")
    assert logs.log(run_id).tail(5).text == ""
    assert logs.log(run_id).last_line() == ""


def test_followers_are_told(logs: Logs, store: Store, run_id: str) -> None:
    job_id = store.run(run_id).job_id
    before = store.changes.count(job_id)
    write(logs, opened(logs, source(run_id)), b"a\n")
    assert store.changes.count(job_id) != before


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=200)), max_size=12), st.integers(4, 300), st.data())
def test_reading_in_any_steps_gives_the_same_bytes(
    store: Store, written: list[tuple[int, bytes]], limit: int, data: st.DataObject
) -> None:
    logs = Logs(store.database, store.changes)
    run_id = store.create_job(validate_spec({"name": "a", "accelerator": TPU})).run_id
    wrote: dict[int, bytes] = {}
    for host, chunk in written:
        chunk = chunk[: len(chunk) - cut_character(chunk)]
        write(logs, opened(logs, source(run_id, host)), chunk)
        wrote[host] = wrote.get(host, b"") + chunk
    host = data.draw(st.sampled_from([None, 0, 1, 2]))
    text = whole(logs, run_id, LogFilter(host=host), limit=limit)
    if host is not None and wrote.get(host, b"").isascii():
        assert text == wrote.get(host, b"").decode()
    elif host is not None:
        assert text.count("\n") == wrote[host].count(b"\n")
