"""A container's log is read once, byte for byte, wherever its reading breaks off and however its times fall."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.platform.scheduler.cluster.log_lines import LogReader, since

Line = tuple[int, bytes]
"""(time in nanoseconds, text)."""


def stamp(when: int) -> str:
    fraction = f"{when % 10**9:09d}".rstrip("0")
    return f"2026-01-01T00:00:{when // 10**9:02d}{'.' + fraction if fraction else ''}Z"


def answer(lines: list[Line], from_time: str) -> bytes:
    """What the kubelet sends of a log: whole seconds are all that `sinceTime` tells apart."""
    begin = since(from_time)[:19] if from_time else ""
    shown = [(stamp(when), text) for when, text in lines]
    return b"".join(time.encode() + b" " + text for time, text in shown if time[:19] >= begin)


texts = st.one_of(
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")),
    st.sampled_from([b"", b"2026-01-01T00:00:09Z is text", b"\r", b"a\r", "é€😀".encode(), b"\xff\xfe", b"x" * 5000]),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Line]:
    """Lines whose times only grow, many at one moment; the last may have no end."""
    steps = draw(st.lists(st.tuples(st.sampled_from([0, 0, 1, 100, 10**8, 10**9]), texts), min_size=1, max_size=12))
    now, lines = 0, []
    for step, text in steps:
        now += step
        lines.append((now, text + b"\n"))
    if draw(st.booleans()):
        now, text = lines[-1]
        lines[-1] = (now, text[:-1])
    return lines


@settings(max_examples=100, deadline=None)
@given(logs(), st.randoms(use_true_random=False))
def test_however_it_is_cut_every_byte_comes_once(lines: list[Line], chance: object) -> None:
    draw = chance.randrange  # type: ignore[attr-defined]
    wanted = b"".join(text for _, text in lines)
    got, time, count = b"", "", 0
    for _ in range(100):
        written = lines if draw(3) else lines[: draw(len(lines) + 1)]  # what comes later is not there yet
        data = answer(written, time)
        broken = draw(2)
        data = data[: draw(len(data) + 1)] if broken else data
        reader = LogReader(time, count)
        while data:
            size = 1 + draw(50)
            got += reader.take(data[:size])
            data = data[size:]
        if not broken:
            got += reader.rest()
        time, count = reader.time, reader.count
        assert wanted.startswith(got)
    reader = LogReader(time, count)
    got += reader.take(answer(lines, time)) + reader.rest()
    assert got == wanted


def test_the_end_of_the_last_whole_line_is_a_place_too() -> None:
    lines = [(1, b"one\n"), (1, b"two\n"), (2, b"half")]
    reader = LogReader()
    assert reader.take(answer(lines, "")) + reader.rest() == b"one\ntwo\nhalf"
    again = LogReader(*reader.line_end)
    assert again.take(answer([*lines[:2], (2, b"half and whole\n")], reader.line_end[0])) == b"half and whole\n"


def test_a_line_without_a_time_belongs_to_what_came_before() -> None:
    odd = b"unable to retrieve container logs for containerd://x\n"
    reader = LogReader()
    assert reader.take(odd) == odd
    again = LogReader(reader.time, reader.count)
    assert again.take(odd + b"2026-01-01T00:00:01Z a\nno time\n") == b"a\nno time\n"
    last = LogReader(again.time, again.count)
    assert last.take(b"2026-01-01T00:00:01Z a\nno time\nmore\n") == b"more\n"


def test_what_was_read_may_be_rotated_away() -> None:
    reader = LogReader(stamp(5 * 10**9), 100)
    assert reader.take(answer([(7 * 10**9, b"later\n")], "")) == b"later\n"


def test_requests_begin_at_a_whole_second() -> None:
    assert since("2026-01-01T00:00:05.123456789Z") == "2026-01-01T00:00:05Z"
    assert since("2026-01-01T00:00:05Z") == "2026-01-01T00:00:05Z"
