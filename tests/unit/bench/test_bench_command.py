"""The command scripts/bench: its list, its errors, its exit codes, and processes that answer or end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table

import bench.__main__ as command
from bench.child import Child, need_cxx
from twinstep.spec.errors import TrainError, TwinstepError, UnavailableError


def put(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Let `step` be a benchmark that takes no time."""

    def table(found: dict[str, Any]) -> Table:
        page = Table(title=f"table of {found['bench']}")
        page.add_column("numbers")
        return page

    module = SimpleNamespace(run=run, table=table)
    monkeypatch.setattr(command.importlib, "import_module", lambda name: module)


def test_help_lists_every_benchmark_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name, bench in command.BENCHES.items():
        assert [line for line in lines if line.split() == [name, *bench.says.split()]], name


@pytest.mark.parametrize(("typed", "near"), [("stpe", "step"), ("qualty", "quality"), ("", "all"), ("∞", "step")])
def test_an_unknown_name_is_answered_with_the_nearest(
    typed: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([typed]) == 2
    problem, fix = capsys.readouterr().err.splitlines()
    assert repr(typed) in problem
    assert "did you mean" in fix
    if typed.isascii() and typed:
        assert f"did you mean {near!r}" in fix


@pytest.mark.parametrize("argv", [[], ["step", "--nope"], ["step", "quality"]])
def test_wrong_usage_exits_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(argv)
    assert end.value.code == 2
    assert "usage: scripts/bench" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step", "all"])
def test_what_keeps_nothing_between_calls_says_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([name, "--keep", str(tmp_path)]) == 2
    assert "quality does" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step", "all"])
def test_what_has_no_parts_runs_whole(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name, "--only", "a*"]) == 2
    assert "tpu and preflight do\n" in capsys.readouterr().err


def test_json_is_the_last_line_and_comes_after_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, lambda say: say("working") or {"bench": "step", "ratios": {}})
    assert command.main(["step", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {"bench": "step", "ratios": {}}
    assert "numbers" in out.splitlines()[-4]
    assert "working" in err


def test_sides_that_did_different_work_fail_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, lambda say: {"bench": "step", "equal": False})
    assert command.main(["step"]) == 1
    assert "different results" in capsys.readouterr().err


def test_a_benchmark_that_cannot_run_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(say: Any) -> None:
        raise TrainError("no air", remedy="open a window")

    put(monkeypatch, run)
    assert command.main(["step"]) == 1
    assert capsys.readouterr().err == "bench: no air\nfix: open a window\n"


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(say: Any) -> None:
        raise KeyboardInterrupt

    put(monkeypatch, run)
    assert command.main(["step"]) == 130
    assert capsys.readouterr().err == "bench: interrupted\n"


def test_a_missing_compiler_is_said_before_minutes_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnavailableError, match="no-such-compiler"):
        need_cxx()


def test_a_childs_answers_are_apart_from_what_it_prints(tmp_path: Path) -> None:
    with Child("json:JSONEncoder", {"indent": None}) as child:
        assert child.call("encode", o=[1, "é"]) == '[1, "\\u00e9"]'
        assert child.call("encode", o=None) == "null"


def test_an_error_in_a_child_is_the_parents_error() -> None:
    spec = {"name": "x", "data": {"dataset": "synthetic"}, "accelerator": {"kind": "gpu", "model": "l4", "count": 1}}
    with Child("bench.quality:Trainer", {}) as child, pytest.raises(TwinstepError, match="accelerator"):
        child.call("train", spec=spec)


def test_a_child_that_ends_is_an_error_and_not_a_hang(capfd: pytest.CaptureFixture[str]) -> None:
    with Child("json:NoSuchClass", {}) as child:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="ended with code"):
                child.call("encode", o=1)
    assert "NoSuchClass" in capfd.readouterr().err


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Let a script take the place of the interpreter that `all` starts each benchmark with."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(path))


def test_all_writes_what_each_benchmark_found_in_one_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path, 'echo "table of $3"; echo "{\\"b\\": 1, \\"a\\": \\"$3\\"}"')
    assert command.run_all(as_json=True, results=tmp_path / "results") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:-1] == [f"table of {name}" for name in command.BENCHES]
    assert set(json.loads(out[-1])) == set(command.BENCHES)
    for name in command.BENCHES:
        assert (tmp_path / f"results/{name}.json").read_text() == f'{{\n  "a": "{name}",\n  "b": 1\n}}\n'


def test_all_goes_on_where_one_fails_and_keeps_its_old_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path, '[ "$3" = step ] && exit 1; echo "{}"')
    (tmp_path / "step.json").write_text("old")
    assert command.run_all(as_json=False, results=tmp_path) == 1
    assert (tmp_path / "step.json").read_text() == "old"
    assert (tmp_path / "quality.json").read_text() == "{}\n"
    assert "step failed" in capsys.readouterr().err
