"""A database server that is not there yet, or not any more, and what is said of it to whom."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import make_url

from twinstep.platform.api.waiting import Waiting, answering
from twinstep.platform.scheduler.cluster.connect import ClusterHealth
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.changes import Changes
from twinstep.platform.store.database import Database
from twinstep.spec.errors import UnavailableError

ADDRESS = "https://10.1.2.3:6443"


def _server_only(databases: Any) -> str:
    if databases.kind == "sqlite":
        pytest.skip("a file is there or it is not")
    url: str = databases.new()
    return url


def _by_way_of(link: Path, url: str) -> tuple[Path, str]:
    """Return where a server's socket lies, and the URL by which it is reached once `link` leads there."""
    parsed = make_url(url)
    there = parsed.update_query_dict({"host": str(link)}).render_as_string(hide_password=False)
    return Path(str(parsed.query["host"])), there


def test_a_server_that_comes_late_is_waited_for(
    databases: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "sockets"
    sockets, url = _by_way_of(link, _server_only(databases))
    opening = threading.Timer(1.0, link.symlink_to, args=(sockets,))
    opening.start()
    with (
        caplog.at_level(logging.WARNING),
        closing(Database(url, wait_s=120.0)) as database,
        database.read() as connection,
    ):
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
    opening.join()
    said = [record.getMessage() for record in caplog.records if "waiting for the database" in record.getMessage()]
    assert said
    assert str(link) in said[0]


@pytest.mark.parametrize("wait_s", [0.0, 1.5])
def test_a_server_that_does_not_come_is_told_of_in_the_end(
    databases: Any, wait_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, url = _by_way_of(tmp_path / "sockets", _server_only(databases))
    with caplog.at_level(logging.WARNING), pytest.raises(UnavailableError, match="cannot be used") as told:
        Database(url, wait_s=wait_s)
    assert "does not answer" in told.value.problem
    assert ("waiting for the database" in caplog.text) == (wait_s > 0)


def test_what_another_try_cannot_mend_is_not_waited_for(databases: Any, caplog: pytest.LogCaptureFixture) -> None:
    url = make_url(_server_only(databases)).set(database="nowhere").render_as_string(hide_password=False)
    with pytest.raises(UnavailableError, match="nowhere"):
        Database(url, wait_s=600.0)
    assert "waiting for the database" not in caplog.text


def test_notices_after_the_end_go_nowhere(databases: Any) -> None:
    """The numbers of what was closed are given away again: whatever has them then must hear nothing."""
    changes = Changes()
    changes.share(make_url(_server_only(databases)))
    changes.bump("job-1")
    changes.close()
    pipes = [os.pipe() for _ in range(8)]
    changes.bump("job-2")
    changes.close()
    for read, write in pipes:
        os.close(write)
        assert os.read(read, 10) == b""
        os.close(read)


def test_where_the_cluster_is_is_told_to_those_who_are_known(
    live: Any, users: Any, ask: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = ClusterHealth(
        leads=True,
        watch_age_seconds=None,
        watch_ages_seconds={"Pod": None},
        troubles=[f"the API server at {ADDRESS} does not answer"],
    )
    monkeypatch.setattr(live.plane.service, "_cluster_health", lambda: health)
    assert ADDRESS in live.http.get("/readyz").text
    secret = request.getfixturevalue("admin")
    assert ADDRESS in ask(secret, path="/readyz").text
    for headers in ({}, {"Authorization": "Bearer tsp_wrong"}, {"Cookie": "twinstep_session=x"}):
        with httpx.Client(base_url=live.plane.settings.url, trust_env=False) as http:
            told = http.get("/readyz", headers=headers)
        assert "10.1.2.3" not in told.text
        assert told.json()["cluster"]["troubles"]
        assert "is not heard of" in told.json()["detail"]


def test_where_the_database_is_is_not_told_to_strangers(live: Any, admin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Service) -> Any:
        raise UnavailableError("the database does not answer: connection to 10.1.2.3 failed", remedy="wait")

    monkeypatch.setattr(Service, "readiness", away)
    told = live.http.get("/readyz")
    assert told.status_code == 503
    assert "10.1.2.3" not in told.text


@pytest.mark.parametrize("tells", [True, False], ids=["on loopback", "elsewhere"])
def test_probes_are_answered_while_a_database_is_waited_for(tells: bool) -> None:
    waiting = Waiting(tells_addresses=tells)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with answering(listener, waiting), httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            assert http.get("/healthz").status_code == 200
            assert http.get("/readyz").json()["detail"] == "waits for the database"
            waiting.on_wait(f"connection to {ADDRESS} failed")
            ready = http.get("/readyz")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert ("10.1.2.3" in ready.text) == tells
            assert "waits for the database" in ready.json()["detail"]
            for answer in (http.get("/v1/jobs"), http.post("/v1/jobs", json={"name": "a"}), http.get("/")):
                assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
                assert int(answer.headers["retry-after"]) > 0
                assert ("10.1.2.3" in answer.text) == tells
        with socket.create_connection(listener.getsockname()) as later, listener.accept()[0] as taken:
            assert taken.getsockname() == later.getpeername(), "whoever comes next is served by who comes next"
