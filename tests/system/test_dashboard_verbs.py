"""The questions that a job's page asks before it does something, each answered both ways, over a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakekube.admission import warm
from fakekube.server import FakeServer
from fakekube.simulation import Simulation
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser

IMAGE = "registry.example/worker@sha256:" + "0" * 64
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
FLAT = {"kind": "tpu", "generation": "v6e", "topology": "4x4"}
GPU = {"kind": "gpu", "model": "h100", "count": 8}


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory, make_plane: Any) -> Iterator[Any]:
    """A control plane with a simulated cluster."""
    warm()
    place = tmp_path_factory.mktemp("clustered")
    with FakeServer(place / "cluster") as server, Simulation(server).running() as simulation:
        plane = make_plane(place / "data", kubeconfig=server.kubeconfig)
        plane.start()
        plane.simulation = simulation
        try:
            yield plane
            plane.cancel_all()
        finally:
            plane.kill()


def opened(plane: Any, page: Page, name: str, accelerator: dict[str, Any], *states: str) -> dict[str, Any]:
    """Submit a job, let it come to a state, and open its page."""
    engine = "torchrec" if accelerator["kind"] == "gpu" else "dense"
    job = plane.submit(name, accelerator=accelerator, kubernetes={"image": IMAGE}, embedding={"engine": engine})
    plane.when(job["id"], *states or ("running",))
    page.goto(f"{plane.url}/jobs/{job['id']}")
    expect(page.locator(".tw-chip").first).to_have_text(states[0] if states else "running")
    return job  # type: ignore[no-any-return]


def asked(page: Page, button: str, question: str) -> Locator:
    """Press a button; return the question it asks."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.locator(".tw-dialog:visible")
    expect(dialog).to_contain_text(question)
    return dialog


def said(plane: Any, job: dict[str, Any], name: str) -> int:
    """Return how often something happened to a job."""
    events = plane.http.get(f"/v1/jobs/{job['id']}/events").json()["items"]
    return sum(event["name"] == name for event in events)


def may(page: Page) -> set[str]:
    """Return which of the buttons can be pressed."""
    names = ("Retry", "Resume", "Suspend", "Resize…", "Cancel")
    found = {name: page.get_by_role("button", name=name, exact=True) for name in names}
    return {name for name, button in found.items() if button.is_visible() and button.is_enabled()}


def test_a_job_is_suspended_resumed_cancelled_and_tried_again(clustered: Any, page: Page) -> None:
    job = opened(clustered, page, "steered", TPU)
    assert may(page) == {"Suspend", "Resize…", "Cancel"}
    chip = page.locator(".tw-chip").first

    dialog = asked(page, "Suspend", "Suspend steered?")
    expect(dialog).to_contain_text("its nodes are given back")
    dialog.get_by_role("button", name="Not now").click()
    expect(page.locator(".tw-dialog:visible")).to_have_count(0)
    assert said(clustered, job, "suspend_requested") == 0
    asked(page, "Suspend", "Suspend steered?").get_by_role("button", name="Suspend the job").click()
    expect(chip).to_have_text("queued")
    expect(page.get_by_role("button", name="Resume", exact=True)).to_be_visible()
    assert may(page) == {"Resume", "Resize…", "Cancel"}

    asked(page, "Resume", "Let steered go on?").get_by_role("button", name="Let it go on").click()
    expect(chip).to_have_text("running")
    assert (said(clustered, job, "suspend_requested"), said(clustered, job, "resume_requested")) == (1, 1)

    asked(page, "Cancel", "Cancel steered?").get_by_role("button", name="Keep running").click()
    expect(page.locator(".tw-dialog:visible")).to_have_count(0)
    assert clustered.http.get(f"/v1/jobs/{job['id']}").json()["cancel_requested_at"] is None
    asked(page, "Cancel", "Cancel steered?").get_by_role("button", name="Cancel the job").click()
    expect(chip).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Retry", exact=True)).to_be_visible()
    assert may(page) == {"Retry", "Resume", "Resize…"}

    asked(page, "Retry", "Run steered again?").get_by_role("button", name="Run it again").click()
    expect(chip).to_have_text("running")
    runs = clustered.http.get(f"/v1/jobs/{job['id']}/runs").json()["items"]
    assert [(run["attempt"], run["state"]) for run in runs] == [(1, "cancelled"), (2, "running")]


def test_a_job_goes_on_at_another_size_and_at_none_that_there_is_not(clustered: Any, page: Page) -> None:
    job = opened(clustered, page, "resized", TPU)
    dialog = asked(page, "Resize…", "Run resized at another size?")
    dialog.get_by_role("button", name="Change its size").click()
    expect(dialog.get_by_role("alert")).to_contain_text("no field is given")
    for wrong, told in (("0", "batch_size: 1"), ("99999999", "65536"), ("1.5", "'1.5' is no whole number")):
        dialog.get_by_label("Batch size").fill(wrong)
        dialog.get_by_role("button", name="Change its size").click()
        expect(dialog.get_by_role("alert")).to_contain_text(told)
    assert len(clustered.http.get(f"/v1/jobs/{job['id']}/runs").json()["items"]) == 1
    dialog.get_by_label("Batch size").fill("64")
    dialog.get_by_label("Topology").select_option("2x2x4")
    dialog.get_by_role("button", name="Change its size").click()
    expect(page.locator(".tw-times-name")).to_have_count(2)
    expect(page.locator(".tw-job-head")).to_contain_text("v5p 2x2x4")
    expect(page.locator(".tw-host")).to_have_count(4)
    expect(page.get_by_label("Host", exact=True).locator("option")).to_have_text(["all", "0", "1", "2", "3"])
    clustered.when(job["id"], "running")
    found = clustered.http.get(f"/v1/jobs/{job['id']}").json()
    assert (found["spec"]["accelerator"]["topology"], found["spec"]["data"]["batch_size"]) == ("2x2x4", 64)
    assert found["run_created_at"] > found["created_at"]


@pytest.mark.parametrize(
    ("accelerator", "fields", "path", "value"),
    [
        (GPU, {"GPUs": "16"}, "count", 16),
        (FLAT, {"Topology": "2x4", "Chips per host": "8"}, "chips_per_host", 8),
    ],
    ids=["gpu", "host size"],
)  # fmt: skip
def test_a_resize_has_the_fields_of_its_accelerator(
    clustered: Any, page: Page, accelerator: dict[str, Any], fields: dict[str, str], path: str, value: int
) -> None:
    job = opened(clustered, page, "sized", accelerator, "running", "starting")
    dialog = asked(page, "Resize…", "at another size?")
    for label, given in fields.items():
        field = dialog.get_by_label(label)
        field.fill(given) if label == "GPUs" else field.select_option(given)
    dialog.get_by_role("button", name="Change its size").click()
    expect(page.locator(".tw-times-name")).to_have_count(2)
    assert clustered.http.get(f"/v1/jobs/{job['id']}").json()["spec"]["accelerator"][path] == value


def test_what_became_impossible_while_it_was_asked_is_said_in_the_question(clustered: Any, page: Page) -> None:
    job = opened(clustered, page, "overtaken", TPU)
    dialog = asked(page, "Suspend", "Suspend overtaken?")
    clustered.http.post(f"/v1/jobs/{job['id']}/cancel")
    clustered.when(job["id"], "cancelled")
    dialog.get_by_role("button", name="Suspend the job").click()
    expect(dialog.get_by_role("alert")).to_contain_text("was cancelled already: there is nothing to suspend")
    dialog.get_by_role("button", name="Not now").click()
    assert said(clustered, job, "suspend_requested") == 0
