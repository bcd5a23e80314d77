"""Logs: one form for machines and one for people, what a record is about on each, no secret in any."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.logs import FACTS, STRUCK, about, facts, note, redacted, set_up
from twinstep.spec.errors import UnavailableError

DATABASES = ("sqlite",)
SECRET = "Hunter2Hunter2"  # noqa: S105


@pytest.fixture
def logged() -> Iterator[Callable[..., io.StringIO]]:
    """Sets up logging into a text, and puts everything back."""
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers, logging.getLogger().level
    quiet = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "alembic", "urllib3", "kubernetes")}

    def start(form: str = "json", level: str = "info") -> io.StringIO:
        text = io.StringIO()
        set_up({"TWINSTEP_LOG_FORMAT": form, "TWINSTEP_LOG_LEVEL": level}, in_cluster=False, stream=text)
        return text

    yield start
    root.handlers = handlers
    root.setLevel(level)
    for name, before in quiet.items():
        logging.getLogger(name).setLevel(before)


def records(text: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


def test_a_record_is_one_json_object_with_what_it_is_about(logged: Callable[..., io.StringIO]) -> None:
    text = logged()
    with about(request_id="r-1"):
        note(job_id="job-1", run_id=None)
        with about(run_id="run-1"):
            logging.getLogger("twinstep.x").info("said %s\nand more", "this", extra={"status": 200})
        logging.getLogger("twinstep.x").warning("later")
    logging.getLogger("twinstep.x").error("apart")
    first, second, third = records(text)
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "twinstep.x", "said this\nand more")
    assert {name: first.get(name) for name in FACTS} == {
        "request_id": "r-1", "job_id": "job-1", "run_id": "run-1", "project": None,
    }  # fmt: skip
    assert first["status"] == 200
    assert first["time"].endswith("+00:00")
    assert "run_id" not in second
    assert not set(FACTS) & set(third)


def test_what_is_bound_is_a_threads_own_and_goes_along_with_its_context() -> None:
    seen: list[dict[str, str]] = []
    with about(run_id="run-1"):
        apart = threading.Thread(target=lambda: seen.append(facts()))
        along = threading.Thread(target=copy_context().run, args=(lambda: seen.append(facts()),))
        for thread in (apart, along):
            thread.start()
            thread.join()
    assert seen == [{}, {"run_id": "run-1"}]
    assert facts() == {}
    note(run_id="nowhere")
    assert facts() == {}


def test_for_people_a_line_ends_with_what_it_is_about(logged: Callable[..., io.StringIO]) -> None:
    text = logged("human", "warning")
    with about(run_id="run-1"):
        logging.getLogger("twinstep.x").info("too little")
        logging.getLogger("twinstep.x").warning("said")
    assert text.getvalue().endswith("WARNING twinstep.x: said [run_id=run-1]\n")
    assert "too little" not in text.getvalue()


@pytest.mark.parametrize("environ", [{"TWINSTEP_LOG_FORMAT": "xml"}, {"TWINSTEP_LOG_LEVEL": "loud"}])
def test_a_form_or_level_that_is_none_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UnavailableError) as caught:
        set_up(environ, in_cluster=False)
    assert "give one of" in caught.value.remedy


NAMES = [
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "db_password",
    "API_KEY",
    "apiKey",
    "PGPASSWORD",
    "MY_CREDENTIALS",
    "token",
]
SAYINGS = [
    "{name}={value}",
    "env {{'{name}': '{value}'}}",
    '{{"{name}": "{value}", "x": 1}}',
    "{{'name': '{name}', 'value': '{value}'}}",
    '{{"name":"{name}","value":"{value}"}}',
    "{name}: {value}",
    "export {name}='{value}' && run",
]
OTHERS = [
    "Authorization: Bearer {value}",
    "authorization: bearer {value}",
    "{{'Authorization': 'Bearer {value}'}}",
    "Basic {value}",
    "postgresql://user:{value}@host/db",
    "a token tsp_{value} here",
    "whsec_{value}",
    "TWINSTEP_RUN_TOKEN={value} TWINSTEP_RUN_ID=run-1",
]


@pytest.mark.parametrize("form", ["json", "human"])
@pytest.mark.parametrize(
    "said",
    [saying.format(name=name, value=SECRET) for saying in SAYINGS for name in NAMES]
    + [o.format(value=SECRET) for o in OTHERS],
)
def test_no_secret_is_written_wherever_it_stands(logged: Callable[..., io.StringIO], said: str, form: str) -> None:
    text = logged(form)
    log = logging.getLogger("twinstep.x")
    log.info(said)
    log.info("%s", said)
    log.info("extra", extra={"found": said, "deep": {"list": [said]}})
    try:
        raise ValueError(said)
    except ValueError:
        log.exception("failed")
    assert SECRET not in text.getvalue()
    assert STRUCK in text.getvalue()


def test_a_field_whose_name_says_secret_is_struck_out_whole(logged: Callable[..., io.StringIO]) -> None:
    text = logged()
    logging.getLogger("twinstep.x").info("x", extra={"env": {"HF_TOKEN": SECRET, "HOME": "/root"}, "run_token": SECRET})
    (found,) = records(text)
    assert SECRET not in text.getvalue()
    assert found["env"] == {"HF_TOKEN": STRUCK, "HOME": "/root"}


@pytest.mark.parametrize(
    "plain",
    [
        "its worker ended with exit code 1",
        "max_tokens=512 uih_budget=2048",
        "http://127.0.0.1:8765/v1/jobs",
        "run run-1m8mhy7cn9a1b2 of job-1m8mhy7cn8qfw6",
        "the run token is missing or wrong",
        "https://example.org:8443/x@y",
    ],
)
def test_what_is_no_secret_stays(plain: str) -> None:
    assert redacted(plain) == plain


@pytest.mark.parametrize("word", ["a", "token", "secret.", "name=", "a://b:", "'name': 'token', "])
def test_a_long_text_is_looked_through_once(word: str) -> None:
    """A pattern that begins anew at every letter would be at this for days, and hold up every thread meanwhile."""
    text = word * 40_000
    assert len(redacted(text)) <= 3 * len(text)


@given(st.text(max_size=300))
def test_striking_out_twice_is_striking_out_once(text: str) -> None:
    assert redacted(redacted(text)) == redacted(text)


def test_each_request_and_each_event_is_logged_with_its_ids_and_no_token(
    live: Any, logged: Callable[..., io.StringIO], wait: Any
) -> None:
    text = logged("json", "debug")
    job = live.submit("reports-2")
    run_id = job["run_id"]
    live.when(job["id"], "succeeded")
    answer, by_name = (live.http.get(f"/v1/jobs/{named}") for named in (job["id"], "reports-2"))
    live.http.get("/v1/nothing-at/all?token=" + SECRET)
    found = wait(lambda: [each for each in records(text) if each.get("status") == 404] and records(text))
    access = [each for each in found if each["logger"] == "twinstep.access"]
    assert {each["route"] for each in access} >= {"/v1/jobs", "/v1/jobs/{job_id}", "/v1/runs/{run_id}/reports"}
    for each in (answer, by_name):
        asked = next(line for line in access if line.get("request_id") == each.headers["x-request-id"])
        assert (asked["job_id"], asked["status"], asked["method"]) == (job["id"], 200, "GET")
    assert asked["ms"] >= 0
    told = [each for each in found if each["message"].startswith("run.") and each.get("run_id") == run_id]
    assert {each["message"].partition(":")[0] for each in told} >= {"run.starting", "run.running", "run.succeeded"}
    assert all(each["job_id"] == job["id"] for each in told)
    assert (live.plane.settings.runs_dir / run_id / "token").read_text().strip() not in text.getvalue()
    assert SECRET not in text.getvalue()
