"""The command against a real control plane: submit and follow, list, get, logs, cancel; exit codes; a crash between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinstep.cli.client import PlaneClient

pytestmark = pytest.mark.slow


AS_CHILD = Path(__file__).with_name("as_child.py")


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    def write(name: str, **more: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"name": name, **more}))
        return str(path)

    return write


@pytest.fixture
def follower(plane: Any) -> Iterator[Any]:
    """Start the command and leave it running; what a failed test leaves of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(AS_CHILD), "-m", "twinstep", *args],
            env=os.environ | {"TWINSTEP_URL": plane.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_submit_and_follow_ends_with_the_summary_and_exit_code_0(twinstep: Any, spec: Any) -> None:
    done = twinstep("submit", spec("good-follow"), "--follow")
    assert done.returncode == 0, done.stderr
    assert "submitted good-follow as job-" in done.stdout
    assert "compiled: first program" in done.stdout
    assert "starting → running" in done.stdout
    last = done.stdout.strip().splitlines()[-2:]
    heads, figures = last
    for head in ("backend", "examples/s", "compile s", "AUC", "NE", "AUC item mean", "AUC popularity"):
        assert head in heads
    for figure in ("eager", "60", "905.5", "3.8", "0.7401", "0.9250", "0.7012", "0.6011"):
        assert figure in figures
    assert done.stderr == ""


def test_following_a_job_that_fails_ends_with_exit_code_1_and_the_reason(ask: Any, spec: Any) -> None:
    done = ask("submit", spec("bad-follow"), "--follow")
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert "the loss of step 7 is nan" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_follow_in_json_prints_one_value_per_line_and_the_job_last(ask: Any, spec: Any) -> None:
    done = ask("submit", spec("good-json"), "--follow", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert lines[0]["job"]["name"] == "good-json"
    assert lines[-1]["job"]["state"] == "succeeded"
    assert lines[-1]["summary"]["auc"] == 0.7401
    points = [point for line in lines if "metrics" in line for point in line["metrics"]["items"]]
    assert sorted(point["step"] for point in points if point["name"] == "loss") == list(range(1, 61))


def told(process: subprocess.Popen[str], said: list[str], word: str) -> None:
    """Read on until a line has `word`, keeping what was read."""
    assert process.stdout is not None
    while word not in (line := process.stdout.readline()):
        assert line, "the follower ended"
        said.append(line)
    said.append(line)


def test_following_survives_a_control_plane_that_is_killed_and_started_again(
    plane: Any, spec: Any, follower: Any
) -> None:
    process = follower("submit", spec("slow-follow"), "--follow", "--json")
    said: list[str] = []
    told(process, said, '"job"')
    job_id = json.loads(said[0])["job"]["id"]
    told(process, said, '"metrics"')
    plane.kill()
    plane.start()
    told(process, said, '"metrics"')
    plane.http.post(f"/v1/jobs/{job_id}/cancel")
    lines = [json.loads(line) for line in [*said, *process.stdout]]
    assert process.wait(60) == 1, process.stderr.read()  # a cancelled job did not succeed
    assert lines[-1]["job"]["state"] == "cancelled"
    steps = [p["step"] for x in lines if "metrics" in x for p in x["metrics"]["items"] if p["name"] == "loss"]
    assert steps == list(range(1, len(steps) + 1)), "a point was missed or shown twice"
    ids = [line["event"]["id"] for line in lines if "event" in line]
    assert len(ids) == len(set(ids))


def test_ls_shows_the_newest_job_first_and_filters_by_state(plane: Any, ask: Any) -> None:
    first, second = plane.submit("good-ls-one"), plane.submit("good-ls-two")
    plane.when(first["id"], "succeeded")
    plane.when(second["id"], "succeeded")
    shown = ask("ls")
    assert shown.returncode == 0
    assert shown.stdout.index("good-ls-two") < shown.stdout.index("good-ls-one")
    jobs = json.loads(ask("ls", "--json", "--state", "succeeded", "--limit", "2").stdout)["jobs"]
    assert [job["id"] for job in jobs] == [second["id"], first["id"]]
    none = ask("ls", "--state", "restarting")
    assert (none.returncode, none.stdout) == (0, "")


def test_a_job_is_found_by_id_by_the_start_of_its_id_and_by_name_the_newest(plane: Any, ask: Any) -> None:
    older, newer = plane.submit("good-find"), plane.submit("good-find")
    for ref in (newer["id"], newer["id"][:-1], newer["id"].removeprefix("job-")[:-1], "good-find"):
        assert json.loads(ask("get", ref, "--json").stdout)["job"]["id"] == newer["id"], ref
    assert json.loads(ask("get", older["id"], "--json").stdout)["job"]["id"] == older["id"]
    missing = ask("get", "nobody")
    assert missing.returncode == 2
    assert missing.stderr == "error: no job has the id or the name 'nobody'; fix: twinstep ls lists them\n"
    several = json.loads(ask("get", "job-", "--json").stdout)["error"]
    assert several["code"] == "not_found"
    assert "begins the ids of several jobs" in several["problem"]
    shown = ask("get", newer["id"])
    assert newer["run_id"] in shown.stdout
    assert f"{plane.url}/jobs/{newer['id']}" in shown.stdout


def test_a_job_is_found_in_a_few_questions_however_many_jobs_there_are(plane: Any) -> None:
    jobs = [plane.submit(name) for name in ("good-few", *["good-other"] * 5)]
    asked: list[str] = []
    with PlaneClient(plane.url) as client:
        client._http.event_hooks["request"] = [lambda request: asked.append(request.url.path)]
        for ref, questions in ((jobs[0]["id"], 1), ("good-few", 2), (jobs[0]["id"][:-1], 4), (jobs[0]["id"][4:-1], 3)):
            asked.clear()
            assert client.find(ref)["id"] == jobs[0]["id"]
            assert len(asked) == questions, (ref, asked)


def test_cancel_asks_once_and_says_when_it_is_too_late(plane: Any, ask: Any) -> None:
    job = plane.submit("slow-cancel")
    plane.when(job["id"], "running")
    asked = ask("cancel", "slow-cancel")
    assert asked.returncode == 0
    assert plane.when(job["id"], "cancelled")["state"] == "cancelled"
    done = plane.submit("good-cancel")
    plane.when(done["id"], "succeeded")
    late = ask("cancel", done["id"], "--json")
    assert late.returncode == 2
    assert json.loads(late.stdout)["error"]["code"] == "conflict"


def test_logs_print_every_byte_and_follow_until_the_job_ends(plane: Any, ask: Any, twinstep: Any) -> None:
    job = plane.submit("good-logs")
    followed = ask("logs", "-f", job["id"])
    assert followed.returncode == 0
    printed = ask("logs", job["id"])
    assert printed.stdout == followed.stdout
    assert printed.stdout == (plane.data_dir / "runs" / job["run_id"] / "log").read_text()
    assert "step 60 loss" in printed.stdout
    assert "\u2028" in printed.stdout
    narrow = twinstep("logs", job["id"], env={"PYTHONIOENCODING": "ascii"})
    assert (narrow.returncode, narrow.stderr) == (0, "")
    assert "nor does the text: ?" in narrow.stdout


def test_a_reader_that_goes_away_is_no_error(plane: Any) -> None:
    job = plane.submit("good-pipe")
    plane.when(job["id"], "succeeded")
    command = f"{sys.executable} -m twinstep logs {job['id']} | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"TWINSTEP_URL": plane.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "worker of good-pipe \n"
    assert done.stderr == ""


def test_a_spec_the_control_plane_refuses_names_the_field_and_leaves_nothing(ask: Any, spec: Any) -> None:
    path = spec("refused", accelerator={"kind": "gpu", "model": "h100", "count": 8})
    refused = ask("submit", path)
    assert refused.returncode == 2
    assert "accelerator.kind" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "refused" not in ask("ls").stdout


def test_ctrl_c_ends_a_follower_with_130_and_leaves_the_job_alone(plane: Any, spec: Any, follower: Any) -> None:
    process = follower("submit", spec("slow-ctrl-c"), "--follow")
    job_id = process.stdout.readline().split()[-1]
    plane.when(job_id, "running")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert plane.http.get(f"/v1/jobs/{job_id}").json()["state"] == "running"
