"""When hosts were last heard of: the newest restart of each, its last line, whatever was written in it."""

from __future__ import annotations

from twinstep.platform.store.logs import Logs, LogSource, Place
from twinstep.platform.store.store import Store
from twinstep.spec.job import JobSpec


def say(logs: Logs, run_id: str, data: bytes, at: str, **who: object) -> None:
    fields = {"pod_uid": f"uid-{who}", "container": "worker", "role": "worker"} | who
    source = logs.open(LogSource(run_id=run_id, pod=f"pod-{who['host']}", **fields))  # type: ignore[arg-type]
    assert source is not None
    assert logs.append(source, data, Place(time=at, count=len(data))) is not None


def test_each_host_tells_the_end_of_what_its_newest_container_said(store: Store) -> None:
    run_id = store.create_job(JobSpec(name="heard")).run_id
    logs = Logs(store.database, store.changes)
    assert store.heard_hosts(run_id) == []
    say(logs, run_id, b"old\n", "2026-01-01T00:00:00.123456789Z", slice=0, host=0, restart=0)
    say(logs, run_id, b"step 1\nstep 2 \xff<b>\n\n", "2026-01-01T00:00:10.123456789Z", slice=0, host=0, restart=1)
    say(logs, run_id, b"x" * 5000 + b"end", "2026-01-01T00:00:05Z", slice=1, host=3, restart=1)
    found = {(each.slice, each.host): each for each in store.heard_hosts(run_id)}
    assert set(found) == {(0, 0), (1, 3)}
    first = found[0, 0]
    assert (first.restart, first.line, first.pod) == (1, "step 2 \ufffd<b>", "pod-0")
    assert first.time is not None
    assert 1767225610 <= first.time < 1767225611
    assert found[1, 3].line == "x" * 397 + "end"


def test_a_container_that_said_nothing_has_no_time(store: Store) -> None:
    run_id = store.create_job(JobSpec(name="silent")).run_id
    logs = Logs(store.database, store.changes)
    logs.open(LogSource(run_id=run_id, pod_uid="u", container="worker", pod="p", role="worker", slice=0, host=1))
    logs.open(LogSource(run_id=run_id, pod_uid="h", container="head", pod="h", role="head"))
    (only,) = store.heard_hosts(run_id)
    assert (only.host, only.time, only.line, only.ended) == (1, None, "", False)
