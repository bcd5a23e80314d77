"""What whoever asks may do: roles, projects, and that nothing of one project is seen from another."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from twinstep.platform.api.access import ROUTES
from twinstep.platform.scheduler.accounts import Accounts, Principal
from twinstep.platform.store.users import SEEN_EVERY_S, new_token
from twinstep.spec.errors import ConflictError
from twinstep.spec.roles import PERMISSIONS, RESERVED_NAMES, Permission, Role

TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}


@pytest.fixture
def team(live, users, admin, ask) -> dict[str, str]:
    """Tokens of the members of project `team`, by role, of one who is in another, and of two who reach everything."""
    for name in ("team", "other"):
        assert ask(admin, "POST", "/v1/projects", json={"name": name, "queue": f"{name}-q"}).status_code == 201
    secrets = {"admin everywhere": admin}
    people = {"viewer": Role.VIEWER, "submitter": Role.SUBMITTER, "admin": Role.ADMIN, "stranger": Role.ADMIN}
    for name, role in people.items():
        _, secrets[name] = users.create_token(name, role=Role.ADMIN, everywhere=False, created_by="root")
        users.set_member("other" if name == "stranger" else "team", name, role)
    _, secrets["viewer everywhere"] = users.create_token("prom", role=Role.VIEWER, everywhere=True, created_by="root")
    # Their owner may submit in the project, and this token of theirs may not.
    _, secrets["weak"] = users.create_token("submitter", role=Role.VIEWER, everywhere=False, created_by="root")
    return secrets


def filled(path: str, names: dict[str, str]) -> str:
    """Return a route's path with these parts, and with what is not there for others."""
    return re.sub(r"\{(\w+)\}", lambda part: names.get(part[1], "none-0"), path)


def submit(ask: Any, secret: str, project: str | None = "team", **spec: Any) -> httpx.Response:
    params = {} if project is None else {"project": project}
    return ask(secret, "POST", "/v1/jobs", params=params, json={"name": "sleeps", **spec})


ALLOWED = {
    "viewer": {Permission.READ},
    "weak": {Permission.READ},
    "submitter": {Permission.READ, Permission.SUBMIT},
    "admin": {Permission.READ, Permission.SUBMIT, Permission.MANAGE},
    "stranger": set(),
    "viewer everywhere": {Permission.READ},
    "admin everywhere": set(Permission),
}


def test_each_role_may_what_the_table_says_and_no_more_on_every_route(live, team, ask) -> None:
    """Asked for what is not there or not valid: whoever may hears so, whoever may not hears 403, or 404 of all."""
    job = submit(ask, team["admin everywhere"]).json()
    names = {"job_id": job["id"], "run_id": "run-0", "project": "team", "token_id": "tok-0", "user": "nobody-here"}
    for (method, path), access in ROUTES.items():
        if access.who != "user" or path.endswith("/stream") or (method, path) == ("DELETE", "/v1/projects/{project}"):
            continue
        project = {"project": "team"} if path in ("/v1/jobs", "/v1/jobs:plan") else {}
        for name, secret in team.items():
            if path.endswith("/cancel") and name == "admin everywhere":
                continue  # it would work, and end the job the others ask for
            if path.endswith("/cancel") and Permission.SUBMIT in ALLOWED[name]:
                continue
            answer = ask(secret, method, filled(path, names), params=project)
            told = f"{name}: {method} {path} -> {answer.status_code} {answer.text[:200]}"
            inside = any(part in path for part in ("{job_id}", "{project}"))
            permission = access.permission
            if permission is None or (method, path) == ("GET", "/v1/jobs"):
                assert answer.status_code in (200, 204), told
            elif permission in ALLOWED[name] and (inside or access.filters or "everywhere" in name):
                assert answer.status_code not in (401, 403), told
                assert not (answer.status_code == 404 and "project" in answer.json()["detail"]), told
            elif name == "stranger" and (inside or access.filters) and permission is not Permission.ADMINISTER:
                assert answer.status_code == 404, told
            else:
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), told


