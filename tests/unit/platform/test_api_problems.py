"""What is wrong is answered as problem details: field, given, allowed, remedy; never a traceback, nothing half made."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinstep.platform.api.app import _API
from twinstep.platform.api.guard import takes_several
from twinstep.platform.api.problems import STATUS, status_of
from twinstep.spec import errors

JSON = {"content-type": "application/json"}


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance", "code", "remedy", "faults"}
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["detail"]
    assert problem["remedy"]
    assert problem["instance"] == answer.request.url.path
    assert "Traceback" not in answer.text
    return problem


def check_headers(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"


SPECS = [
    ({"name": "Upper"}, "name", "'Upper'", "name: upper"),
    ({"name": "a" * 100}, "name", "'" + "a" * 100 + "'", "name: " + "a" * 40),
    ({"name": 7}, "name", "7", ""),
    ({}, "name", "", "name: my-job"),
    ({"name": "a", "modle": {}}, "modle", "{}", "did you mean model?"),
    ({"name": "a", "data": {"batch_size": 0}}, "data.batch_size", "0", "batch_size: 1"),
    ({"name": "a", "data": {"batch_size": "32"}}, "data.batch_size", "'32'", ""),
    ({"name": "a", "data": {"dataset": "ml-100"}}, "data.dataset", "'ml-100'", "dataset: ml-100k"),
    (
        {"name": "a", "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}},
        "accelerator.kind",
        "'tpu'",
        "kind: cpu",
    ),
    (
        {"name": "a", "accelerator": {"kind": "gpu", "model": "h100", "count": 8}},
        "accelerator.kind",
        "'gpu'",
        "kind: cpu",
    ),
]


@pytest.mark.parametrize(("spec", "field", "given", "remedy"), SPECS, ids=lambda value: str(value)[:40])
def test_a_wrong_spec_is_refused_by_field_and_leaves_nothing_behind(shared, spec, field, given, remedy) -> None:
    problem = check(shared.http.post("/v1/jobs", json=spec), 422, "invalid_spec")
    fault = problem["faults"][0]
    assert fault["field"] == field
    if given:
        assert fault["given"] == given
    assert remedy in fault["remedy"]
    assert shared.http.get("/v1/jobs").json()["items"] == []
    assert not shared.plane.settings.runs_dir.exists()


BODIES = [
    (b"", "not valid JSON"),
    (b"{", "line 1, column 2"),
    (b"[]", "not a mapping"),
    (b"null", "not a mapping"),
    (b'"words"', "not a mapping"),
    (b"\xff\xfe{}", "not valid JSON"),
    (b'{"name": "a", "name": "b"}', "stands twice"),
    (b'{"name": "a", "data": ' + b'{"x":' * 50 + b"1" + b"}" * 51, "nested too deeply"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"name": "a", "train": {"seed": ' + b"9" * 6000 + b"}}", "not valid JSON"),
    (b'{"name": "a", "train": {"steps": ' + b"9" * 4200 + b"}}", "not valid"),
    (b'{"name": "\\ud800"}', "not valid"),
    (b'{"name": "a", "train": {"steps": NaN}}', "not valid"),
]


@pytest.mark.parametrize(("body", "says"), BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_no_spec_is_a_problem_and_no_failure(shared, body: bytes, says: str) -> None:
    problem = check(shared.http.post("/v1/jobs", content=body, headers=JSON), 422, "invalid_spec")
    assert says in problem["detail"]


@given(body=st.one_of(st.binary(max_size=80), st.text(max_size=80).map(lambda t: json.dumps({"name": t}).encode())))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_is_never_a_failure_of_ours(live, body: bytes) -> None:
    for kind in ("application/json", "application/yaml"):
        answer = live.http.post("/v1/jobs", content=body, headers={"content-type": kind})
        assert answer.status_code in (201, 422)


def test_yaml_with_aliases_or_nonsense_is_refused(shared) -> None:
    headers = {"content-type": "application/yaml"}
    huge = f"name: a\ntrain: {{steps: 0x{'f' * 6000}}}"
    for body in ("a: &x [1]\nb: *x", "{", "- a\n- b", "a: 1\na: 2", huge):
        check(shared.http.post("/v1/jobs", content=body, headers=headers), 422, "invalid_spec")


def test_a_body_that_is_too_large_is_refused_before_it_is_held(live) -> None:
    check(live.http.post("/v1/jobs", content=b" " * (256 * 1024 + 1), headers=JSON), 413, "too_large")
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    token = json.loads((live.run_dir(job) / "token").read_text())
    answer = live.http.post(
        f"/v1/runs/{job['run_id']}/reports",
        content=b" " * (8 * 1024 * 1024 + 1),
        headers=JSON | {"authorization": f"Bearer {token}"},
    )
    check(answer, 413, "too_large")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_foreign_page_can_post_without_asking_is_refused(live, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    check(live.http.post("/v1/jobs", content=b'{"name": "a"}', headers=headers), 415, "media_type")
    job = live.submit("sleeps")
    check(live.http.post(f"/v1/jobs/{job['id']}/cancel", content=b"a=b", headers=headers), 415, "media_type")
    assert live.job(job["id"])["cancel_requested_at"] is None


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "10.0.0.1", "localhost.evil"])
def test_a_name_that_is_not_of_this_machine_is_refused(shared, host: str) -> None:
    check(shared.http.get("/v1/jobs", headers={"host": host}), 403, "forbidden_origin")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:8765", "127.9.9.9"])
def test_every_name_of_this_machines_loopback_is_served(shared, host: str) -> None:
    assert shared.http.get("/v1/jobs", headers={"host": host}).status_code == 200


def test_a_page_from_elsewhere_is_refused_and_our_own_is_served(shared) -> None:
    own = str(shared.http.base_url).rstrip("/")
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", own + "1"):
        check(shared.http.get("/v1/jobs", headers={"origin": origin}), 403, "forbidden_origin")
    assert shared.http.get("/v1/jobs", headers={"origin": own}).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/jobs", {}, 200),
        ("/healthz", {}, 200),
        ("/openapi.json", {}, 200),
        ("/v1/jobs/job-0", {}, 404),
        ("/v1/jobs?limit=0", {}, 422),
        ("/v1/jobs", {"host": "evil.example"}, 403),
        ("/v1/schema/job", {"origin": "http://evil.example"}, 403),
    ],
)
def test_no_answer_of_any_kind_may_be_framed_or_guessed_at(shared, path, headers, status) -> None:
    check_headers(shared.http.get(path, headers=headers), status)


@pytest.mark.parametrize("path", ["/v1/jobs/job-0", "/v1/jobs/..%2f..%2fetc", "/v1/nothing", "/v1", "/v1/jobs/a/b/c"])
def test_what_is_not_there_is_a_404_problem(shared, path: str) -> None:
    check(shared.http.get(path), 404, "not_found")


@pytest.mark.parametrize("part", ["runs", "events", "metrics", "logs", "stream"])
def test_what_belongs_to_a_job_that_is_not_there_is_a_404_problem(shared, part: str) -> None:
    check(shared.http.get(f"/v1/jobs/job-0/{part}"), 404, "not_found")
    check(shared.http.post("/v1/jobs/job-0/cancel"), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/v1/jobs"), ("PUT", "/v1/jobs/job-0"), ("GET", "/v1/runs/run-0/reports")]
)
def test_a_method_the_path_does_not_have_is_a_405_problem(shared, method: str, path: str) -> None:
    problem = check(shared.http.request(method, path), 405, "method_not_allowed")
    assert "GET" in problem["remedy"] or "POST" in problem["remedy"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs?limit=0", "limit"),
        ("/v1/jobs?limit=many", "limit"),
        ("/v1/jobs?state=flying", "state"),
        ("/v1/jobs/job-0/events?after=-1", "after"),
        (f"/v1/jobs/job-0/metrics?after={2**64}", "after"),
        ("/v1/jobs/job-0/logs?offset=1e3", "offset"),
        ("/v1/jobs/job-0/logs?tail=0", "tail"),
        ("/v1/jobs/job-0/stream?kinds=smells", "kinds"),
    ],
)
def test_a_wrong_query_is_a_422_problem_that_names_the_parameter(shared, path: str, field: str) -> None:
    problem = check(shared.http.get(path), 422, "invalid_request")
    assert problem["faults"][0]["field"].startswith(field)


def test_a_failure_of_ours_is_a_500_problem_without_a_word_of_its_cause(shared, monkeypatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(shared.plane.service, "list_jobs", fails)
    answer = shared.http.get("/v1/jobs")
    check(answer, 500, "error")
    check_headers(answer, 500)
    assert "secret" not in answer.text


def test_a_database_that_does_not_answer_is_a_503_problem(live) -> None:
    live.plane.reconciler.stop()
    with live.plane.store.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE jobs RENAME TO hidden")
    check(live.http.get("/v1/jobs"), 503, "unavailable")
    check(live.http.get("/readyz"), 503, "unavailable")
    check(live.http.post("/v1/jobs", json={"name": "a"}), 503, "unavailable")
    with live.plane.store.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE hidden RENAME TO jobs")
    assert live.http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("job_id", ["%ed%a0%80", "%00", "job-%F0%9F%92%A9", "..", "%2e%2e%2f", "a" * 5000])
def test_an_odd_id_is_only_an_id_that_is_not_there(shared, job_id: str) -> None:
    assert shared.http.get(f"/v1/jobs/{job_id}/logs").status_code == 404


def test_every_kind_of_error_has_a_status() -> None:
    def tree(kind: type[errors.TwinstepError]) -> list[type[errors.TwinstepError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    # The command and the worker have kinds of their own, which no HTTP answer is made of.
    apart = ("twinstep.cli", "twinstep.worker")
    for kind in [each for each in tree(errors.TwinstepError) if not each.__module__.startswith(apart)]:
        error = kind("wrong", remedy="mend it")
        assert 400 <= status_of(error) < 600
        assert any(each in STATUS for each in kind.__mro__[: kind.__mro__.index(errors.TwinstepError) or 1])


def test_a_query_that_gives_one_value_twice_is_refused_and_one_that_takes_several_is_not(shared) -> None:
    for path in ("/v1/jobs?name=a&name=b", "/v1/jobs?limit=1&limit=2", "/v1/topologies?up_to=4&up_to=8"):
        answer = shared.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), path
        assert "give it once" in answer.json()["remedy"]
    assert shared.http.get("/v1/jobs?state=failed&state=running").status_code == 200


def test_what_takes_several_values_is_what_the_document_says_of_each_route(shared) -> None:
    document, seen = shared.plane.app.openapi()["paths"], set()
    for route in [each for router in _API for each in router.routes if isinstance(each, APIRoute)]:
        for method in route.methods or ():
            told = {
                each["name"]
                for each in document[route.path][method.lower()].get("parameters", ())
                if each["in"] == "query"
                and any(form.get("type") == "array" for form in each["schema"].get("anyOf", [each["schema"]]))
            }
            assert takes_several(route) == told, route.path
            seen |= told
    assert seen >= {"state", "names", "kinds"}
