"""Who asks: tokens, cookies, what is turned away without them, and that each route says who may use it."""

from __future__ import annotations

import pytest
from fastapi.routing import APIRoute

from twinstep.platform.api import app as api_app
from twinstep.platform.api.access import ROUTES, RouteAccess, check_table
from twinstep.platform.api.gate import COOKIE, SAFE_METHODS
from twinstep.spec.roles import Role


def test_every_operation_of_the_document_says_who_may_use_it(shared) -> None:
    document = shared.http.get("/openapi.json").json()
    told = {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert told.keys() == ROUTES.keys()
    schemes = document["components"]["securitySchemes"]
    for (method, path), operation in told.items():
        access = ROUTES[method, path]
        names = {name for each in operation["security"] for name in each}
        wanted = {"user": {"token", "session"}, "worker": {"run_token"}, "anybody": set()}[access.who]
        assert names == wanted <= schemes.keys()
        assert operation.get("x-permission") == access.permission
        if access.who == "user":
            assert "401" in operation["responses"], path
        if method not in SAFE_METHODS and access.who == "user" and path not in ("/v1/jobs:plan", "/v1/session"):
            assert access.action, f"{method} {path} changes something, and the audit log has no word for it"


def test_an_app_with_a_route_nobody_may_use_is_not_made(monkeypatch) -> None:
    async def more() -> None: ...

    route = APIRoute("/v1/more", more, methods=["GET"])
    monkeypatch.setattr(api_app.jobs.router, "routes", [*api_app.jobs.router.routes, route])
    with pytest.raises(AssertionError, match="/v1/more"):
        api_app.create_app(None)  # type: ignore[arg-type]
    monkeypatch.undo()
    monkeypatch.setitem(ROUTES, ("GET", "/v1/less"), RouteAccess())
    with pytest.raises(AssertionError, match="/v1/less"):
        check_table([])


def test_from_the_first_token_on_every_route_asks_for_one(live, admin) -> None:
    for (method, path), access in ROUTES.items():
        answer = live.http.request(
            method,
            path.format(job_id="job-0", run_id="run-0", project="p", token_id="t", user="u", webhook_id="hook-0"),
        )
        if path in ("/healthz", "/readyz"):
            assert answer.status_code == 200
        elif access.who == "anybody":
            assert answer.status_code in (415, 422)
        else:
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), path
    assert live.http.get("/openapi.json").status_code == 401
    page = live.http.get("/jobs/job-0")
    assert (page.status_code, page.headers["location"]) == (303, "/login?next=/jobs/job-0")


def test_a_browser_shows_its_token_once_and_its_cookie_ends_with_the_token(live, users, admin) -> None:
    token, secret = users.create_token("ada", role=Role.VIEWER, everywhere=True, created_by="root")
    origin = {"origin": str(live.http.base_url).rstrip("/")}
    wrong = live.http.post("/v1/session", json={"token": secret[:-1]}, headers=origin)
    assert (wrong.status_code, wrong.cookies.get(COOKIE)) == (401, None)
    opened = live.http.post("/v1/session", json={"token": secret}, headers=origin)
    assert opened.status_code == 201
    assert {"user": "ada", "login": True, "by": "token", "role": "viewer"}.items() <= opened.json().items()
    said = opened.headers["set-cookie"].lower()
    assert all(part in said for part in ("httponly", "samesite=strict", "max-age=43200", "path=/"))
    assert secret not in said
    assert live.http.get("/v1/session").json()["by"] == "session"
    # A change that no page of ours has sent is refused, whatever cookie comes with it.
    assert live.http.delete("/v1/session").status_code == 403
    users.revoke_token(token.id)
    assert live.http.get("/v1/session").status_code == 401


def test_logging_out_ends_the_session_and_not_the_token(live, admin, ask) -> None:
    origin = {"origin": str(live.http.base_url).rstrip("/")}
    cookie = live.http.post("/v1/session", json={"token": admin}, headers=origin).cookies[COOKIE]
    gone = live.http.delete("/v1/session", headers=origin)
    assert gone.status_code == 204
    assert "max-age=0" in gone.headers["set-cookie"].lower()
    assert live.http.get("/v1/session", headers={"cookie": f"{COOKIE}={cookie}"}).status_code == 401
    assert ask(admin).status_code == 200


def test_what_outlives_its_request_ends_with_the_token_the_session_or_the_membership(live, users, admin, ask) -> None:
    accounts = live.plane.service.accounts
    token, secret = users.create_token("ada", role=Role.VIEWER, everywhere=False, created_by="root")
    users.set_member("default", "ada", Role.VIEWER)
    origin = {"origin": str(live.http.base_url).rstrip("/")}
    cookie = live.http.post("/v1/session", json={"token": secret}, headers=origin).cookies[COOKIE]
    by_cookie, by_token = accounts.by_session(cookie), accounts.by_token(secret)
    assert (by_cookie.by, by_token.by) == ("session", "token")
    assert accounts.still(by_cookie) == by_cookie
    live.http.delete("/v1/session", headers=origin)
    assert accounts.still(by_cookie) is None
    assert accounts.still(by_token) == by_token
    users.remove_member("default", "ada")
    assert accounts.still(by_token).projects() == frozenset()
    users.revoke_token(token.id)
    assert accounts.still(by_token) is None


@pytest.mark.parametrize("ends", ["revoked", "no member"])
def test_a_stream_ends_when_its_reader_may_read_no_more(live, users, admin, ask, ends: str, monkeypatch) -> None:
    monkeypatch.setattr("twinstep.platform.api.stream.LOOK_ANYWAY_S", 0.1)
    users.set_member("default", "ada", Role.VIEWER)
    token, secret = users.create_token("ada", role=Role.VIEWER, everywhere=False, created_by="root")
    job = ask(admin, "POST", "/v1/jobs", json={"name": "sleeps"}).json()
    path, headers = f"/v1/jobs/{job['id']}/stream", {"authorization": f"Bearer {secret}"}
    with live.http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert any(line == "event: state" for line in lines)
        if ends == "revoked":
            users.revoke_token(token.id)
        else:
            users.remove_member("default", "ada")
        rest = list(lines)  # to its end, though the job goes on
    assert "event: end" not in rest
    assert live.http.get(path, headers=headers).status_code == (401 if ends == "revoked" else 404)
