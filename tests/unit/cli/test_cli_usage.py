"""The command line by itself: usage, spec files of every kind, errors as words and as JSON, exit codes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinstep.cli import client, jobs
from twinstep.cli.app import app, run, wants_json
from twinstep.cli.specfile import read_spec
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import spec_json_schema

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for command in ("up", "submit", "ls", "get", "logs", "cancel", "train", "schema", "validate"):
        assert command in shown.output


def test_help_loads_no_half_and_so_is_quick() -> None:
    code = (
        "import sys; from twinstep.cli.app import run; code = run(['--help']);"
        "heavy = {'torch', 'jax', 'fastapi', 'sqlalchemy', 'nicegui', 'httpx', 'numpy'} & set(sys.modules);"
        "sys.exit(code or (f'loaded {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_schema_prints_the_schema_of_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == spec_json_schema()


def test_validate_says_ok_or_lists_each_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", write(tmp_path / "good.yaml", "name: my-job")]) == 0
    assert capsys.readouterr().out == "ok: my-job (dlrmv3 on ml-100k, inductor)\n"
    bad = write(tmp_path / "bad.yaml", "name: My-Job\ndata: {batch_size: 0}\nbatch: 3\n")
    assert run(["validate", bad]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0].strip() for line in err.splitlines()] == ["error", "name", "data.batch_size", "batch"]
    assert "fix: name: my-job" in err
    assert "fix: batch_size: 1" in err


def test_a_number_of_thousands_of_digits_is_a_fault_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write(tmp_path / "huge.yaml", f"name: a\ntrain: {{steps: 0x{'f' * 6000}}}")
    assert run(["validate", spec]) == 2
    err = capsys.readouterr().err
    assert "train.steps" in err
    assert "given: 0xfff" in err
    assert "fix: steps: 2147483647" in err
    assert len(err) < 600


def test_validate_in_json_gives_the_spec_or_the_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--json", write(tmp_path / "good.yaml", "name: my-job")]) == 0
    assert JobSpec.model_validate(json.loads(capsys.readouterr().out)["spec"]) == JobSpec(name="my-job")
    assert run(["validate", write(tmp_path / "bad.yaml", "name: A"), "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert err == ""
    assert error["code"] == "invalid_spec"
    assert error["faults"][0]["field"] == "name"
    assert set(error["faults"][0]) == {"field", "problem", "given", "allowed", "remedy"}


@pytest.mark.parametrize("number", ["1e-3", "1E-03", "+1.e-3", ".1e-2", "0.001"])
def test_numbers_with_an_exponent_are_numbers_as_in_json(number: str, tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path / "spec.yaml", f"name: a\noptimizers: {{dense: {{lr: {number}}}}}"))
    assert spec.optimizers.dense.lr == 0.001
    assert read_spec(write(tmp_path / "spec.json", spec.model_dump_json())) == spec


def test_a_spec_comes_from_standard_input_too() -> None:
    command = [sys.executable, "-m", "twinstep", "validate", "-"]
    done = subprocess.run(command, input="name: piped\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok: piped" in done.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds nothing"),
        (b"just text", "not a mapping"),
        (b"name: [unclosed", "not valid YAML"),
        (b"\x7fELF\0\0\0\1", "binary file"),
        (b"\xff\xfename", "not UTF-8"),
        (b"# " + b"x" * 10_000_000, "too large"),
        (b"[" * 100_000, "nested too deeply"),
        (b"a: &a [x]\nb: *a", "aliases"),
        (b"name: a\nname: b", "stands twice"),
    ],
    ids=["empty", "text", "unclosed", "binary", "no-utf8", "10-MB", "deep", "alias", "twice"],
)
def test_a_file_that_is_no_spec_is_one_clear_message(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", write(tmp_path / "spec.yaml", content)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "fix: " in err
    assert "Traceback" not in err
    assert len(err) < 1000


def test_what_the_one_fault_says_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["render", write(tmp_path / "here.yaml", "name: my-job")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the job cannot be rendered\n  accelerator.kind: runs on this machine")
    assert err.count("not in a cluster") == 1


def test_a_path_that_cannot_be_read_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.yaml", "name: a")
    (tmp_path / "examples").mkdir()
    write(tmp_path / "examples" / "smoke.yaml", "name: a")
    locked = Path(write(tmp_path / "locked.yaml", "name: a"))
    locked.chmod(0)
    os.mkfifo(tmp_path / "pipe")
    cases = {
        str(tmp_path / "trian.yaml"): f"no such file; fix: did you mean {tmp_path / 'train.yaml'}?",
        str(tmp_path / "smoke.yaml"): f"fix: did you mean {tmp_path / 'examples' / 'smoke.yaml'}?",
        str(tmp_path / "other.yaml"): "fix: give the path of a job spec",
        str(tmp_path): "is a directory",
        str(tmp_path / "train.yaml" / "x"): "cannot be read",
        "a\0b": "cannot be read",
        "n" * 5000: "cannot be read",
        str(tmp_path / "pipe"): "not a mapping",
    }
    if os.geteuid():
        cases[str(locked)] = "may not be read"
    for path, said in cases.items():
        assert run(["validate", path]) == 2, path
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
    locked.chmod(stat.S_IRUSR)


@pytest.mark.parametrize(
    "argv",
    [
        ["submit"],
        ["nonsense"],
        ["ls", "--state", "asleep"],
        ["ls", "--limit", "0"],
        ["up", "--port", "70000"],
        ["up", "--port", "x"],
        ["up", "--max-parallel", "-1"],
        ["get", "a", "b"],
        ["validate", "--jsn", "x"],
    ],
)
def test_wrong_usage_is_exit_code_2_in_words_and_in_json(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A line that is right after all must fail here, not serve: a server's event loop swallows the test's time limit.
    monkeypatch.setattr("twinstep.platform.server.serve", lambda *args, **kwargs: None)
    assert run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "--help" in err
    assert run([*argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "usage"


def test_json_is_looked_for_among_the_options_only() -> None:
    assert wants_json(["get", "job-1", "--json"])
    assert not wants_json(["get", "--", "--json"])


@pytest.mark.parametrize("argv", [["ls"], ["get", "x"], ["cancel", "x"], ["logs", "x"]])
def test_a_control_plane_that_is_not_there_is_exit_code_1(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*argv, "--url", NOWHERE]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: the control plane at {NOWHERE} does not answer")
    assert "twinstep up" in err


@pytest.mark.parametrize(("written", "says"), [(True, "server.json names"), (False, "there is no server.json")])
def test_a_control_plane_that_is_not_there_is_looked_for_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: bool, says: str
) -> None:
    monkeypatch.setenv("TWINSTEP_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("TWINSTEP_URL", raising=False)
    monkeypatch.setattr(client, "DEFAULT_URL", NOWHERE)
    if written:
        (tmp_path / "server.json").write_text(json.dumps({"url": NOWHERE}))
    assert run(["ls"]) == 1
    err = capsys.readouterr().err
    assert f"no control plane is running on {tmp_path}: {NOWHERE}" in err
    assert says in err
    assert f"twinstep up --data-dir {tmp_path}" in err
    assert run(["ls", "--url", NOWHERE]) == 1  # who gives an address did not look for a directory
    assert str(tmp_path) not in capsys.readouterr().err
    monkeypatch.setenv("TWINSTEP_URL", NOWHERE)
    assert run(["ls"]) == 1
    assert str(tmp_path) not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"), [("topologies v5", ["v5e", "v5p"]), ("topologies h", ["h100", "h200"]), ("get my", [])]
)
def test_a_shell_completes_what_there_is(words: str, found: list[str], tmp_path: Path) -> None:
    asked = {"_TWINSTEP_COMPLETE": "complete_bash", "COMP_WORDS": f"twinstep {words}", "COMP_CWORD": "2"}
    environ = {**os.environ, **asked, "TWINSTEP_DATA_DIR": str(tmp_path), "TWINSTEP_URL": NOWHERE}
    command = [sys.executable, "-m", "twinstep"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (found, "")


def test_a_shell_completes_names_and_ids_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [{"id": "job-2", "name": "my-job"}, {"id": "job-1", "name": "my-job"}, {"id": "job-3", "name": "other"}]
    monkeypatch.setattr(client.PlaneClient, "jobs", lambda self, limit: iter(there))
    assert jobs._jobs("my") == ["my-job"]
    assert jobs._jobs("job-") == ["job-1", "job-2", "job-3"]
    assert jobs._jobs("") == ["my-job", "other"]


@pytest.mark.parametrize("url", ["ftp://x", "localhost:80", "http://", "http://[::1", "http://x:notaport", " "])
def test_an_address_that_is_none_is_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "--url", url]) == 2
    assert "fix: " in capsys.readouterr().err


def test_a_data_directory_that_cannot_be_written_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "file", "")
    assert run(["up", "--port", "0", "--data-dir", str(tmp_path / "file" / "data")]) == 2
    err = capsys.readouterr().err
    assert "cannot be used" in err
    assert "--data-dir" in err


def test_a_bug_of_ours_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: str) -> JobSpec:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("twinstep.cli.here.read_spec", broken)
    assert run(["validate", "x"]) == 1
    err = capsys.readouterr().err
    assert "bug in twinstep: ZeroDivisionError: on purpose at " in err
    assert "Traceback" not in err
    monkeypatch.setenv("TWINSTEP_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run(["validate", "x"])


def test_a_bug_in_a_run_leaves_its_traceback_in_the_log_and_the_reason_as_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: str) -> JobSpec:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("twinstep.cli.here.read_spec", broken)
    monkeypatch.setenv("TWINSTEP_RUN_ID", "run-a")
    assert run(["train", "x"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'raise ZeroDivisionError("on purpose")' in "".join(lines)
    assert lines[-1].startswith("error: bug in twinstep: ZeroDivisionError: on purpose at ")


def test_a_users_mistake_in_a_run_has_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINSTEP_RUN_ID", "run-a")
    assert run(["train", write(tmp_path / "spec.yaml", "name: A")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_every_command_and_error_code_is_in_the_manual() -> None:
    from twinstep.cli import app as app_module
    from twinstep.cli.output import RemoteError, UnreachableError
    from twinstep.spec.errors import TwinstepError

    manual = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    headings = {name for line in manual.splitlines() if line.startswith("## ") for name in line[3:].split(", ")}
    assert {command.name for command in [*app.registered_commands, *app.registered_groups]} - headings == set()
    codes = {app_module.UsageFault.code, app_module.InternalFault.code, RemoteError.code, UnreachableError.code}
    for kind in TwinstepError.__subclasses__():
        if kind.__module__ == "twinstep.spec.errors":
            codes |= {kind.code} - {"invalid_move"}  # a move between states is no business of the command
    assert {code for code in codes if f"`{code}`" not in manual} == set()
