"""Lines of several hosts on one terminal: each with whose it is, none torn."""

from __future__ import annotations

from typing import Any

from twinstep.cli.follow import Marks, Whose


def part(*said: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"text": "".join(text for text, _ in said), "spans": [{"length": len(text), **span} for text, span in said]}


def host(number: int | None, **more: Any) -> dict[str, Any]:
    return {"slice": 0, "host": number, "restart": 0, "role": "worker", "pod": f"p{number}", **more}


LOCAL = {"slice": 0, "host": 0, "restart": 0, "role": "worker", "pod": ""}


def test_a_local_log_is_shown_as_it_is() -> None:
    marks = Marks()
    assert marks.text(part(("a\r\nhal", LOCAL)), Whose()) + marks.text(part(("f\n", LOCAL)), Whose()) == "a\r\nhalf\n"
    assert Marks().text({"text": "of an older control plane\n"}, Whose()) == "of an older control plane\n"


def test_each_line_of_hosts_is_marked_once_also_where_it_comes_in_two_parts() -> None:
    marks = Marks()
    shown = marks.text(part(("one\ntw", host(0))), Whose()) + marks.text(
        part(("o\n", host(0)), ("x\n", host(1))), Whose()
    )
    assert shown == "0/0 | one\n0/0 | two\n0/1 | x\n"


def test_half_a_line_is_ended_before_another_host_speaks() -> None:
    marks = Marks()
    said = part(("half", host(0)), ("x\n", host(1)), ("rest\n", host(0)))
    assert marks.text(said, Whose()) == "0/0 | half\n0/1 | x\n0/0 | rest\n"


def test_the_control_plane_and_heads_are_no_hosts() -> None:
    said = part(("--- restart 1 ---\n", host(None, role="control plane", pod="")), ("up\n", host(None, role="head")))
    assert Marks().text(said, Whose()) == "--- restart 1 ---\nhead | up\n"


def test_what_is_not_wanted_is_left_out() -> None:
    said = part(("a\n", host(0)), ("b\n", host(1)), ("c\n", host(1, slice=1, restart=2)))
    assert Marks().text(said, Whose(host=1)) == "0/1 | b\n1/1 | c\n"
    assert Marks().text(said, Whose(slice=1, host=1, restart=2)) == "1/1 | c\n"
    assert Marks().text(said, Whose(restart=5)) == ""
