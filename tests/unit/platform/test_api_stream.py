"""Server-sent events of a job: all of it, once, in order; from any point on; for many at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from twinstep.platform.api.stream import LOG_BYTES, Cursor, Follower
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.troubles import TransientError
from twinstep.spec.job import JobSpec


@dataclass
class Message:
    event: str
    id: str
    data: Any


def messages(live: Any, job_id: str, *, last: str = "", stop_after: int | None = None, **params: Any) -> list[Message]:
    headers = {"last-event-id": last} if last else {}
    with live.http.stream("GET", f"/v1/jobs/{job_id}/stream", headers=headers, params=params) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = []
        for message in parse(answer.iter_lines()):
            found.append(message)
            if stop_after is not None and len(found) >= stop_after:
                break
        return found


def parse(lines: Iterator[str]) -> Iterator[Message]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Message(fields["event"], fields["id"], json.loads(fields["data"]))
            fields = {}
        else:
            fields = {}


def content(found: list[Message]) -> dict[str, Any]:
    return {
        "events": [m.data["id"] for m in found if m.event == "event"],
        "steps": [p["step"] for m in found if m.event == "metrics" for p in m.data["items"]],
        "log": "".join(m.data["text"] for m in found if m.event == "log"),
        "end": [m.data["state"] for m in found if m.event == "end"],
    }


def test_a_stream_tells_all_of_a_job_and_ends_with_it(shared) -> None:
    job = shared.submit("reports-9")
    found = messages(shared, job["id"])
    told = content(found)
    assert told["steps"] == list(range(1, 10))
    assert told["end"] == ["succeeded"]
    assert found[-1].event == "end"
    everything = shared.http.get(f"/v1/jobs/{job['id']}/events").json()["items"]
    assert told["events"] == [event["id"] for event in everything]
    states = [m.data["state"] for m in found if m.event == "state"]
    assert states[-1] == "succeeded"
    assert "spec" not in found[0].data


def test_a_stream_taken_up_again_at_any_message_misses_nothing_and_repeats_nothing(shared) -> None:
    job = shared.submit("shouts")
    shared.when(job["id"], "succeeded")
    whole = messages(shared, job["id"])
    for cut in range(1, len(whole)):
        rest = messages(shared, job["id"], last=whole[cut - 1].id)
        both = whole[:cut] + rest
        assert content(both)["events"] == content(whole)["events"]
        assert content(both)["log"] == content(whole)["log"]
        assert rest[-1].event == "end"


def test_a_follower_that_is_cut_off_while_the_job_runs_goes_on_where_it_was(shared) -> None:
    job = shared.submit("reports-30")
    found: list[Message] = []
    while not found or found[-1].event != "end":
        found += messages(shared, job["id"], last=found[-1].id if found else "", stop_after=6)
    assert content(found)["steps"] == list(range(1, 31))
    assert content(found)["events"] == sorted(set(content(found)["events"]))


def test_many_follow_one_job_and_all_see_all_of_it(shared) -> None:
    job = shared.submit("reports-20")
    seen: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: seen.append(content(messages(shared, job["id"])))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(seen) == 20
    assert all(one["steps"] == list(range(1, 21)) and one["end"] == ["succeeded"] for one in seen)


def test_a_burst_of_log_is_sent_page_by_page_before_the_follower_rests(store, settings) -> None:
    job = store.create_job(JobSpec(name="a-job"))
    service = Service(store, settings)
    directory = service.run_dir(job.run_id)
    directory.prepare(JobSpec(name="a-job"))
    follower = Follower(service, job, Cursor(), frozenset({"log"}))

    def sent() -> str:
        text = ""
        while not follower.idle():
            pages = follower.look()
            assert all(len(page.data.text) <= LOG_BYTES for page in pages)
            text += "".join(page.data.text for page in pages)
        return text

    assert sent() == ""
    burst = "".join(f"line {index} é\n" for index in range(20_000))
    directory.log_path.write_text(burst)
    assert sent() == burst
    directory.log_path.write_bytes(burst.encode() + b"half \xc3")
    assert sent() == "half "
    directory.log_path.write_bytes(burst.encode() + b"half \xc3\xa9")
    assert sent() == "é"


def test_only_the_kinds_asked_for_are_sent(shared) -> None:
    job = shared.submit("reports-3")
    assert {m.event for m in messages(shared, job["id"], kinds=["metrics"])} == {"metrics", "end"}


@pytest.mark.parametrize("bad", ["x", "1.2.3", "1.2.run.-1", "1.2.run.1.5", f"{2**70}.0.run.0", "١.0.run.x"])
def test_a_last_event_id_that_is_none_is_refused(shared, bad: str) -> None:
    job = shared.submit("reports-1")
    answer = shared.http.get(f"/v1/jobs/{job['id']}/stream", headers={"last-event-id": bad.encode()})
    assert (answer.status_code, answer.json()["faults"][0]["field"]) == (422, "Last-Event-ID")


def test_who_follows_a_name_is_not_led_into_the_middle_of_another_job(shared) -> None:
    first = shared.submit("reports-1")
    last = messages(shared, "reports-1")[-1].id
    assert messages(shared, first["id"], last=last)[-1].event == "end"
    second = shared.submit("reports-1")
    answer = shared.http.get("/v1/jobs/reports-1/stream", headers={"last-event-id": last})
    assert (answer.status_code, answer.json()["faults"][0]["field"]) == (422, "Last-Event-ID")
    assert second["id"] in answer.text
    assert messages(shared, first["id"], last=last)[-1].event == "end", "by its id it goes on"
    assert content(messages(shared, "reports-1"))["steps"] == [1]


def test_who_comes_back_after_a_retry_goes_on_with_the_new_run(shared) -> None:
    job = shared.submit("crashes")
    last = messages(shared, job["id"])[-1].id
    assert shared.http.post(f"/v1/jobs/{job['id']}/retry").status_code < 300
    assert content(messages(shared, job["id"], last=last))["end"] == ["failed"]


@pytest.mark.parametrize("asked", ["get_job", "list_events", "list_metrics"])
def test_a_stream_ends_without_its_end_when_the_database_does_not_answer(live, monkeypatch, caplog, asked: str) -> None:
    monkeypatch.setattr("twinstep.platform.api.stream.LOOK_ANYWAY_S", 0.05)
    job = live.submit("sleeps")
    with live.http.stream("GET", f"/v1/jobs/{job['id']}/stream") as answer:
        found = parse(answer.iter_lines())
        last = next(found).id

        def away(*args: object, **kwargs: object) -> None:
            raise TransientError("the database does not answer", remedy="wait until it is up again")

        monkeypatch.setattr(Service, asked, away)
        assert "end" not in [message.event for message in found]  # to its close, which is none of a broken connection
    monkeypatch.undo()
    live.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert messages(live, job["id"], last=last)[-1].event == "end"
    assert "Exception in ASGI application" not in caplog.text


def test_a_stream_ends_without_its_end_when_the_control_plane_goes(live) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "starting")
    found: list[Message] = []
    thread = threading.Thread(target=lambda: found.extend(messages(live, job["id"])))
    thread.start()
    live.plane.service.closing.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert not [m for m in found if m.event == "end"]
