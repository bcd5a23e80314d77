"""The pages in a real browser: from the list to a run's charts, live updates, cancel, hostile text, paging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

SOON = 15_000  # milliseconds a busy machine may take for what takes half a second

pytestmark = pytest.mark.browser


def test_the_empty_list_says_how_to_submit_and_a_new_job_appears_by_itself(plane: Any, page: Page) -> None:
    page.goto(plane.url)
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    expect(page.locator(".tw-code")).to_have_text(f"twinstep submit --url {plane.url} --follow SPEC.yaml")
    plane.submit("good-first")
    expect(page.get_by_role("link", name="good-first")).to_be_visible()
    expect(page.get_by_text("No jobs yet")).to_be_hidden()
    expect(page.locator(".tw-chip").first).to_have_text("succeeded", timeout=SOON)


def test_from_the_list_to_a_finished_run_and_its_charts(plane: Any, page: Page, charts: Any) -> None:
    job = plane.submit("good-demo")
    plane.when(job["id"], "succeeded")
    page.goto(plane.url)
    row = page.locator(f"[data-job={job['id']}]")
    expect(row).to_contain_text("60 / 60")
    expect(row).to_contain_text("0.7401")
    expect(row).to_contain_text("ml-100k · inductor")
    row.click(position={"x": 700, "y": 20})  # the whole row is the link
    expect(page).to_have_url(f"{plane.url}/jobs/{job['id']}")
    expect(page).to_have_title("✓ good-demo · Twinstep")
    expect(page.locator(".tw-chart canvas")).to_have_count(4)
    box = page.locator(".tw-chart").first.bounding_box()
    assert box is not None
    assert box["width"] > 250
    assert box["height"] > 150
    charts.until(lambda: min(charts.painted(chart) for chart in range(4)) > 1000)
    assert [point[0] for point in charts.points(0)] == list(range(1, 61))
    assert [point[0] for point in charts.points(1)] == [20, 40, 60]
    assert [point[0] for point in charts.points(1, 1)] == [20, 40, 60]
    assert len(charts.points(2)) == 60
    for line, tokens in enumerate((1400, 40, 3)):
        assert [point[1] for point in charts.points(3, line)] == [tokens] * 60
    for shown in ("AUC of item mean", "0.7012", "AUC of popularity", "0.6011", "0.9250", "recompiled · 1.2 s"):
        expect(page.get_by_text(shown, exact=True).first).to_be_visible()
    expect(page.locator(".tw-log")).to_contain_text("step 60 loss")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_disabled()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    assert page.get_by_text("ttempt").count() == 0  # a run is a run on every page
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Spec copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("name: good-demo\nmodel:\n")


def test_a_running_job_moves_by_itself_and_is_cancelled_from_its_page(plane: Any, page: Page, charts: Any) -> None:
    job = plane.submit("slow-live")
    page.goto(f"{plane.url}/jobs/{job['id']}")
    expect(page.locator(".tw-chip")).to_have_text("running")
    page.wait_for_function("document.querySelector('.tw-chart canvas') !== null")
    expect(page.get_by_text("Training", exact=True).first).to_be_visible()
    charts.until(lambda: len(charts.points(0)) > 0)
    before = len(charts.points(0))
    charts.until(lambda: len(charts.points(0)) > before)
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Keep running").click()
    expect(page.get_by_role("button", name="Keep running")).to_be_hidden()
    assert plane.http.get(f"/v1/jobs/{job['id']}").json()["cancel_requested_at"] is None
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator(".tw-chip")).to_have_text("cancelled")
    expect(page.get_by_text("running → cancelled")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_disabled()
    assert plane.http.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"


def test_a_failed_job_says_why_on_top(plane: Any, page: Page) -> None:
    job = plane.submit("bad-page")
    plane.when(job["id"], "failed")
    page.goto(f"{plane.url}/jobs/{job['id']}")
    expect(page.locator(".tw-reason-bad")).to_contain_text("the loss of step 7 is nan")
    expect(page.locator(".tw-next")).to_contain_text("Next: lower optimizers.dense.lr")


def test_whatever_a_spec_or_a_worker_says_stays_text(plane: Any, page: Page, charts: Any, tmp_path: Path) -> None:
    markup = "<img src=x onerror=window.hacked=1>`${window.hacked=2}`</script><script>window.hacked=3</script>"
    job = plane.submit("evil-run", compile={"cache_dir": f"{tmp_path}/{markup}"})
    plane.when(job["id"], "succeeded")
    page.goto(plane.url)
    expect(page.get_by_role("link", name="evil-run")).to_be_visible()
    page.get_by_role("link", name="evil-run").click()
    expect(page.locator(".tw-log")).to_contain_text("step 60 loss")
    for part in (".tw-log", ".tw-events", ".tw-kv", ".tw-yaml"):
        expect(page.locator(part)).to_contain_text("<img src=x onerror=")
    assert "\x1b" not in page.locator(".tw-log").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    charts.until(lambda: charts.painted(0) > 1000)
    box = page.locator(".tw-chart").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # its tooltip is HTML
    expect(page.locator(".tw-chart").first).to_contain_text("loss")
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("path", ["/jobs/job-none", "/jobs/<script>window.hacked=1</script>", "/elsewhere"])
def test_an_address_that_leads_nowhere_is_a_page_with_a_way_home(plane: Any, page: Page, path: str) -> None:
    answer = page.goto(plane.url + path)
    assert answer is not None
    assert answer.status == 404
    expect(page.get_by_text("Not found")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    page.get_by_role("link", name="All jobs").click()
    expect(page).to_have_url(f"{plane.url}/")


def test_a_page_on_which_nothing_changes_is_sent_nothing(plane: Any, page: Page) -> None:
    job = plane.submit("good-still")
    plane.when(job["id"], "succeeded")
    frames: list[str] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(str(frame))))
    page.goto(f"{plane.url}/jobs/{job['id']}")
    expect(page.locator(".tw-log")).to_contain_text("step 60 loss")
    assert any('"update"' in frame for frame in frames), "the log came over the socket"
    # That nothing comes can only be waited for: after a second for what is on its way, two rounds of looks at a job
    # that has ended (five times 0.2 s each).
    page.wait_for_timeout(1000)
    frames.clear()
    page.wait_for_timeout(2200)
    assert [frame for frame in frames if not frame.isdigit()] == []  # a digit: the socket's own ping


def test_a_narrow_screen_shows_all_without_scrolling_sideways(plane: Any, page: Page, charts: Any) -> None:
    job = plane.submit("good-narrow")
    plane.when(job["id"], "succeeded")
    page.set_viewport_size({"width": 390, "height": 800})
    for path in ("/", f"/jobs/{job['id']}"):
        page.goto(plane.url + path)
        expect(page.get_by_text("good-narrow").first).to_be_visible()
        if path != "/":
            expect(page.locator(".tw-log")).to_contain_text("step 60 loss")
            charts.until(lambda: charts.painted(0) > 1000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_many_jobs_are_paged_newest_first(plane: Any, page: Page) -> None:
    running = [plane.submit(f"slow-{index}") for index in range(4)]
    for job in running:  # every slot is taken, so the next ones wait and start no process
        plane.when(job["id"], "running")
    for index in range(26):
        plane.submit(f"queued-{index}")
    page.goto(plane.url)
    rows = page.locator(".tw-grid-row[data-job]")
    expect(rows).to_have_count(25)
    expect(rows.first).to_contain_text("queued-25")
    page.get_by_role("button", name="Next", exact=True).click()
    expect(rows.first).to_contain_text("queued-0")
    expect(page.get_by_text("Page 2")).to_be_visible()
    page.get_by_role("button", name="Back", exact=True).click()
    expect(rows.first).to_contain_text("queued-25")
    expect(page.get_by_role("button", name="Back", exact=True)).to_be_disabled()


def test_an_open_page_comes_back_to_life_after_a_restart(plane: Any, browser: Browser) -> None:
    plane.cancel_all()
    job = plane.submit("slow-restart")
    plane.when(job["id"], "running")
    page = browser.new_page()  # without the fixture: that its socket breaks is the point
    page.goto(f"{plane.url}/jobs/{job['id']}")
    expect(page.locator(".tw-chip")).to_have_text("running", timeout=SOON)
    plane.kill()
    plane.start()
    plane.http.post(f"/v1/jobs/{job['id']}/cancel")
    expect(page.locator(".tw-chip")).to_have_text("cancelled", timeout=2 * SOON)
    page.close()
