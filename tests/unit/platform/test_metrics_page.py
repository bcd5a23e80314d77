"""`/metrics`: what a Prometheus server reads, parsed by its own parser."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from twinstep.spec.job import JobSpec


def scrape(live: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = live.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(found: Any, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))  # type: ignore[no-any-return]


def test_runs_are_counted_by_state_and_live_ones_tell_where_they_are(live, wait) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    token = json.loads((live.run_dir(job) / "token").read_text())
    progress = {
        "seq": 1, "time": 5.0, "kind": "progress", "phase": "training", "step": 3, "total_steps": 9,
        "examples_per_s": 12.5, "eta_s": 4.0,
    }  # fmt: skip
    answer = live.http.post(
        f"/v1/runs/{job['run_id']}/reports",
        json={"records": [progress]},
        headers={"Authorization": f"Bearer {token}"},
    )
    assert answer.status_code == 200
    found = scrape(live)
    assert sum(each for (name, _), each in found.items() if name == "twinstep_runs") == 1
    of = {"job": job["id"], "run": job["run_id"]}
    assert value(found, "twinstep_run_step", **of) == 3
    assert value(found, "twinstep_run_steps", **of) == 9
    assert value(found, "twinstep_run_examples_per_second", **of) == 12.5
    assert value(found, "twinstep_report_records_total") == 1
    assert value(found, "twinstep_run_silence_seconds", **of) is not None
    wait(lambda: value(scrape(live), "twinstep_ready") == 1)


def test_requests_are_timed_by_route_and_never_by_path(live) -> None:
    for name in ("job-1", "job-2", "job-3"):
        live.http.get(f"/v1/jobs/{name}")
    live.http.get("/nowhere/at/all")
    found = scrape(live)
    labels = {"method": "GET", "route": "/v1/jobs/{job_id}", "status": "404"}
    assert value(found, "twinstep_http_request_seconds_count", **labels) == 3
    assert not any("job-1" in str(key) or "nowhere" in str(key) for key in found)


def test_no_spec_and_no_token_is_told(live) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    token = json.loads((live.run_dir(job) / "token").read_text())
    text = live.http.get("/metrics").text
    assert token not in text
    assert "sleeps" not in text


def report(live: Any, job: dict[str, Any], **progress: Any) -> None:
    token = json.loads((live.run_dir(job) / "token").read_text())
    record = {"seq": 1, "time": 5.0, "kind": "progress", "phase": "training", "step": 3, "total_steps": 9, **progress}
    headers = {"Authorization": f"Bearer {token}"}
    assert live.http.post(f"/v1/runs/{job['run_id']}/reports", json={"records": [record]}, headers=headers).is_success


def test_where_a_live_runs_time_goes_is_told_by_part(live) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    spent = {"step": 30.0, "compile": 8.5, "made_up": 3.0} | {f"part {number}": 1.0 for number in range(500)}
    report(live, job, goodput=0.75, chip_hours=0.5, tokens_per_s=900.0, time_s=spent)
    found = scrape(live)
    of = {"job": job["id"], "run": job["run_id"]}
    assert value(found, "twinstep_run_goodput_ratio", **of) == 0.75
    assert value(found, "twinstep_run_chip_hours", **of) == 0.5
    assert value(found, "twinstep_run_tokens_per_second", **of) == 900.0
    parts = {
        dict(labels)["part"]: each for (name, labels), each in found.items() if name == "twinstep_run_time_seconds"
    }
    assert parts == {"step": 30.0, "compile": 8.5}, "a worker's own words make no series"
    shown = live.job(job["id"])["progress"]
    assert (shown["goodput"], shown["chip_hours"], shown["time_s"]["step"]) == (0.75, 0.5, 30.0)


def test_however_many_runs_are_live_a_scrape_stays_small(live, monkeypatch) -> None:
    monkeypatch.setattr("twinstep.platform.api.observe.MOST_RUNS", 2)
    for _ in range(5):
        live.plane.store.create_job(JobSpec(name="sleeps"))
    found = scrape(live)
    assert value(found, "twinstep_runs_untold") == 3
    assert sum(each for (name, _), each in found.items() if name == "twinstep_runs") == 5
