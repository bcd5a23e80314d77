"""The audit log: every change and every refused attempt, written with the change, and never changed after."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from twinstep.platform.api.limits import FAILURES
from twinstep.platform.store import submits
from twinstep.platform.store.entry import Entry, under_way
from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import Role


def log(live: Any, **only: Any) -> list[dict[str, Any]]:
    found = live.plane.service.accounts.audit.page(limit=1000, **only).items
    return [each.model_dump() for each in found][::-1]


def test_every_change_leaves_one_line_with_who_what_and_by_which_request(live, admin, ask, users) -> None:
    users.set_member("default", "ada", Role.SUBMITTER)
    _, secret = users.create_token("ada", role=Role.SUBMITTER, everywhere=False, created_by="root")
    answers = [
        ask(admin, "POST", "/v1/tokens", json={"user": "bob"}),
        ask(admin, "POST", "/v1/projects", json={"name": "team"}),
        ask(admin, "PUT", "/v1/projects/team/members/bob", json={"role": "viewer"}),
        ask(secret, "POST", "/v1/jobs", json={"name": "sleeps", "kubernetes": {"security": "host-network"}}),
    ]
    job = answers[-1].json()["id"]
    answers += [
        ask(secret, "POST", f"/v1/jobs/{job}/cancel"),
        ask(secret, "POST", f"/v1/jobs/{job}/cancel"),
        ask(admin, "DELETE", "/v1/projects/team/members/bob"),
        ask(admin, "DELETE", "/v1/projects/team"),
        ask(admin, "DELETE", f"/v1/tokens/{answers[0].json()['token']['id']}"),
    ]
    lines = log(live)
    token = answers[0].json()["token"]["id"]
    assert [(each["actor"], each["action"], each["target"], each["project"], each["outcome"]) for each in lines] == [
        ("root", "token.create", token, None, "done"),
        ("root", "project.create", "team", "team", "done"),
        ("root", "member.set", "bob", "team", "done"),
        ("ada", "job.submit", job, "default", "done"),
        ("ada", "job.cancel", job, "default", "done"),
        ("ada", "job.cancel", job, "default", "done"),
        ("root", "member.remove", "bob", "team", "done"),
        ("root", "project.delete", "team", "team", "done"),
        ("root", "token.revoke", token, None, "done"),
    ]
    assert [each["request_id"] for each in lines] == [answer.headers["x-request-id"] for answer in answers]
    assert {each["address"] for each in lines} == {"127.0.0.1"}
    assert lines[3]["data"]["security"] == "host-network"
    assert lines[3]["token_id"] == users.list_tokens(user="ada")[0].id
    events = ask(admin, path=f"/v1/jobs/{job}/events").json()["items"]
    assert [each["actor"] for each in events if each["name"] in ("submitted", "cancel_requested")] == ["ada", "ada"]


def test_what_is_refused_leaves_a_line_with_the_reason(live, admin, ask, users) -> None:
    users.set_member("default", "ada", Role.VIEWER)
    token, secret = users.create_token("ada", role=Role.ADMIN, everywhere=False, created_by="root")
    ask(secret, "POST", "/v1/jobs", json={"name": "a"}, params={"project": "default"})
    ask(secret, path="/v1/audit")
    ask(admin, "POST", "/v1/jobs", json={"name": "Upper"})
    ask("tsp_" + "x" * 43)
    live.http.get("/v1/jobs", headers={"origin": "http://evil.example"})
    lines = log(live)
    assert [(each["actor"], each["action"], each["outcome"]) for each in lines] == [
        ("ada", "job.submit", "refused"),
        ("ada", "request", "refused"),
        ("root", "job.submit", "refused"),
        ("anonymous", "request", "refused"),
        ("anonymous", "request", "refused"),
    ]
    assert "may not submit in the project default" in lines[0]["reason"]
    assert lines[0]["token_id"] == token.id
    assert "spec is not valid" in lines[2]["reason"]
    assert "evil.example" in lines[4]["reason"]


def test_reading_leaves_no_line(live, admin, ask) -> None:
    for path in ("/v1/jobs", "/v1/session", "/v1/tokens", "/v1/audit", "/healthz", "/v1/jobs/job-0", "/v1/nowhere"):
        ask(admin, path=path)
    assert log(live) == []


def test_whoever_is_not_known_fills_neither_the_log_nor_the_memory(live, admin, ask) -> None:
    codes = [ask(f"tsp_{number:043}").status_code for number in range(3 * FAILURES)]
    assert set(codes) == {401, 429}
    assert codes[:FAILURES] == [401] * FAILURES
    assert FAILURES <= len(log(live, actor="anonymous")) <= FAILURES + 3
    last = ask("tsp_" + "y" * 43)
    assert (last.status_code, last.json()["code"], last.headers["retry-after"]) == (429, "too_many_requests", "6")
    # Behind a proxy all have one address: whoever has a token is let in.
    assert ask(admin).status_code == 200


def test_what_is_open_to_anybody_tries_no_more_tokens_than_the_rest(live, admin, ask) -> None:
    codes = [ask(f"tsp_{number:043}", path="/readyz").status_code for number in range(FAILURES + 3)]
    assert codes[:FAILURES] == [200] * FAILURES
    assert 429 in codes[FAILURES:]
    assert ask("tsp_" + "y" * 43).status_code == 429, "they are counted together"
    assert ask(admin, path="/readyz").status_code == 200
    assert live.http.get("/readyz").status_code == 200, "a probe shows no token"


def test_a_line_is_there_if_and_only_if_its_change_is(live, monkeypatch) -> None:
    store = live.plane.store
    entry = Entry(actor="ada", action="job.submit", project="default")

    write = submits.write_entries

    def fails(*args: Any) -> None:  # the last thing before the commit
        write(*args)
        raise RuntimeError("the disk")

    with monkeypatch.context() as patch:
        patch.setattr(submits, "write_entries", fails)
        with under_way(entry), pytest.raises(RuntimeError, match="the disk"):
            store.create_job(JobSpec(name="a"), actor="ada")
    assert not entry.written
    assert (log(live), store.jobs(limit=10).items) == ([], [])
    with under_way(entry):
        job = store.create_job(JobSpec(name="a"), actor="ada")
    assert entry.written
    assert [(each["target"], each["outcome"]) for each in log(live)] == [(job.id, "done")]


def test_a_change_that_our_own_failure_ends_leaves_a_line_too(live, monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(live.plane.service.accounts.users, "create_project", fails)
    answer = live.http.post("/v1/projects", json={"name": "a"})
    assert answer.status_code == 500
    (line,) = log(live)
    assert (line["action"], line["outcome"], line["reason"]) == (
        "project.create", "failed", "the control plane failed: RuntimeError",
    )  # fmt: skip
    assert line["request_id"] == answer.headers["x-request-id"]


def test_a_database_that_takes_no_more_is_still_read_and_the_lost_line_is_logged(
    live, admin, ask, monkeypatch, caplog
) -> None:
    database = live.plane.store.database

    def full() -> Any:
        raise UnavailableError("the database does not answer: disk full", remedy="make room")

    live.plane.reconciler.stop()
    with monkeypatch.context() as broken:
        broken.setattr(type(database), "write", lambda self: full())
        assert ask(admin).status_code == 200
        assert ask(admin, "POST", "/v1/projects", json={"name": "a"}).status_code == 503
        assert ask(admin, "POST", "/v1/projects", json={"name": "A"}).status_code == 422
    assert [record.message for record in caplog.records if "project.create" in record.message]
    assert log(live) == []


@pytest.mark.parametrize("change", ["UPDATE audit SET actor = 'eve'", "DELETE FROM audit"])
def test_a_line_stays_as_it_was_written(live, change: str) -> None:
    live.submit("reports-1")
    before = log(live)
    assert len(before) == 1
    with pytest.raises(Exception, match="only added to"), live.plane.store.database.write() as connection:
        connection.execute(text(change))
    assert log(live) == before


def test_the_log_is_read_in_pages_newest_first_and_by_what_is_asked(live, admin, ask) -> None:
    for name in ("a", "b", "c"):
        ask(admin, "POST", "/v1/projects", json={"name": name})
    ask(admin, "POST", "/v1/projects", json={"name": "a"})
    first = ask(admin, path="/v1/audit", params={"limit": 2}).json()
    rest = ask(admin, path="/v1/audit", params={"limit": 2, "before": first["next_before"]}).json()
    assert [each["target"] for each in first["items"] + rest["items"]] == ["/v1/projects", "c", "b", "a"]
    assert rest["next_before"] is None
    refused = ask(admin, path="/v1/audit", params={"outcome": "refused"}).json()["items"]
    assert [each["reason"] for each in refused] == ["there is a project a, or there was one with jobs"]
    assert ask(admin, path="/v1/audit", params={"project": "b"}).json()["items"][0]["action"] == "project.create"
    assert ask(admin, path="/v1/audit", params={"actor": "nobody"}).json()["items"] == []
