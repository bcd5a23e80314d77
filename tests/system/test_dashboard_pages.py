"""Pages beyond the list in a real browser: comparing, looking closer, queues, runs, colour schemes, log in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import text

from twinstep.platform.store.changes import Changes
from twinstep.platform.store.database import Database
from twinstep.platform.store.logs import Logs, LogSource, Place
from twinstep.platform.store.moves import add_events, warned

pytestmark = pytest.mark.browser

SOON = 15_000
POINTS = 1_000_000
LONG = ("job-00000000000099", "run-00000000099001")
EVIL_METRIC = "<img src=x onerror=window.hacked=1>=cmd()"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, make_plane: Any, seeded: Any) -> Iterator[Any]:
    """A control plane with a hundred jobs; one has a million points, and one two runs of different specs."""
    plane = make_plane(tmp_path_factory.mktemp("filled") / "data")
    plane.data_dir.mkdir(mode=0o700)
    database = Database(f"sqlite:///{plane.data_dir / 'twinstep.db'}")
    seeded.fill_jobs(database, 100)
    seeded.fill_points(database, LONG[1], POINTS)
    for number in (98, 97, 96):
        seeded.fill_points(database, f"run-{number:011d}001", 2000, names=("loss", "eval/auc"), seed=number)
    seeded.fill_points(database, "run-00000000098001", 30, names=(EVIL_METRIC,))
    with database.write() as connection:
        connection.execute(
            text(
                "UPDATE runs SET spec = (SELECT replace(spec, '\"batch_size\": 32', '\"batch_size\": 64') FROM jobs"
                " WHERE id = 'job-00000000000090') WHERE job_id = 'job-00000000000090' AND attempt = 2"
            )
        )
        connection.execute(
            text(
                "UPDATE runs SET state = 'queued', finished_at = NULL, backend = 'kubernetes', summary = NULL,"
                " reason = 'waits for quota in its queue: <b>128</b> chips' WHERE job_id = 'job-00000000000094'"
            )
        )
        connection.execute(text("UPDATE runs SET backend = 'kubernetes' WHERE job_id = 'job-00000000000097'"))
        told = ["no kubernetes.queue: pods wait", "preflight: the <b>table</b> item_id is too large"]
        add_events(connection, [warned("job-00000000000094", "run-00000000094001", 1.0, told)])
    logs = Logs(database, Changes())
    for host in (0, 3):
        source = LogSource(
            run_id="run-00000000097001",
            pod_uid=f"u{host}",
            container="worker",
            pod=f"p{host}",
            role="worker",
            host=host,
        )
        opened = logs.open(source)
        assert opened is not None
        logs.append(opened, f"<i>said by {host}</i>\n".encode(), Place(time="2026-01-01T00:00:00Z", count=1))
    database.close()
    plane.start()
    try:
        yield plane
    finally:
        plane.kill()


def compare(plane: Any, *numbers: int, more: str = "") -> str:
    return f"{plane.url}/compare?jobs={','.join(f'job-{number:014d}' for number in numbers)}{more}"


def test_a_million_points_are_drawn_with_their_spike_and_looked_at_closer(filled: Any, page: Page, charts: Any) -> None:
    page.goto(f"{filled.url}/jobs/{LONG[0]}")
    charts.until(lambda: len(charts.points(0)) > 200)
    points = charts.points(0)
    assert len(points) <= 520
    assert points[-1][0] == POINTS
    band = page.evaluate(
        """() => getElement(Number(document.querySelector('.tw-chart').id.slice(1))).chart.getOption()
                 .series[2].data.map((point) => point[1])"""
    )
    assert max(band) > 4  # one step of a million
    assert any(value is None for _, value in points)  # the gap is left open
    page.evaluate(
        """() => getElement(Number(document.querySelector('.tw-chart').id.slice(1))).chart
                 .dispatchAction({type: 'dataZoom', start: 29.84, end: 29.87})"""
    )
    charts.until(lambda: charts.points(0)[0][0] > 290_000)
    near = charts.points(0)
    assert near[-1][0] - near[0][0] < 2000
    charts.until(lambda: any(abs((value or 0) - 5.0) < 1e-6 for _, value in charts.points(0)))
    page.evaluate(
        """() => getElement(Number(document.querySelector('.tw-chart').id.slice(1))).chart
                 .dispatchAction({type: 'restore'})"""
    )
    charts.until(lambda: charts.points(0)[0][0] < 10_000)


def test_four_jobs_are_compared_on_one_chart_per_metric(filled: Any, page: Page, charts: Any) -> None:
    page.goto(compare(filled, 98, 97, 96, 95))
    expect(page.get_by_role("heading", name="Compare 4 jobs")).to_be_visible()
    expect(page.locator(".tw-chart")).to_have_count(3)
    for line in range(3):
        charts.until(lambda line=line: len(charts.points(0, line)) > 100)
    rough = charts.points(0)
    page.get_by_label("Smoothing").select_option("0.98")
    charts.until(lambda: charts.points(0) != rough)
    page.wait_for_function("location.search.includes('smooth=0.98')")
    expect(page.locator(".tw-best").first).to_be_visible()
    expect(page.get_by_text("optimizers.dense.lr")).to_be_visible()
    expect(page.get_by_text("model.embedding_dim")).to_have_count(0)
    page.get_by_label("Over").select_option("time")
    page.wait_for_url("**x=time**")
    charts.until(lambda: len(charts.points(0)) > 100)
    assert charts.points(0)[0][0] >= 0
    page.get_by_label("Leave out sweep-00095").click()
    expect(page.get_by_role("heading", name="Compare 3 jobs")).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_a_comparison_is_taken_along_as_picture_and_table(filled: Any, page: Page, charts: Any, tmp_path: Path) -> None:
    page.goto(compare(filled, 98, 97))
    charts.until(lambda: len(charts.points(0)) > 100)
    with page.expect_download() as told:
        page.get_by_role("button", name="PNG").first.click()
    told.value.save_as(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert told.value.suggested_filename == "twinstep-loss.png"
    with page.expect_download() as told:
        page.get_by_role("button", name="CSV").click()
    told.value.save_as(tmp_path / "table.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert {row["job"] for row in rows} == {"sweep-00098", "sweep-00097"}
    assert EVIL_METRIC in {row["metric"] for row in rows}


def test_hostile_names_of_metrics_stay_text(filled: Any, page: Page, charts: Any) -> None:
    page.goto(compare(filled, 98))
    expect(page.get_by_role("heading", name=EVIL_METRIC[:20])).to_be_visible()
    box = page.locator(".tw-chart").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator(".tw-chart").last).to_contain_text("sweep-00098")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("jobs", ["", "job-none", "job-none,<script>window.hacked=1</script>", "," * 3000])
def test_nothing_to_compare_says_what_to_do(filled: Any, page: Page, jobs: str) -> None:
    page.goto(f"{filled.url}/compare?jobs={jobs}&x=none&smooth=9")
    expect(page.get_by_text("Nothing to compare")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()


def test_what_differs_between_two_runs_is_shown_line_by_line(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/jobs/job-00000000000090")
    documents = page.locator(".tw-card", has=page.get_by_role("heading", name="Spec", exact=True))
    expect(documents.locator(".tw-yaml")).to_contain_text("batch_size: 64")
    documents.get_by_label("Against").select_option("1")
    expect(documents.locator(".tw-add").last).to_have_text("+  batch_size: 64")
    expect(documents.locator(".tw-gone").last).to_have_text("-  batch_size: 32")
    documents.get_by_label("Show").select_option("manifests")
    expect(documents.locator(".tw-yaml")).to_have_text("No difference.")
    documents.get_by_label("Against").select_option("0")
    expect(documents.locator(".tw-yaml")).to_contain_text("own machine")
    page.goto(f"{filled.url}/jobs/job-00000000000097")
    documents.get_by_label("Show").select_option("manifests")
    expect(documents.locator(".tw-yaml")).to_contain_text("kind: JobSet")
    expect(page.locator(".tw-host")).to_have_count(32)


def test_a_log_is_narrowed_to_one_host_and_its_cell_tells_of_it(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/jobs/job-00000000000097")
    log = page.locator(".tw-log")
    expect(log).to_contain_text("<i>said by 0</i>")
    expect(log).to_contain_text("<i>said by 3</i>")
    page.get_by_label("Host", exact=True).select_option("3")
    expect(log).not_to_contain_text("said by 0")
    expect(log).to_contain_text("<i>said by 3</i>")
    page.get_by_label("Host", exact=True).select_option("7")
    expect(log).not_to_contain_text("said by")
    expect(page.locator(".tw-host-ended")).to_have_count(2)
    cell = page.locator(".tw-host").nth(3)
    cell.focus()
    assert "pod p3" in str(cell.get_attribute("aria-label"))
    assert "<i>said by 3</i>" in str(cell.get_attribute("title"))


def test_a_log_is_looked_through_and_taken_along(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/jobs/job-00000000000097")
    log, find = page.locator(".tw-log"), page.get_by_label("Find in the log")
    expect(log).to_contain_text("<i>said by 3</i>")
    page.keyboard.press("/")
    expect(find).to_be_focused()
    page.keyboard.type("SAID BY 3")
    expect(log).not_to_contain_text("said by 0")
    expect(log).to_contain_text("<i>said by 3</i>")
    find.fill("nowhere")
    expect(page.get_by_text("No line of the newest ones holds this.")).to_be_visible()
    find.fill("")
    expect(log).to_contain_text("said by 0")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "sweep-00097-run-00000000097001.log"
    text = Path(download.value.path()).read_text()
    assert "said by 0" in text
    assert "said by 3" in text


def test_metrics_without_a_chart_of_their_own_are_drawn_once_they_are_asked_for(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/jobs/job-00000000000098")
    more = page.locator("details.tw-more")
    expect(more).to_contain_text("More metrics", timeout=SOON)
    expect(more.locator(".tw-card")).to_have_count(0)
    more.locator("summary").click()
    expect(more.locator(".tw-card h2")).to_have_text([EVIL_METRIC], timeout=SOON)
    expect(more.locator(".tw-chart")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    page.goto(f"{filled.url}/jobs/job-00000000000096")
    expect(page.get_by_role("heading", name="sweep-00096")).to_be_visible()
    expect(more).to_be_hidden()


def test_a_page_is_found_by_a_jobs_name_and_its_tab_says_how_it_ended(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/jobs/sweep-00096")
    expect(page.get_by_text("job-00000000000096", exact=True)).to_be_visible()
    expect(page).to_have_title("✓ sweep-00096 · Twinstep")


def test_the_reference_of_the_api_is_looked_through(filled: Any, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{filled.url}/")
    page.get_by_role("link", name="API", exact=True).click()
    expect(page.get_by_role("heading", name="REST API")).to_be_visible()
    parts = page.locator(".tw-ref-part:visible")
    page.get_by_label("Search the reference").fill("idempotency-key resize")
    expect(parts).to_have_count(1)
    expect(parts).to_contain_text("/v1/jobs/{job_id}/resize")
    expect(parts.locator("pre")).to_contain_text(f"{filled.url}/v1/jobs/JOB_ID/resize")
    page.get_by_label("Search the reference").fill("no such thing")
    expect(page.get_by_text("Nothing here has these words.")).to_be_visible()
    assert all(url.startswith((filled.url, "data:")) for url in asked), "nothing comes from elsewhere"


def test_a_failed_job_is_run_again_from_its_page(filled: Any, page: Page) -> None:
    job = filled.submit("bad-again")
    filled.when(job["id"], "failed")
    page.goto(f"{filled.url}/jobs/{job['id']}")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("Run bad-again again?")).to_be_visible()
    page.get_by_role("button", name="Run it again").click()
    runs = page.locator(".tw-runs")
    expect(runs).to_contain_text("2", timeout=SOON)
    expect(page.locator(".tw-times-name")).to_have_count(2, timeout=SOON)
    expect(page.locator(".tw-event-run").first).to_have_text("Run 2")
    events = page.locator(".tw-event:visible")
    page.get_by_label("Show").first.select_option("compile")
    expect(events.first).to_have_class("tw-event tw-event-compile tw-by-compile")
    filled.when(job["id"], "failed")


def test_what_speaks_against_a_run_stands_on_its_page(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/jobs/job-00000000000094")
    box = page.locator(".tw-reason").filter(has_text="Let through with warnings")
    expect(box).to_be_visible(timeout=SOON)
    expect(box).to_contain_text("preflight: the <b>table</b> item_id is too large")
    expect(page.locator(".tw-event").filter(has_text="pods wait")).to_have_count(1)
    page.goto(f"{filled.url}/jobs/job-00000000000097")
    expect(page.get_by_role("heading", name="sweep-00097")).to_be_visible()
    expect(box).to_be_hidden()


def test_a_run_shows_where_its_time_went_and_what_its_traced_steps_did(filled: Any, page: Page) -> None:
    job = filled.submit("spends")
    filled.when(job["id"], "succeeded")
    page.goto(f"{filled.url}/jobs/{job['id']}")
    goodput, traced = (
        page.locator(".tw-card").filter(has=page.get_by_role("heading", name=name, exact=True))
        for name in ("Goodput", "Profile")
    )
    expect(goodput).to_contain_text("80.0%", timeout=SOON)
    expect(goodput).to_contain_text("step 80.0 % · 1 min 20 s")
    expect(goodput).to_contain_text("chip-hours 0.5000")
    expect(goodput).to_contain_text("tokens/s 7,200")
    expect(goodput.locator(".tw-times-part")).to_have_count(3)
    widths = [
        part.evaluate("each => each.getBoundingClientRect().width") for part in goodput.locator(".tw-times-part").all()
    ]
    assert widths[0] / sum(widths) == pytest.approx(0.8, abs=0.03)
    expect(traced).to_contain_text("steps 20 to 24", timeout=SOON)
    expect(traced).to_contain_text("compute 60.0 %")
    expect(traced).to_contain_text("host input 30.0 %")
    expect(traced).to_contain_text("/data/profile")
    expect(traced.locator(".tw-times-part")).to_have_count(3)


def test_the_queue_tells_what_waits_and_why(filled: Any, page: Page) -> None:
    page.goto(f"{filled.url}/queue")
    waiting = page.locator(".tw-waiting")
    expect(waiting).to_contain_text("sweep-00094")
    expect(waiting).to_contain_text("waits for quota in its queue: <b>128</b> chips")
    expect(waiting).to_contain_text("v5p 4x4x8")
    expect(page.locator(".tw-facts")).to_contain_text("128")
    page.get_by_role("link", name="sweep-00094").click()
    expect(page.get_by_role("heading", name="sweep-00094")).to_be_visible()


def test_the_colour_scheme_follows_the_system_until_one_is_chosen_and_kept(filled: Any, browser: Browser) -> None:
    context = browser.new_context(color_scheme="dark", viewport={"width": 1320, "height": 900})
    page = context.new_page()
    page.goto(filled.url)
    ground = "getComputedStyle(document.body).backgroundColor"
    page.wait_for_function(f"{ground} === 'rgb(15, 18, 22)'")
    switch = page.locator(".tw-scheme")
    switch.click()
    page.wait_for_function(f"{ground} === 'rgb(247, 248, 250)'")
    page.goto(f"{filled.url}/queue")
    page.wait_for_function(f"{ground} === 'rgb(247, 248, 250)'")
    switch.click()
    page.wait_for_function(f"{ground} === 'rgb(15, 18, 22)'")
    switch.click()
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{ground} === 'rgb(247, 248, 250)'")
    context.close()


@pytest.mark.parametrize(
    "path", ["/", "/queue", "/docs", "/compare?jobs=job-00000000000098,job-00000000000097", "/jobs/" + LONG[0]]
)
def test_every_text_of_every_page_is_read_in_both_schemes(filled: Any, browser: Browser, path: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1320, "height": 900})
        page = context.new_page()
        page.goto(filled.url + path)
        page.wait_for_function(
            "document.querySelectorAll('.tw-card').length > 0 && !!document.querySelector('.q-layout, #app, .tw-ref')"
        )
        page.wait_for_timeout(500)
        assert page.evaluate(CONTRAST) == []
        context.close()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/queue",
        "/docs",
        "/compare?jobs=job-00000000000098,job-00000000000097,job-00000000000096,job-00000000000095",
        "/jobs/job-00000000000090",  # of two runs
        "/jobs/job-00000000000097",  # of many hosts
    ],
)
def test_every_page_fits_a_narrow_screen(filled: Any, page: Page, path: str) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(filled.url + path)
    expect(page.locator(".tw-card:visible").first).to_be_visible()
    page.wait_for_timeout(500)
    wide = """() => [...document.querySelectorAll('.tw-runs, .tw-waiting, .tw-queues')]
              .filter((t) => t.checkVisibility() && t.scrollWidth > t.clientWidth).map((t) => t.className)"""
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(wide) == []


CONTRAST = """() => {
  const parse = (c) => {
    const srgb = c.match(/color\\(srgb ([\\d.]+) ([\\d.]+) ([\\d.]+)(?: \\/ ([\\d.]+))?\\)/);
    if (srgb) return [255 * srgb[1], 255 * srgb[2], 255 * srgb[3], srgb[4] === undefined ? 1 : Number(srgb[4])];
    const m = c.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => sum + share * linear(c[i] / 255), 0);
  const bad = [];
  for (const e of document.querySelectorAll('main *, header *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.disabled || e.closest('[disabled]')) continue;
    const chain = []; for (let p = e; p; p = p.parentElement) chain.unshift(p);
    let ground = [255, 255, 255, 1];
    for (const p of chain) ground = over(parse(getComputedStyle(p).backgroundColor), ground);
    const text = over(parse(getComputedStyle(e).color), ground);
    const [high, low] = [light(text), light(ground)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) bad.push(`${e.className}: ${e.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(bad)];
}"""
