"""Logging in with a browser: the page that asks, what a viewer sees and may do, and the end of a token under a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

SOON = 15_000


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, make_plane: Any) -> Iterator[Any]:
    """A control plane that asks for tokens, with an admin and a viewer of the project `default`."""
    plane = make_plane(tmp_path_factory.mktemp("guarded") / "data")
    plane.start()
    first = plane.submit("good-seen")
    plane.when(first["id"], "succeeded")

    def token(user: str, **more: Any) -> dict[str, Any]:
        answer = plane.http.post("/v1/tokens", json={"user": user, **more})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    made = token("ada", role="admin", everywhere=True)
    plane.http.headers["Authorization"] = f"Bearer {made['secret']}"
    viewer, stranger = token("vera", role="viewer"), token("sam", role="submitter")
    assert plane.http.put("/v1/projects/default/members/vera", json={"role": "viewer"}).status_code < 300
    plane.tokens, plane.first = {"ada": made, "vera": viewer, "sam": stranger}, first
    try:
        yield plane
        plane.cancel_all()
    finally:
        plane.kill()


def log_in(page: Page, plane: Any, user: str) -> None:
    page.get_by_label("Your token").fill(plane.tokens[user]["secret"])
    page.get_by_role("button", name="Log in").click()


def test_whoever_is_not_known_is_asked_and_led_on_to_where_they_wanted(guarded: Any, page: Page) -> None:
    page.goto(f"{guarded.url}/jobs/{guarded.first['id']}")
    expect(page).to_have_title("Log in · Twinstep")
    log_in(page, guarded, "ada")
    expect(page.get_by_role("heading", name="good-seen")).to_be_visible()
    expect(page.locator(".tw-user")).to_contain_text("ada")
    assert guarded.tokens["ada"]["secret"] not in page.content()
    assert page.evaluate("document.cookie") == ""
    page.locator(".tw-user > summary").click()
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_title("Log in · Twinstep")
    page.goto(guarded.url)
    expect(page).to_have_title("Log in · Twinstep")


def test_a_wrong_token_is_told_in_words(guarded: Any, browser: Browser) -> None:
    page = browser.new_page()  # without the fixture: that the browser notes a 401 is the point
    page.goto(f"{guarded.url}/login")
    page.get_by_label("Your token").fill("tsp_" + "x" * 43)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("wrong, revoked or expired")
    page.close()


@pytest.mark.parametrize(
    "next_", ["//evil.example/x", "https://evil.example", "javascript:alert(1)", "/\\evil.example"]
)
def test_a_login_leads_to_no_other_site(guarded: Any, page: Page, next_: str) -> None:
    page.goto(f"{guarded.url}/login?next={quote(next_, safe='')}")
    log_in(page, guarded, "ada")
    page.wait_for_url(lambda url: "/login" not in url)
    assert page.url.startswith(f"{guarded.url}/")


def test_a_viewer_sees_and_may_not_cancel(guarded: Any, page: Page) -> None:
    job = guarded.submit("slow-watched")
    guarded.when(job["id"], "running")
    page.goto(f"{guarded.url}/jobs/{job['id']}")
    log_in(page, guarded, "vera")
    expect(page.locator(".tw-chip").first).to_have_text("running", timeout=SOON)
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_disabled()
    page.goto(guarded.url)
    row = page.locator(f"[data-job={job['id']}]")
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.get_by_text("may not submit").first).to_be_visible()
    assert guarded.http.get(f"/v1/jobs/{job['id']}").json()["cancel_requested_at"] is None
    guarded.http.post(f"/v1/jobs/{job['id']}/cancel")


def test_who_is_no_member_sees_no_job(guarded: Any, page: Page) -> None:
    page.goto(f"{guarded.url}/jobs/{guarded.first['id']}")
    log_in(page, guarded, "sam")
    expect(page.get_by_text("Not found")).to_be_visible()
    page.goto(guarded.url)
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    expect(page.locator("[data-job]")).to_have_count(0)
    page.goto(f"{guarded.url}/compare?jobs={guarded.first['id']}")
    expect(page.get_by_text("Nothing to compare")).to_be_visible()


def test_a_page_says_when_its_token_was_revoked(guarded: Any, page: Page) -> None:
    made = guarded.http.post("/v1/tokens", json={"user": "bob", "role": "admin", "everywhere": True}).json()
    guarded.tokens["bob"] = made
    page.goto(guarded.url)
    log_in(page, guarded, "bob")
    expect(page.locator("[data-job]").first).to_be_visible()
    assert guarded.http.delete(f"/v1/tokens/{made['token']['id']}").status_code < 300
    expect(page.locator(".tw-reason:visible").first).to_contain_text("not logged in any more", timeout=SOON)


def test_sockets_are_closed_to_those_without_a_login(guarded: Any) -> None:
    with httpx.Client(base_url=guarded.url, trust_env=False) as anybody:
        answer = anybody.get("/_nicegui_ws/socket.io/", params={"EIO": "4", "transport": "polling"})
        assert answer.status_code in (303, 401, 403)