def test_of_another_projects_job_nothing_is_seen_and_the_audit_log_says_who_looked(live, team, ask) -> None:
    job = submit(ask, team["submitter"]).json()
    assert (job["project"], job["submitted_by"]) == ("team", "submitter")
    there = ask(team["stranger"], path=f"/v1/jobs/{job['id']}")
    never = ask(team["stranger"], path="/v1/jobs/job-0")
    assert there.json() | {"detail": "", "instance": ""} == never.json() | {"detail": "", "instance": ""}
    assert never.json()["detail"].replace("job-0", job["id"]) == there.json()["detail"]
    for path, access in ROUTES.items():
        if "{job_id}" in path[1] and access.who == "user":
            assert ask(team["stranger"], path[0], path[1].format(job_id=job["id"])).status_code == 404
    assert ask(team["stranger"], path="/v1/jobs/sleeps").status_code == 404
    own = submit(ask, team["stranger"], "other").json()
    newest = [
        ask(team[name], path="/v1/jobs/sleeps").json()["id"] for name in ("viewer", "stranger", "admin everywhere")
    ]
    assert newest == [job["id"], own["id"], own["id"]], "of a name, the newest job that one may see"
    assert ask(team["stranger"], "POST", f"/v1/jobs/{own['id']}/cancel").status_code == 200
    assert [each["id"] for each in ask(team["stranger"]).json()["items"]] == [own["id"]]
    assert ask(team["stranger"], params={"project": "team"}).json()["items"] == []
    assert [each["id"] for each in ask(team["viewer"], params={"project": "team"}).json()["items"]] == [job["id"]]
    assert [each["id"] for each in ask(team["admin everywhere"]).json()["items"]] == [own["id"], job["id"]]
    asked = {"actor": "stranger", "outcome": "refused"}
    refused = ask(team["admin everywhere"], path="/v1/audit", params=asked).json()["items"]
    assert {(each["target"], each["project"], each["outcome"]) for each in refused} == {(job["id"], "team", "refused")}


