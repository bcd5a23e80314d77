"""What the command prints and reads, piece by piece: event streams, clean text, figures, addresses, remote errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from twinstep.cli.client import find_url, problem, sse_lines
from twinstep.cli.follow import Message, parse_sse
from twinstep.cli.live import event_line
from twinstep.cli.output import RemoteError, clean, exit_code, one_line
from twinstep.spec.errors import ConflictError, DataError, SpecError, TrainError, TwinstepError
from twinstep.spec.words import clock, cut, duration, number


def test_an_event_stream_is_read_as_the_standard_says() -> None:
    text = ": hello\nretry: 10\n\nevent: state\nid: 1.2\ndata: {\ndata: }\n\ndata:bare\n\nid: 7\n\ndata\n\n"
    text += "event: lost\ndata: x"
    assert list(parse_sse(text.split("\n"))) == [
        Message(event="state", data="{\n}", id="1.2"),
        Message(event="message", data="bare", id="1.2"),
        Message(event="message", data="", id="7"),
    ]


@given(st.lists(st.text()))
def test_any_lines_at_all_are_read_without_error(lines: list[str]) -> None:
    for message in parse_sse(lines):
        assert "\0" not in message.id


@given(st.text())
def test_cleaned_text_cannot_steer_a_terminal(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned) == len(text)
    assert not any((ord(c) < 0x20 and c not in "\t\n") or 0x7F <= ord(c) < 0xA0 for c in cleaned)
    assert not any(0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 for c in cleaned)
    assert clean(cleaned) == cleaned


@given(st.text(), st.integers(2, 50))
def test_one_line_is_one_line_of_at_most_its_width(text: str, width: int) -> None:
    line = one_line(text, width=width)
    assert len(line) <= width
    assert "\n" not in line


def test_durations_and_figures_read_well() -> None:
    shown = {
        None: "–",
        -3: "0.0 s",
        0.04: "0.0 s",
        9.9: "9.9 s",
        59: "59 s",
        60: "1 min",
        200: "3 min 20 s",
        7500: "2 h 5 min",
    }
    assert {seconds: duration(seconds) for seconds in shown} == shown
    assert [number(value) for value in (None, True, 1234, 0.73456)] == ["–", "–", "1,234", "0.7346"]
    assert [cut(text, 4) for text in ("four", "fives", "")] == ["four", "fiv…", ""]


@given(st.one_of(st.none(), st.text(), st.integers(), st.floats(), st.sampled_from([1e300, -1e300, 2**80])))
def test_a_time_of_any_size_is_shown_or_is_a_dash(at: Any) -> None:
    assert clock(at)
    assert event_line({"time": at, "name": "a"}).endswith("  a: ")
    if isinstance(at, float):
        assert duration(at)


def test_an_event_without_its_parts_still_makes_a_line() -> None:
    assert event_line({}) == "--:--:--  : "
    assert "\x1b" not in event_line({"name": "a\x1b[2J", "reason": "b\nc", "time": 0})


def test_the_address_is_the_one_given_then_the_environment_then_the_file_then_the_default(tmp_path: Path) -> None:
    environ = {"TWINSTEP_DATA_DIR": str(tmp_path)}
    assert find_url(None, environ) == "http://127.0.0.1:8765"
    (tmp_path / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:4000", "pid": 1}))
    assert find_url(None, environ) == "http://127.0.0.1:4000"
    assert find_url(None, environ | {"TWINSTEP_URL": "http://localhost:1/"}) == "http://localhost:1"
    assert find_url("https://x:2", environ) == "https://x:2"
    for broken in ("", "{", "[]", '{"pid": 1}', "\xff"):
        (tmp_path / "server.json").write_text(broken)
        assert find_url(None, environ) == "http://127.0.0.1:8765"


def test_problem_details_become_our_errors_and_anything_else_a_remote_error() -> None:
    def answer(status: int, **content: Any) -> TwinstepError:
        return problem(httpx.Response(status, request=httpx.Request("GET", "http://x/v1/jobs"), **content))

    fault = {"field": "name", "problem": "is bad", "given": "1", "allowed": "", "remedy": "name: a"}
    body = {"code": "invalid_spec", "detail": "spec is not valid", "remedy": "mend", "faults": [fault, 3]}
    error = answer(422, json=body)
    assert isinstance(error, SpecError)
    assert error.faults[0].line() == "name: is bad; given: 1; fix: name: a"
    assert isinstance(answer(409, json={"detail": "x"}), ConflictError)
    large = answer(413, json={"detail": "too large", "code": "too_large"})
    assert (exit_code(large), large.problem) == (2, "too large")
    for status, strange in [(500, {"json": [1]}), (502, {"text": ""}), (404, {"text": "<html>"}), (418, {"json": {}})]:
        assert isinstance(answer(status, **strange), RemoteError)
    assert isinstance(answer(503, json=body), RemoteError)


@given(st.lists(st.text()), st.data())
def test_an_event_streams_lines_end_at_newlines_only_however_it_is_cut(lines: list[str], data: st.DataObject) -> None:
    lines = [line.replace("\n", "").removesuffix("\r") for line in lines]
    text = "".join(line + data.draw(st.sampled_from(["\n", "\r\n"])) for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert list(sse_lines(chunks)) == [line.removesuffix("\r") for line in lines]


def test_exit_codes_tell_failed_work_from_something_to_mend() -> None:
    assert exit_code(TrainError("x", remedy="")) == 1
    assert exit_code(RemoteError("x", remedy="")) == 1
    assert exit_code(DataError("x", remedy="")) == 2
    assert exit_code(SpecError("x", remedy="")) == 2
