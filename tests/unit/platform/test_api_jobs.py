"""The REST API over real HTTP: jobs from submit to end, what belongs to them, and what workers report."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from twinstep.spec.parse import spec_json_schema


def pages(live: Any, path: str, **params: Any) -> list[dict[str, Any]]:
    items, after = [], 0
    while True:
        page = live.http.get(path, params={**params, "after": after}).json()
        items += page["items"]
        if not page["items"]:
            return items
        after = page["next_after"]


def test_a_job_goes_from_submit_to_succeeded_with_all_it_reported(live) -> None:
    answer = live.http.post("/v1/jobs", json={"name": "reports-9"})
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    done = live.when(job["id"], "succeeded", "failed")
    assert (done["state"], done["summary"]["backend"], done["spec"]["train"]["steps"]) == ("succeeded", "eager", 400)
    metrics = pages(live, f"/v1/jobs/{job['id']}/metrics", limit=4)
    assert [(point["step"], point["value"]) for point in metrics] == [(step, 1 / step) for step in range(1, 10)]
    events = pages(live, f"/v1/jobs/{job['id']}/events", limit=2)
    moves = [(e["data"]["from"], e["data"]["to"]) for e in events if e["name"] == "state_changed"]
    path = ["pending", "queued", "starting", "running", "succeeded"]
    assert moves == list(itertools.pairwise(path))
    assert {e["actor"] for e in events} == {"user", "scheduler", "worker"}
    (run,) = live.http.get(f"/v1/jobs/{job['id']}/runs").json()["items"]
    assert (run["attempt"], run["state"], run["acked_seq"]) == (1, "succeeded", 10)
    assert "token" not in json.dumps([done, events, run]).replace("tokens", "")


def test_yaml_is_taken_as_json_is(live) -> None:
    answer = live.http.post(
        "/v1/jobs", content="name: reports-1\naccelerator: cpu\n", headers={"content-type": "application/yaml"}
    )
    assert answer.status_code == 201
    assert answer.json()["accelerator"] == "cpu"


def test_jobs_are_listed_newest_first_in_pages_and_by_state(live) -> None:
    ids = [live.submit("reports-1")["id"] for _ in range(5)]
    for job_id in ids:
        live.when(job_id, "succeeded")
    first = live.http.get("/v1/jobs", params={"limit": 3}).json()
    rest = live.http.get("/v1/jobs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [job["id"] for job in first["items"] + rest["items"]] == ids[::-1]
    assert rest["next_cursor"] is None
    assert live.http.get("/v1/jobs", params={"state": "failed"}).json()["items"] == []
    assert len(live.http.get("/v1/jobs", params={"state": "succeeded"}).json()["items"]) == 5


def test_jobs_are_found_by_their_very_name_and_by_how_their_id_begins(live) -> None:
    made = [live.submit(name) for name in ("reports-1", "reports-10", "reports-1")]

    def found(**only: str) -> list[str]:
        return [job["id"] for job in live.http.get("/v1/jobs", params=only).json()["items"]]

    assert found(name="reports-1") == [made[2]["id"], made[0]["id"]]
    assert found(name="reports-1", limit="1", cursor=made[2]["id"]) == [made[0]["id"]]
    assert found(id_prefix=made[1]["id"]) == [made[1]["id"]]
    assert found(id_prefix="job-", name="reports-10") == [made[1]["id"]]
    for nothing in ({"name": "reports"}, {"name": "reports-_"}, {"id_prefix": "JOB-"}, {"id_prefix": "%"}):
        assert found(**nothing) == [], nothing


def test_a_job_is_read_by_its_name_and_changed_by_its_id_alone(live) -> None:
    older, newer = live.submit("twins"), live.submit("twins")
    other = live.submit("another")
    names = {"twins": newer, "another": other, older["id"]: older}
    for named, job in names.items():
        assert live.http.get(f"/v1/jobs/{named}").json()["id"] == job["id"]
        assert [run["id"] for run in live.http.get(f"/v1/jobs/{named}/runs").json()["items"]] == [job["run_id"]]
        assert {each["job_id"] for each in live.http.get(f"/v1/jobs/{named}/events").json()["items"]} == {job["id"]}
    document = live.http.get("/openapi.json").json()
    reads = [path for path, each in document["paths"].items() if path.startswith("/v1/jobs/{job_id}") and "get" in each]
    for path in reads:
        (named,) = [each for each in document["paths"][path]["get"]["parameters"] if each["name"] == "job_id"]
        assert "the newest job of that name" in named["description"]
        if not path.endswith("/stream"):  # a job that runs has one without an end
            query = {"names": "loss"} if path.endswith("/series") else {}
            assert live.http.get(path.replace("{job_id}", "twins"), params=query).status_code == 200, path
            assert live.http.get(path.replace("{job_id}", "triplets"), params=query).status_code == 404, path
    with live.http.stream("GET", "/v1/jobs/twins/stream") as answer:
        assert answer.status_code == 200
    for verb in ("cancel", "retry", "suspend", "resume", "resize"):
        body = {"batch_size": 1} if verb == "resize" else {}
        told = live.http.post(f"/v1/jobs/twins/{verb}", json=body)
        assert told.status_code == 404
        assert "takes its id" in told.json()["detail"], told.text
        assert newer["id"] in told.text
        assert older["id"] not in told.text
    assert live.job(newer["id"])["cancel_requested_at"] is None
    shaped = live.submit("job-" + "0" * 14)  # a name that could be an id is taken for one
    assert live.http.get(f"/v1/jobs/{shaped['name']}").status_code == 404


def test_cancelling_stops_the_worker_and_may_be_asked_again(live) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    for _ in range(2):
        assert live.http.post(f"/v1/jobs/{job['id']}/cancel").status_code == 200
    done = live.when(job["id"], "cancelled", "failed")
    assert done["state"] == "cancelled"
    assert done["cancel_requested_at"]
    again = live.http.post(f"/v1/jobs/{job['id']}/cancel", json={})
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")


def test_a_finished_job_cannot_be_cancelled(live) -> None:
    job = live.submit("reports-1")
    live.when(job["id"], "succeeded")
    answer = live.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "succeeded already" in answer.json()["detail"]


def test_a_log_is_read_by_cursor_and_by_its_tail_without_secrets(live) -> None:
    job = live.submit("shouts")
    live.when(job["id"], "succeeded")
    text, offset = "", 0
    while True:
        part = live.http.get(f"/v1/jobs/{job['id']}/logs", params={"offset": offset, "limit": 7}).json()
        if part["next_offset"] == offset:
            break
        text, offset = text + part["text"], part["next_offset"]
    lines = text.split("\n")
    assert lines[0] == "café \ufffd\ufffd"
    assert set(lines[1]) == {"*"}
    assert lines[2] == "half a li"
    assert live.http.get(f"/v1/jobs/{job['id']}/logs", params={"host": 1}).json()["code"] == "not_found"
    tail = live.http.get(f"/v1/jobs/{job['id']}/logs", params={"tail": 1}).json()
    assert tail["text"] == "half a li"
    assert tail["next_offset"] == tail["size"] == offset


def test_metrics_are_filtered_by_name_and_belong_to_the_jobs_own_runs(live) -> None:
    one, two = live.submit("reports-2"), live.submit("reports-1")
    live.when(two["id"], "succeeded")
    path = f"/v1/jobs/{one['id']}/metrics"
    assert len(live.http.get(path, params={"names": "loss,auc"}).json()["items"]) == 2
    assert live.http.get(path, params={"names": "auc"}).json()["items"] == []
    assert len(live.http.get(path, params={"run_id": one["run_id"]}).json()["items"]) == 2
    assert live.http.get(path, params={"run_id": two["run_id"]}).status_code == 404


def report(live: Any, run_id: str, token: str, *records: dict[str, Any], **kwargs: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return live.http.post(f"/v1/runs/{run_id}/reports", json={"records": records}, headers=headers, **kwargs)


def record(seq: int, **more: Any) -> dict[str, Any]:
    return {"kind": "metric", "seq": seq, "time": 1.0, "step": seq, "values": {"loss": 0.5}} | more


def test_reports_need_the_runs_own_token(live) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    token = json.loads((live.run_dir(job) / "token").read_text())
    for wrong in ("", "x", token[:-1], token + "x"):
        answer = report(live, job["run_id"], wrong, record(1))
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.headers["content-type"] == "application/problem+json"
    assert report(live, "run-0", token, record(1)).status_code == 401
    assert report(live, job["run_id"], token, record(1)).json() == {"acked": 1}
    assert report(live, job["run_id"], token, record(1), record(2), record(9)).json() == {"acked": 2}


def test_a_report_asks_once_whose_token_it_carries(live, monkeypatch) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    token = json.loads((live.run_dir(job) / "token").read_text())
    asked: list[str] = []
    token_hashes = live.plane.store.token_hashes
    monkeypatch.setattr(live.plane.store, "token_hashes", lambda run: asked.append(run) or token_hashes(run))
    assert report(live, job["run_id"], token, record(1)).json() == {"acked": 1}
    assert asked == [job["run_id"]]


def test_a_late_report_of_a_finished_run_is_kept_and_moves_nothing(live) -> None:
    job = live.submit("crashes")
    live.when(job["id"], "failed")
    token = json.loads((live.run_dir(job) / "token").read_text())
    assert report(live, job["run_id"], token, record(1)).json()["acked"] == 1
    assert live.job(job["id"])["state"] == "failed"
    assert len(live.http.get(f"/v1/jobs/{job['id']}/metrics").json()["items"]) == 1


@pytest.fixture(scope="module")
def sleeping(shared) -> dict[str, Any]:
    """A job that has started and reports nothing."""
    job = shared.submit("sleeps")
    shared.when(job["id"], "starting")
    return job


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "riddle", "seq": 1},
        record(0),
        record(2**60),
        record(1, step=-1),
        record(1, values={"loss": "low"}),
        {"kind": "event", "seq": 1, "time": 1, "name": "x" * 65, "reason": ""},
        {"kind": "event", "seq": 1, "time": 1e300, "name": "x", "reason": ""},
        {"kind": "event", "seq": 1, "time": -1, "name": "x", "reason": ""},
    ],
    ids=["kind", "seq 0", "seq huge", "step", "value", "name", "time huge", "time negative"],
)
def test_a_report_that_is_none_is_refused_with_the_field_and_nothing_of_it_stored(
    shared, sleeping: dict[str, Any], bad: dict[str, Any]
) -> None:
    token = json.loads((shared.run_dir(sleeping) / "token").read_text())
    answer = report(shared, sleeping["run_id"], token, bad)
    assert answer.status_code == 422
    assert answer.json()["faults"][0]["field"].startswith("records.0")
    assert shared.job(sleeping["id"])["state"] == "starting"


def test_many_clients_at_once_are_all_answered(live) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    token = json.loads((live.run_dir(job) / "token").read_text())
    codes: list[int] = []

    def client() -> None:
        for seq in range(1, 11):
            codes.append(report(live, job["run_id"], token, record(seq)).status_code)
            codes.append(live.http.get(f"/v1/jobs/{job['id']}").status_code)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {200}
    assert [p["step"] for p in pages(live, f"/v1/jobs/{job['id']}/metrics")] == list(range(1, 11))


def test_the_schema_health_and_readiness_are_told(shared, wait) -> None:
    assert shared.http.get("/v1/schema/job").json() == spec_json_schema()
    assert shared.http.get("/healthz").json()["status"] == "ok"
    wait(lambda: shared.http.get("/readyz").status_code == 200)
    assert shared.http.get("/readyz").json()["ready"] is True


def test_openapi_names_every_path_with_its_problems_and_every_reference_resolves(shared) -> None:
    document = shared.http.get("/openapi.json").json()
    assert {path for path in document["paths"] if path.startswith("/v1")} == {
        "/v1/jobs",
        "/v1/jobs:plan",
        "/v1/topologies",
        "/v1/webhooks",
        "/v1/webhooks/{webhook_id}",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/cancel",
        "/v1/jobs/{job_id}/retry",
        "/v1/jobs/{job_id}/suspend",
        "/v1/jobs/{job_id}/resume",
        "/v1/jobs/{job_id}/resize",
        "/v1/jobs/{job_id}/runs",
        "/v1/jobs/{job_id}/events",
        "/v1/jobs/{job_id}/metrics/names",
        "/v1/jobs/{job_id}/metrics/series",
        "/v1/jobs/{job_id}/metrics",
        "/v1/jobs/{job_id}/logs",
        "/v1/jobs/{job_id}/explain",
        "/v1/jobs/{job_id}/stream",
        "/v1/runs/{run_id}/reports",
        "/v1/schema/job",
        "/v1/session",
        "/v1/tokens",
        "/v1/tokens/{token_id}",
        "/v1/projects",
        "/v1/projects/{project}",
        "/v1/projects/{project}/members",
        "/v1/projects/{project}/members/{user}",
        "/v1/audit",
    }
    schemas = document["components"]["schemas"]

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [ref for value in node.values() for ref in references(value)]
        return [ref for item in node for ref in references(item)] if isinstance(node, list) else []

    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    for path in (path for path in document["paths"] if path.startswith("/v1/jobs")):
        for operation in document["paths"][path].values():
            assert "application/problem+json" in operation["responses"]["422"]["content"], path


def test_pages_of_a_fresh_control_plane_are_empty(live) -> None:
    assert live.http.get("/v1/jobs").json() == {"items": [], "next_cursor": None}


def test_a_job_without_output_has_an_empty_log(live, tmp_path: Path) -> None:
    job = live.submit("sleeps")
    part = live.http.get(f"/v1/jobs/{job['id']}/logs").json()
    assert part == {"offset": 0, "next_offset": 0, "size": 0, "text": "", "spans": []}


def test_a_plan_tells_what_a_job_would_become_and_stores_nothing(live) -> None:
    spec = {
        "name": "a",
        "data": {"batch_size": 256},
        "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "4x4x8"},
        "kubernetes": {"image": "registry.example.com/worker:1"},
    }
    plan = live.http.post("/v1/jobs:plan", json=spec).json()
    assert (plan["numbers"]["pods"], plan["numbers"]["devices"]) == (32, 128)
    assert plan["objects"][-1]["kind"] == "JobSet"
    assert any("digest" in warning for warning in plan["warnings"])
    looked = plan["preflight"]
    assert looked["fits"] is True
    assert looked["hbm"] == sum(part["bytes"] for part in looked["parts"]) <= looked["limit"]
    assert looked["step"]["seconds"] > 0
    assert live.http.get("/v1/jobs").json()["items"] == []


def test_a_job_that_cannot_fit_is_not_planned_and_the_nearest_change_is_named(shared) -> None:
    spec = {
        "name": "a",
        "data": {"dataset": "synthetic", "batch_size": 128, "rows": {"item_id": 2**31 - 1}},
        "model": {"embedding_dim": 512},
        "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "4x4x4"},
        "optimizers": {"sparse": {"kind": "adam"}},
        "kubernetes": {"image": "w:1"},
    }
    answer = shared.http.post("/v1/jobs:plan", json=spec)
    assert answer.status_code == 422
    assert "of each device of v5p:4x4x4, which has 91.0 GiB" in answer.json()["detail"]
    assert "optimizers.sparse.kind" in [each["field"] for each in answer.json()["faults"]]
    let_go = shared.http.post("/v1/jobs:plan", json={**spec, "debug": {"preflight": "warn"}}).json()
    assert let_go["preflight"]["fits"] is False
    assert any(warning.startswith("preflight: ") for warning in let_go["warnings"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"accelerator": "cpu"}, "accelerator.kind"),
        ({"accelerator": {"kind": "tpu", "generation": "v5p", "topology": "8x4x4"}}, "accelerator.topology"),
        ({"embedding": {"engine": "dense"}}, "embedding.engine"),
        ({"kubernetes": {}, "embedding": {"engine": "torchrec"}}, "kubernetes.image"),
    ],
)
def test_what_cannot_be_planned_is_told_by_field(shared, change: dict[str, Any], field: str) -> None:
    spec = {
        "name": "a",
        "accelerator": {"kind": "gpu", "model": "h100", "count": 8},
        "kubernetes": {"image": "w:1"},
        **change,
    }
    answer = shared.http.post("/v1/jobs:plan", json=spec)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["faults"]] == [field]


def test_the_table_of_accelerators_is_served(shared) -> None:
    found = shared.http.get("/v1/topologies", params={"up_to": 4}).json()
    assert [row["topology"] for row in found["tpus"][2]["slices"]] == ["2x2x1"]
    assert shared.http.get("/v1/topologies", params={"up_to": 0}).status_code == 422


def test_a_submit_that_is_sent_again_with_its_key_finds_its_job(live) -> None:
    key = {"Idempotency-Key": "a-key"}
    first = live.http.post("/v1/jobs", json={"name": "a"}, headers=key)
    again = live.http.post("/v1/jobs", json={"name": "a"}, headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["Location"] == first.headers["Location"]
    other = live.http.post("/v1/jobs", json={"name": "b"}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "conflict")
    assert first.json()["id"] in other.json()["detail"]
    without = live.http.post("/v1/jobs", json={"name": "a"})
    assert without.status_code == 201
    assert len(live.http.get("/v1/jobs").json()["items"]) == 2


def test_of_many_submits_with_one_key_at_once_one_stores_a_job(live) -> None:
    answers: list[tuple[int, str]] = []

    def submit() -> None:
        with httpx.Client(base_url=live.http.base_url, timeout=60) as client:
            answer = client.post("/v1/jobs", json={"name": "a"}, headers={"Idempotency-Key": "k"})
            answers.append((answer.status_code, answer.json()["id"]))

    threads = [threading.Thread(target=submit) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(code for code, _ in answers) == [200] * 11 + [201]
    assert len({job for _, job in answers}) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "\u00e9".encode("latin-1")])
def test_a_key_that_is_none_is_refused(shared, key) -> None:
    answer = shared.http.post("/v1/jobs", json={"name": "a"}, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