def test_a_project_fills_in_and_limits_where_its_jobs_run(live, team, ask) -> None:
    spec = {"name": "a", "accelerator": TPU, "kubernetes": {"image": "w:1"}}

    def plan(secret: str, **kubernetes: Any) -> httpx.Response:
        body = spec | {"kubernetes": {"image": "w:1", **kubernetes}}
        return ask(secret, "POST", "/v1/jobs:plan", params={"project": "team"}, json=body)

    planned = plan(team["submitter"]).json()
    assert planned["namespace"] == "team"
    assert planned["objects"][-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-q"
    assert plan(team["submitter"], namespace="team", queue="team-q").status_code == 200
    for field, value in (("namespace", "other"), ("queue", "other-q")):
        refused = plan(team["submitter"], **{field: value})
        assert refused.status_code == 422
        assert refused.json()["faults"][0]["field"] == f"kubernetes.{field}"
    assert plan(team["admin everywhere"], namespace="default").json()["namespace"] == "team"


def test_a_submit_goes_to_the_only_project_of_its_user_or_says_which_there_are(live, team, users, ask) -> None:
    assert submit(ask, team["submitter"], None).json()["project"] == "team"
    users.set_member("other", "submitter", Role.SUBMITTER)
    unsaid = submit(ask, team["submitter"], None)
    assert (unsaid.status_code, unsaid.json()["faults"][0]["allowed"]) == (422, "other, team")
    users.set_member("default", "submitter", Role.SUBMITTER)
    assert submit(ask, team["submitter"], None).json()["project"] == "default"
    assert submit(ask, team["viewer"], None).status_code == 403
    assert submit(ask, team["viewer"]).status_code == 403
    assert submit(ask, team["viewer"], "other").status_code == 404
    assert submit(ask, team["viewer"], "none-such").status_code == 404


def test_a_key_is_its_users_and_its_projects(live, team, users, ask) -> None:
    users.set_member("other", "submitter", Role.SUBMITTER)
    key = {"Idempotency-Key": "k"}

    def send(name: str, project: str) -> httpx.Response:
        return ask(team[name], "POST", "/v1/jobs", params={"project": project}, json={"name": "a"}, headers=key)

    first = send("submitter", "team")
    assert (first.status_code, send("submitter", "team").status_code) == (201, 200)
    assert send("submitter", "other").status_code == 409
    another = send("admin", "team")
    assert another.status_code == 201
    assert another.json()["id"] != first.json()["id"]


def test_a_token_is_shown_once_and_kept_as_its_hash(live, admin, ask, users) -> None:
    made = ask(admin, "POST", "/v1/tokens", json={"user": "ada", "role": "viewer", "expires_in_days": 7})
    assert made.status_code == 201
    secret, token = made.json()["secret"], made.json()["token"]
    assert secret.startswith("tsp_")
    assert len(secret) >= 4 + 43  # 256 bits, six to a character
    assert (token["user"], token["role"], token["everywhere"], token["created_by"]) == ("ada", "viewer", False, "root")
    assert token["expires_at"] == pytest.approx(time.time() + 7 * 86400, abs=60)
    assert ask(secret, path="/v1/session").json()["user"] == "ada"
    with live.plane.store.database.read() as connection:
        for table in ("tokens", "sessions", "audit", "events"):
            assert secret not in str(connection.execute(text(f"SELECT * FROM {table}")).all())  # noqa: S608
    for path in ("/v1/tokens", "/v1/audit"):
        assert secret not in ask(admin, path=path).text


def test_a_revoked_or_expired_token_is_refused_at_once_by_every_replica(live, admin, ask, users) -> None:
    other = Accounts(live.plane.store.database, live.plane.settings)
    token, secret = users.create_token("ada", role=Role.VIEWER, everywhere=True, created_by="root")
    assert other.by_token(secret) is not None
    assert ask(admin, "DELETE", f"/v1/tokens/{token.id}").json()["revoked_at"] is not None
    assert other.by_token(secret) is None
    assert ask(secret).status_code == 401
    _, brief = users.create_token("ada", role=Role.VIEWER, everywhere=True, created_by="root", expires_at=time.time())
    assert ask(brief).status_code == 401


def test_the_last_admin_cannot_lock_everybody_out(live, admin, ask, users) -> None:
    (token,) = users.list_tokens()
    answer = ask(admin, "DELETE", f"/v1/tokens/{token.id}")
    assert (answer.status_code, "last token of an admin" in answer.json()["detail"]) == (409, True)
    users.create_token("eve", role=Role.ADMIN, everywhere=True, created_by="root", expires_at=time.time() - 1)
    assert ask(admin, "DELETE", f"/v1/tokens/{token.id}").status_code == 409
    second, _ = users.create_token("bob", role=Role.ADMIN, everywhere=True, created_by="root")
    assert ask(admin, "DELETE", f"/v1/tokens/{token.id}").status_code == 200
    with pytest.raises(ConflictError):
        users.revoke_token(second.id)


def test_the_first_token_is_an_admins(live, users) -> None:
    for wrong in ({"role": "viewer", "everywhere": True}, {"role": "admin", "everywhere": False}):
        answer = live.http.post("/v1/tokens", json={"user": "ada", **wrong})
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert live.http.get("/v1/jobs").status_code == 200
    made = live.http.post("/v1/tokens", json={"user": "ada", "role": "admin", "everywhere": True})
    assert made.status_code == 201
    assert live.http.get("/v1/jobs").status_code == 401


def test_the_last_use_is_written_at_most_once_a_minute(live, users, admin, monkeypatch) -> None:
    def used() -> float | None:
        return users.list_tokens()[0].last_used_at

    now = time.time()
    monkeypatch.setattr("twinstep.platform.store.users.time.time", lambda: now)
    users.by_secret(admin)
    first = used()
    assert first == now
    for seconds, wanted in ((1, first), (SEEN_EVERY_S - 1, first), (SEEN_EVERY_S + 1, first + SEEN_EVERY_S + 1)):
        monkeypatch.setattr("twinstep.platform.store.users.time.time", lambda later=first + seconds: later)
        assert users.by_secret(admin) is not None
        assert used() == wanted


def test_a_runs_token_reports_and_does_nothing_else_and_a_users_does_not_report(live, team, ask, wait) -> None:
    job = submit(ask, team["submitter"]).json()
    path = live.run_dir(job) / "token"
    wait(path.exists)
    run_token = json.loads(path.read_text())
    report = {"records": [{"kind": "metric", "seq": 1, "time": 1.0, "step": 1, "values": {"loss": 0.5}}]}
    reports = f"/v1/runs/{job['run_id']}/reports"
    for secret in team.values():
        assert ask(secret, "POST", reports, json=report).status_code == 401
    names = {"job_id": job["id"], "run_id": job["run_id"], "project": "team", "token_id": "tok-0", "user": "viewer"}
    for (method, route), access in ROUTES.items():
        if access.who == "user":
            assert ask(run_token, method, filled(route, names)).status_code in (401, 429), route
    assert ask(run_token, "POST", "/v1/session", json={"token": run_token}).status_code in (401, 429)
    assert ask(run_token, "POST", reports, json=report).json() == {"acked": 1}


def test_members_come_and_go_by_a_projects_admin_and_at_once(live, team, ask, users) -> None:
    _, secret = users.create_token("new", role=Role.ADMIN, everywhere=False, created_by="root")
    path = "/v1/projects/team/members/new"
    assert ask(secret).json()["items"] == ask(secret, path="/v1/projects").json()["items"] == []
    for name in ("viewer", "submitter", "weak"):
        assert ask(team[name], "PUT", path, json={"role": "viewer"}).status_code == 403
    assert ask(team["stranger"], "PUT", path, json={"role": "viewer"}).status_code == 404
    assert ask(team["admin"], "PUT", path, json={"role": "viewer"}).json() == {"user": "new", "role": "viewer"}
    assert [each["name"] for each in ask(secret, path="/v1/projects").json()["items"]] == ["team"]
    assert ask(team["admin"], "PUT", path, json={"role": "submitter"}).status_code == 200
    assert submit(ask, secret).status_code == 201
    assert ask(team["admin"], "DELETE", path).status_code == 204
    assert submit(ask, secret).status_code == 404
    assert ask(team["admin"], "DELETE", path).status_code == 404


def test_a_project_with_live_jobs_stays_and_its_name_is_not_given_away_with_its_jobs(live, team, ask) -> None:
    job = submit(ask, team["submitter"]).json()
    root = team["admin everywhere"]
    assert ask(root, "DELETE", "/v1/projects/team").status_code == 409
    ask(root, "POST", f"/v1/jobs/{job['id']}/cancel")

    def over() -> bool:
        return bool(ask(root, path=f"/v1/jobs/{job['id']}").json()["state"] == "cancelled")

    ends = time.monotonic() + 30
    while not over() and time.monotonic() < ends:
        time.sleep(0.05)
    assert ask(root, "DELETE", "/v1/projects/team").status_code == 204
    assert ask(team["submitter"], path=f"/v1/jobs/{job['id']}").status_code == 404
    assert ask(root, path=f"/v1/jobs/{job['id']}").status_code == 200
    assert ask(root, "POST", "/v1/projects", json={"name": "team"}).status_code == 409
    assert ask(root, "DELETE", "/v1/projects/default").status_code == 409


@pytest.mark.parametrize("user", ["", "a b", "a/b", "ré", "-a", "x" * 33, "a\n", *sorted(RESERVED_NAMES)])
def test_a_name_that_no_user_can_have_is_refused(shared, user: str) -> None:
    answer = shared.http.post("/v1/tokens", json={"user": user, "role": "admin", "everywhere": True})
    assert answer.status_code == 422, user


@pytest.mark.parametrize("role", Role)
def test_a_role_allows_what_the_one_below_does_and_a_token_never_more_than_its_own(role: Role) -> None:
    order = list(Role)
    for other in order[order.index(role) :]:
        assert PERMISSIONS[role] <= PERMISSIONS[other]
    for member in Role:
        principal = Principal(user="a", role=role, everywhere=False, members={"p": member}, by="token")
        for permission in Permission:
            may = principal.may(permission, "p")
            both = permission in PERMISSIONS[role] and permission in PERMISSIONS[member]
            assert may is (both and permission is not Permission.ADMINISTER)
            assert not principal.may(permission, "another")


def test_tokens_are_never_alike() -> None:
    made = {new_token() for _ in range(1000)}
    assert len(made) == 1000
