"""The whole path with nothing standing in: a spec over REST, a real worker, a control plane killed meanwhile.

TWINSTEP_KEEP_PICTURE=1 writes docs/images/dashboard.png from the finished run's page.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/dashboard.png"
STEPS = 300


class Server:
    """A control plane started as a user starts it."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "twinstep", "up", "--port", "0", "--data-dir", str(self.data_dir)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("control plane ready: "), line
        self.http = httpx.Client(base_url=line.split(": ", 1)[1].strip(), timeout=30, trust_env=False)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.close()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.close()

    def close(self) -> None:
        self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def all(self, path: str, **params: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = 0
        while True:
            page = self.http.get(path, params={**params, "after": after}).raise_for_status().json()
            found += page["items"]
            if not page["items"] or page["next_after"] == after:
                return found
            after = page["next_after"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("first-light") / "data")
    yield found
    found.end()


def wait_for(what: Any, *, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := what()) is not None:
            return found
        time.sleep(0.1)
    raise AssertionError("waited in vain")


@pytest.fixture(scope="module")
def finished(server: Server) -> dict[str, Any]:
    """A real job that succeeded although its control plane was killed twice meanwhile."""
    spec = yaml.safe_load((ROOT / "examples/ml-100k.yaml").read_text())
    spec["compile"] = {"backend": "xla", "cache": False}
    spec["train"] = {"steps": STEPS, "eval_every": 100}
    job_id = server.http.post("/v1/jobs", json=spec).raise_for_status().json()["id"]

    def at_step(step: int) -> bool | None:
        progress = server.http.get(f"/v1/jobs/{job_id}").json()["progress"]
        return True if progress and progress["step"] >= step else None

    for step in (1, 60):  # once after the compile, once in the middle
        wait_for(lambda step=step: at_step(step), seconds=150)
        server.kill()
        time.sleep(1.0)
        server.start()

    def ended() -> dict[str, Any] | None:
        job: dict[str, Any] = server.http.get(f"/v1/jobs/{job_id}").json()
        return job if job["state"] in ("succeeded", "failed", "cancelled") else None

    job: dict[str, Any] = wait_for(ended, seconds=180)
    assert job["state"] == "succeeded", job["reason"]
    return job


def test_a_killed_control_plane_loses_no_point_and_no_event_of_a_real_run(
    server: Server, finished: dict[str, Any]
) -> None:
    job, job_path = finished, f"/v1/jobs/{finished['id']}"
    runs = server.http.get(f"{job_path}/runs").json()["items"]
    assert len(runs) == 1
    run_dir = server.data_dir / "runs" / runs[0]["id"]
    spool = [json.loads(line) for line in (run_dir / "spool.jsonl").read_text().splitlines()]
    points = {(point["name"], point["step"]): point["value"] for point in server.all(f"{job_path}/metrics")}
    wanted = {
        (name, record["step"]): value
        for record in spool if record["kind"] == "metric" for name, value in record["values"].items()
    }  # fmt: skip
    assert points == wanted
    assert sorted(step for name, step in points if name == "loss") == list(range(1, STEPS + 1))
    names = [event["name"] for event in server.all(f"{job_path}/events")]
    reported = [record["name"] for record in spool if record["kind"] == "event"]
    assert [name for name in names if name in set(reported)] == reported
    assert names.count("state_changed") == 4  # pending → queued → starting → running → succeeded, each once
    assert job["summary"]["steps"] == STEPS


def test_the_trained_model_ranks_held_out_ratings_better_than_both_baselines(finished: dict[str, Any]) -> None:
    summary = finished["summary"]
    baselines = {name: score["auc"] for name, score in summary["baselines"].items()}
    assert set(baselines) == {"item_mean", "popularity", "user_item_mean"}
    assert summary["eval_examples"] > 20_000, "the newest fifth of 100,000 ratings, all of it"
    assert summary["auc"] > baselines["item_mean"] + 0.01
    assert summary["auc"] > baselines["popularity"]


@pytest.mark.browser
def test_a_person_clicks_from_the_list_to_the_finished_run_and_finds_its_charts(
    server: Server, finished: dict[str, Any], page: Any, charts: Any
) -> None:
    from playwright.sync_api import expect

    page.goto(str(server.http.base_url))
    row = page.locator(f"[data-job={finished['id']}]")
    expect(row).to_contain_text(f"{STEPS} / {STEPS}")
    expect(row).to_contain_text(f"{finished['summary']['auc']:.4f}")
    row.click(position={"x": 700, "y": 20})
    expect(page.locator(".tw-chart canvas")).to_have_count(4)
    page.wait_for_timeout(1000)
    assert [point[0] for point in charts.points(0)] == list(range(1, STEPS + 1))
    assert [point[0] for point in charts.points(1)] == list(range(100, STEPS + 1, 100))
    assert min(charts.painted(chart) for chart in range(4)) > 1000
    expect(page.get_by_text("AUC of item mean", exact=True).first).to_be_visible()
    if os.environ.get("TWINSTEP_KEEP_PICTURE"):
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURE, full_page=True)


BAD_SPECS = {
    "unknown key": ({"name": "a", "foo": 1}, "foo"),
    "wrong type": ({"name": "a", "train": {"steps": "many"}}, "train.steps"),
    "batch of nothing": ({"name": "a", "data": {"batch_size": 0}}, "data.batch_size"),
    "capitals": ({"name": "MyJob"}, "name"),
    "a hundred characters": ({"name": "a" * 100}, "name"),
    "no such dataset": ({"name": "a", "data": {"dataset": "movielens"}}, "data.dataset"),
    "an accelerator that is not here": (
        {"name": "a", "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}},
        "accelerator.kind",
    ),
}


def test_bad_specs_are_refused_alike_by_rest_and_by_the_command_and_leave_nothing(
    server: Server, tmp_path: Path
) -> None:
    url = str(server.http.base_url)
    jobs = server.http.get("/v1/jobs").json()["items"]
    directories = sorted((server.data_dir / "runs").glob("*"))
    for name, (spec, field) in BAD_SPECS.items():
        answer = server.http.post("/v1/jobs", json=spec)
        assert answer.status_code == 422, name
        assert answer.headers["content-type"].startswith("application/problem+json")
        assert [fault["field"] for fault in answer.json()["faults"]] == [field]
        assert all(fault["remedy"] for fault in answer.json()["faults"])
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        said = subprocess.run(
            [sys.executable, "-m", "twinstep", "submit", str(path), "--url", url],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert said.returncode == 2, name
        assert field in said.stderr
        assert "fix:" in said.stderr
        assert "Traceback" not in said.stderr + said.stdout
    assert server.http.get("/v1/jobs").json()["items"] == jobs
    assert sorted((server.data_dir / "runs").glob("*")) == directories


@pytest.mark.inductor
def test_the_demo_ends_with_one_json_line_whose_model_was_trained_on_every_backend(tmp_path: Path) -> None:
    found = subprocess.run(
        [str(ROOT / "scripts/demo"), "--json", "--steps", "3"],
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["state"] == "succeeded"
    assert set(result["baselines"]) == {"item_mean", "popularity", "user_item_mean"}
    assert set(result["backends"]) == {"inductor", "xla"}
    for backend in result["backends"].values():
        assert backend["compile_s"] > 0
        assert backend["examples_per_s"] > 0
    assert abs(result["backends"]["inductor"]["final_loss"] - result["backends"]["xla"]["final_loss"]) < 1e-3
    assert {"versions", "cpu", "threads", "runs", "seconds", "auc", "ne"} <= set(result)
