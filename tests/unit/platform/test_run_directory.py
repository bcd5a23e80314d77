"""A run's log and spool, read while they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.platform.scheduler.rundir import RunDir
from twinstep.spec.job import JobSpec


@pytest.fixture
def directory(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path, "run-a")
    directory.prepare(JobSpec(name="a-job"))
    return directory


def read_all(directory: RunDir, *, limit: int) -> str:
    text, offset = "", 0
    while True:
        part = directory.read_log(offset=offset, limit=limit, final=True)
        text += part.text
        if part.next_offset == offset:
            return text
        offset = part.next_offset


@given(text=st.text(st.characters(codec="utf-8"), max_size=200), limit=st.integers(4, 40))
@settings(max_examples=60, deadline=None)
def test_a_log_read_in_pieces_is_the_log(tmp_path_factory, text: str, limit: int) -> None:
    directory = RunDir(tmp_path_factory.mktemp("runs"), "run-a")
    directory.path.mkdir()
    directory.log_path.write_bytes(text.encode())
    assert read_all(directory, limit=limit) == text


@given(data=st.binary(max_size=200), limit=st.integers(4, 40))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_read_to_their_end(tmp_path_factory, data: bytes, limit: int) -> None:
    directory = RunDir(tmp_path_factory.mktemp("runs"), "run-a")
    directory.path.mkdir()
    directory.log_path.write_bytes(data)
    text = read_all(directory, limit=limit)
    if all(byte < 128 for byte in data):
        assert text == data.decode()


def test_half_a_character_waits_for_its_other_half(directory: RunDir) -> None:
    directory.log_path.write_bytes("half a line é".encode()[:-1])
    part = directory.read_log()
    assert part.text == "half a line "
    directory.log_path.write_bytes("half a line é!".encode())
    assert directory.read_log(offset=part.next_offset).text == "é!"


def test_half_a_character_at_the_end_of_a_finished_log_is_shown_as_replaced(directory: RunDir) -> None:
    directory.log_path.write_bytes(b"end \xc3")
    assert directory.read_log(final=True).text == "end \ufffd"


def test_bytes_that_are_not_utf_8_are_replaced(directory: RunDir) -> None:
    directory.log_path.write_bytes(b"a\xff\xfeb\n")
    assert directory.read_log().text == "a\ufffd\ufffdb\n"


@pytest.mark.parametrize("offset", [0, 3, 4, 30, 60])
def test_the_runs_token_is_never_shown_wherever_a_read_begins_or_ends(directory: RunDir, offset: int) -> None:
    token = directory.token()
    directory.log_path.write_text(f"abc {token} xyz")
    shown = directory.read_log(offset=offset, limit=20).text
    assert not any(token[i : i + 4] in shown for i in range(len(token) - 4))
    assert token not in directory.tail(5).text


def test_an_offset_past_the_end_reads_nothing_and_comes_back_to_the_end(directory: RunDir) -> None:
    directory.log_path.write_text("short")
    part = directory.read_log(offset=10**12)
    assert (part.text, part.next_offset) == ("", 5)


def test_a_log_that_is_not_there_is_empty(directory: RunDir) -> None:
    assert directory.read_log().text == ""
    assert directory.tail(10).text == ""
    assert directory.last_line() == ""


def test_the_last_lines_of_a_huge_log_are_found_without_reading_it_all(directory: RunDir) -> None:
    with directory.log_path.open("wb") as file:
        file.truncate(3 * 2**30)
        file.seek(0, 2)
        file.write(b"\none\ntwo\nthree")
    part = directory.tail(2)
    assert part.text == "two\nthree"
    assert part.next_offset == part.size


def test_the_last_line_is_the_last_that_says_something(directory: RunDir) -> None:
    directory.log_path.write_text("step 1\nValueError: the tables do not fit\n\n-----\n  \n")
    assert directory.last_line() == "ValueError: the tables do not fit"


def test_a_spool_is_read_past_torn_lines_from_the_next_record_on(directory: RunDir) -> None:
    def line(seq: int) -> str:
        return json.dumps({"kind": "metric", "seq": seq, "time": 0, "step": seq, "values": {"loss": 1}})

    (directory.path / "spool.jsonl").write_text(
        "\n".join([line(1), line(2), '{"kind": "metric", "se', "\0\0\0", line(3), line(4)[:20]])
    )
    assert [record.seq for batch, _ in directory.spool(after=1) for record in batch] == [2, 3]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 60)), max_size=8))
@settings(max_examples=25, deadline=None)
def test_a_spool_that_grows_is_read_in_pieces_each_line_once_wherever_it_was_cut(tmp_path_factory, growth) -> None:
    directory = RunDir(tmp_path_factory.mktemp("runs"), "run-a")
    directory.path.mkdir()
    lines = [
        json.dumps({"kind": "event", "seq": seq, "time": 0, "name": "é", "reason": "x" * (seq % 9)}) + "\n"
        for seq in range(1, 1 + sum(count for count, _ in growth))
    ]
    whole, told, written, offset, seen = "".join(lines).encode(), 0, 0, 0, []
    for count, torn in [*growth, (0, 0)]:
        told += count
        end = len("".join(lines[:told]).encode())
        end = max(written, end - torn) if (count, torn) != (0, 0) else end
        with (directory.path / "spool.jsonl").open("ab") as file:
            file.write(whole[written:end])
        written = end
        found = list(directory.spool(after=0, offset=offset))
        seen += [record.seq for batch, _ in found for record in batch]
        offset = found[-1][1]
    assert seen == list(range(1, len(lines) + 1))
    assert offset == len(whole)


def test_a_spool_of_many_records_comes_in_batches(directory: RunDir) -> None:
    with (directory.path / "spool.jsonl").open("w") as file:
        for seq in range(1, 2502):
            file.write(json.dumps({"kind": "metric", "seq": seq, "time": 0, "step": seq, "values": {}}) + "\n")
    assert [len(batch) for batch, _ in directory.spool(after=0)] == [1000, 1000, 501]


def test_a_spool_that_is_not_there_holds_nothing(directory: RunDir) -> None:
    assert list(directory.spool(after=0)) == []
