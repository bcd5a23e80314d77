"""What `twinstep ls` and `twinstep get` say of what is not in a local run: projects, ages, workloads in a cluster."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from twinstep.cli import client, jobs
from twinstep.cli.app import run
from twinstep.cli.client import PlaneClient

HOUR = 3600.0
WORKLOAD = {"kind": "JobSet", "namespace": "training", "name": "two-abc", "uid": "u-1"}


class _Plane(PlaneClient):
    """A control plane that answers from a table."""

    answers: dict[str, Any] = {}  # noqa: RUF012  set anew by the fixture

    def get(self, path: str, **_: Any) -> Any:
        return self.answers[path]


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    job = {
        "id": "job-1", "name": "two", "state": "running", "reason": "", "run_id": "run-2", "attempt": 2,
        "created_at": time.time() - 5 * HOUR, "run_created_at": time.time() - HOUR,
    }  # fmt: skip
    _Plane.answers = {
        "/v1/jobs": {"items": [job]},
        "/v1/jobs/job-1": job,
        "/v1/jobs/job-1/runs": {
            "items": [{"id": "run-1"}, {"id": "run-2", "created_at": job["run_created_at"], "cluster": WORKLOAD}]
        },
        "/v1/projects": {"items": [{"name": "default"}, {"name": "ranking"}]},
    }
    monkeypatch.setattr(client, "PlaneClient", _Plane)
    return _Plane.answers


def test_the_age_of_a_job_counts_from_its_submit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  5 h")


def test_the_model_of_a_job_is_its_kind_or_the_factory_of_a_module_of_ones_own(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for more, said in (
        ({"model": "dlrm"}, "dlrm"),
        ({"model": "module", "factory": "mine.ranker:build"}, "mine.ranker:build"),
    ):
        answers["/v1/jobs/job-1"].update(more)
        assert run(["ls"]) == 0
        assert f" {said} " in capsys.readouterr().out
        assert run(["get", "job-1"]) == 0
        assert re.search(rf"^model +{re.escape(said)} *$", capsys.readouterr().out, re.MULTILINE)


def test_a_project_that_is_not_there_is_named_with_those_that_are(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["/v1/jobs"] = {"items": []}
    assert run(["ls", "--project", "rankin"]) == 2
    said = capsys.readouterr().err
    assert "there is no project 'rankin'" in said
    assert "did you mean ranking? yours are: default, ranking" in said
    assert run(["ls", "--project", "ranking"]) == 0
    assert "no jobs in the project ranking" in capsys.readouterr().err
    answers["/v1/projects"] = {"items": []}
    assert run(["ls", "--project", "x\x1b[31m", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["remedy"] == "yours are: none"


def test_get_says_what_a_run_is_in_the_cluster_and_how_to_look_at_it(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["get", "job-1"]) == 0
    said = capsys.readouterr().out
    assert "JobSet two-abc, namespace training" in said
    assert "kubectl -n training describe jobset two-abc" in said
    assert "attempt since" in said
    assert re.search(r"^waits +1 h *$", said, re.M)  # since its newest run was made, not since the submit
    answers["/v1/jobs/job-1/runs"]["items"][1]["cluster"] = WORKLOAD | {"uid": ""}
    assert run(["get", "job-1"]) == 0
    assert "(being sent)" in capsys.readouterr().out
    answers["/v1/jobs/job-1/runs"]["items"][1]["cluster"] = None
    assert run(["get", "job-1"]) == 0
    assert "kubectl" not in capsys.readouterr().out


def test_a_workload_of_any_name_makes_a_line_that_a_shell_reads_as_told() -> None:
    rows = dict(jobs.workload_rows({"kind": "JobSet", "namespace": "a b", "name": "x;rm -rf \x1b[0m", "uid": "1"}))
    assert rows["look at it"].startswith("kubectl -n 'a b' describe jobset 'x;rm")
    assert "\x1b" not in rows["look at it"]
    assert jobs.workload_rows({}) == []
