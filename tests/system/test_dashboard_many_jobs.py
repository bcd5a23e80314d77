"""The list of jobs at a thousand of them: found, ordered, paged, ticked, cancelled; the address says what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from twinstep.platform.store.database import Database

pytestmark = pytest.mark.browser

SOON = 15_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, make_plane: Any, seeded: Any) -> Iterator[Any]:
    plane = make_plane(tmp_path_factory.mktemp("many") / "data")
    plane.data_dir.mkdir(mode=0o700)
    database = Database(f"sqlite:///{plane.data_dir / 'twinstep.db'}")
    seeded.fill_jobs(database, 1000)
    database.close()
    plane.start()
    try:
        yield plane
        plane.cancel_all()
    finally:
        plane.kill()


def rows(page: Page) -> Any:
    return page.locator(".tw-grid-row[data-job]")


def query(page: Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def test_a_thousand_jobs_are_narrowed_by_words_states_and_lists_and_the_address_says_so(many: Any, page: Page) -> None:
    page.goto(many.url)
    expect(rows(page)).to_have_count(25)
    expect(page.locator(".tw-state-btn.tw-failed")).to_contain_text("250")
    page.get_by_role("searchbox").fill("sweep-0009")
    expect(rows(page)).to_have_count(10)
    page.wait_for_url(re.compile(r"\?q=sweep-0009$"))
    page.get_by_role("button", name="failed").click()
    expect(rows(page)).to_have_count(3)
    expect(page.get_by_role("button", name="failed")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("searchbox").fill("")
    page.get_by_label("Accelerator").select_option("tpu")
    page.get_by_label("Order").select_option("name")
    expect(rows(page).first).to_contain_text("sweep-00007")
    expect(rows(page).first).to_contain_text("v5p 4x4x8")
    page.wait_for_function("location.search.includes('sort=name')")
    assert query(page) == {"state": ["failed"], "accelerator": ["tpu"], "sort": ["name"]}


def test_an_address_that_was_shared_shows_the_same_list(many: Any, page: Page) -> None:
    page.goto(
        f"{many.url}/?state=failed&state=cancelled&accelerator=gpu&min_attempt=2&q=count%3D128&size=50&state=none"
    )
    expect(page.get_by_role("searchbox")).to_have_value("count=128")
    expect(page.get_by_label("Accelerator")).to_have_value("gpu")
    expect(page.get_by_label("Runs")).to_have_value("2")
    expect(page.get_by_label("Rows")).to_have_value("50")
    for state in ("failed", "cancelled"):
        expect(page.get_by_role("button", name=state)).to_have_attribute("aria-pressed", "true")
    shown = rows(page).all_inner_texts()
    assert shown
    assert all("128 × h100" in text and "run 2" in text and ("failed" in text or "cancelled" in text) for text in shown)


def test_pages_go_on_and_back_within_a_filter(many: Any, page: Page) -> None:
    page.goto(f"{many.url}/?state=failed&sort=oldest")
    first = rows(page).first.inner_text().splitlines()[0]
    page.get_by_role("button", name="Next", exact=True).click()
    expect(page.get_by_text("Page 2")).to_be_visible()
    expect(rows(page).first).not_to_contain_text(first)
    page.get_by_role("button", name="Back", exact=True).click()
    expect(rows(page).first).to_contain_text(first)


def test_a_filter_that_nothing_fits_says_so_and_leads_back(many: Any, page: Page) -> None:
    page.goto(f"{many.url}/?q=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E%22onfocus%3D%22window.hacked%3D2")
    expect(page.get_by_text("No job fits", exact=True)).to_be_visible()
    expect(page.get_by_role("searchbox")).to_have_value('<script>window.hacked=1</script>"onfocus="window.hacked=2')
    page.get_by_role("searchbox").focus()
    assert page.evaluate("window.hacked") is None
    page.get_by_role("link", name="Show every job").click()
    expect(rows(page)).to_have_count(25)


def test_ticked_jobs_stay_ticked_over_pages_and_two_to_six_are_compared(many: Any, page: Page) -> None:
    page.goto(many.url)
    compare = page.get_by_role("button", name="Compare")
    rows(page).nth(0).get_by_role("checkbox").check()
    expect(page.get_by_text("1 selected")).to_be_visible()
    expect(compare).to_be_disabled()
    page.get_by_role("button", name="Next", exact=True).click()
    expect(page.get_by_text("Page 2")).to_be_visible()
    rows(page).nth(3).get_by_role("checkbox").check()
    expect(page.get_by_text("2 selected")).to_be_visible()
    expect(compare).to_be_enabled()
    page.get_by_role("button", name="Back", exact=True).click()
    expect(rows(page).nth(0).get_by_role("checkbox")).to_be_checked()
    page.get_by_role("checkbox", name="Select every job of this page").check()
    expect(page.get_by_text("26 selected")).to_be_visible()
    expect(compare).to_be_disabled()
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_text("26 selected")).to_be_hidden()
    expect(rows(page).nth(0).get_by_role("checkbox")).not_to_be_checked()
    expect(page.get_by_role("checkbox", name="Select every job of this page")).not_to_be_checked()


def test_many_are_cancelled_at_once_after_it_was_said_which(many: Any, page: Page) -> None:
    jobs = [many.submit(f"slow-bulk-{index}") for index in range(3)]
    page.goto(f"{many.url}/?q=bulk")
    expect(rows(page)).to_have_count(3)
    page.get_by_role("checkbox", name="Select every job of this page").check()
    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_text("Cancel 3 jobs?")).to_be_visible()
    expect(page.locator(".tw-dialog:visible")).to_contain_text("slow-bulk-0")
    page.get_by_role("button", name="Keep running").click()
    expect(page.get_by_text("Cancel 3 jobs?")).to_be_hidden()
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.locator(".tw-chip.tw-cancelled")).to_have_count(3, timeout=SOON)
    assert {many.http.get(f"/v1/jobs/{job['id']}").json()["state"] for job in jobs} == {"cancelled"}


def test_the_list_is_worked_by_keyboard_alone(many: Any, page: Page) -> None:
    page.goto(many.url)
    expect(rows(page)).to_have_count(25)
    page.get_by_role("searchbox").focus()
    page.keyboard.type("sweep-00042")
    expect(rows(page)).to_have_count(1)
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.tagName + '.' + document.activeElement.className"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen[-1]
        if "tw-row-link" in seen[-1]:
            break
    assert sum("tw-state-btn" in place for place in seen) == 8
    page.keyboard.press("Enter")
    expect(page).to_have_title("✓ sweep-00042 · Twinstep")


def test_two_tabs_see_the_same_jobs_move(many: Any, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 1320, "height": 900})
    one, two = context.new_page(), context.new_page()
    one.goto(f"{many.url}/?q=two-tabs")
    two.goto(f"{many.url}/?q=two-tabs&sort=oldest")
    job = many.submit("good-two-tabs")
    for tab in (one, two):
        expect(tab.locator(f"[data-job={job['id']}] .tw-chip")).to_have_text("succeeded", timeout=SOON)
    context.close()


def test_a_page_of_a_thousand_jobs_is_no_larger_than_one_of_a_hundred(many: Any, page: Page) -> None:
    sizes: list[int] = []
    page.on("response", lambda answer: sizes.append(len(answer.body())) if answer.url == f"{many.url}/" else None)
    page.goto(many.url)
    expect(rows(page)).to_have_count(25)
    assert sum(sizes) < 600_000
    assert page.evaluate("document.querySelectorAll('*').length") < 1500
