"""Users of all roles who mean harm, many at once, on a control plane with logins: nobody gets further than they may."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.unit.platform.conftest import Live, control_plane, settings_in
from twinstep.platform.api.access import ROUTES
from twinstep.spec.roles import Role

DATABASES = ("postgresql",)
THREADS, REQUESTS = 8, 60
OWN, OTHER = "ours", "theirs"
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
ODD_PARTS = ["..", "%00", "%ed%a0%80", "job-0';--", "*", "a" * 300, "%E2%80%AE", "{0}", "%0d%0aX-Injected:%20b"]
ODD_BODIES = [
    b"", b"{}", b"[]", b"null", b"\x00", b"\xff", b"[" * 5000, b'{"a":1,"a":2}', b"NaN", b'"\\ud800"', b"1e999",
    b'{"name": "a\\u0000b"}', b'{"user": "root", "role": "admin", "everywhere": true}', b'{"role": "admin"}',
    b'{"name": "x", "kubernetes": {"namespace": "kube-system"}}', b'{"url": "http://169.254.169.254/"}',
    b'{"records": [{"kind": "metric", "seq": 1, "time": 1e308, "step": 1, "values": {"\\u0000": 1e999}}]}',
]  # fmt: skip
ODD_QUERIES = [
    "",
    "?limit=-1",
    "?cursor=%00",
    "?q=%27%3B--",
    "?project=theirs",
    "?after=99999999999999999999",
    "?limit=1&limit=2",
]


@dataclass
class House:
    """A control plane with two projects, and who belongs where."""

    live: Live
    tokens: dict[str, str]
    jobs: dict[str, str]
    """A job of each project."""

    def ask(self, who: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.tokens[who]}", **more.pop("headers", {})}
        return self.live.http.request(method, path, headers=headers, **more)

    def standing(self) -> dict[str, Any]:
        """What those outside a project may not change."""
        job = self.ask("root", "GET", f"/v1/jobs/{self.jobs[OTHER]}").json()
        return {
            "job": {name: job[name] for name in ("run_id", "attempt", "spec", "project", "cancel_requested_at")},
            "jobs": len(self.ask("root", "GET", f"/v1/jobs?project={OTHER}&limit=200").json()["items"]),
            "members": self.ask("root", "GET", f"/v1/projects/{OTHER}/members").json(),
            "projects": self.ask("root", "GET", "/v1/projects").json(),
            "tokens": [each["id"] for each in self.ask("root", "GET", "/v1/tokens").json()["items"]],
            "webhooks": self.ask("root", "GET", "/v1/webhooks").json(),
        }


@pytest.fixture(scope="module")
def house(databases: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    settings = replace(settings_in(tmp_path_factory.mktemp("house") / "data"), database_url=databases.new())
    with control_plane(settings) as live:
        users = live.plane.service.accounts.users
        for project in (OWN, OTHER):
            users.create_project(project, namespace="default", queue=None, image=None)
        made = {"root": (Role.ADMIN, True), "chief": (Role.ADMIN, False), "worker": (Role.SUBMITTER, False),
                "guest": (Role.VIEWER, False), "stranger": (Role.SUBMITTER, False)}  # fmt: skip
        tokens = {
            name: users.create_token(name, role=role, everywhere=everywhere, created_by="test")[1]
            for name, (role, everywhere) in made.items()
        }
        live.plane.service.accounts.look_again()
        for name, role in (("chief", Role.ADMIN), ("worker", Role.SUBMITTER), ("guest", Role.VIEWER)):
            users.set_member(OWN, name, role)
        jobs = {
            project: live.plane.service.submit_job(_spec("sleeps"), project=project, actor="root").id
            for project in (OWN, OTHER)
        }
        yield House(live, tokens, jobs)
        live.http.headers["authorization"] = f"Bearer {tokens['root']}"


def _spec(name: str) -> Any:
    from twinstep.spec.job import JobSpec

    return JobSpec(name=name)


def _requests(house: House, dice: random.Random) -> Iterator[tuple[str, str, dict[str, Any]]]:
    while True:
        method, path = dice.choice(sorted(ROUTES))
        parts = [house.jobs[OTHER], house.jobs[OWN], OTHER, "root", "default", *ODD_PARTS]
        there = "/".join(dice.choice(parts) if part.startswith("{") else part for part in path.split("/"))
        kind = dice.choice(["application/json", "application/json", "application/yaml", "text/plain", ""])
        body = dice.choice(ODD_BODIES) if method in ("POST", "PUT") else b""
        headers = {"content-type": kind} if kind and body else {}
        if dice.random() < 0.2:
            headers["idempotency-key"] = dice.choice(["a", "b" * 300, "c d"])
        yield method, there + dice.choice(ODD_QUERIES), {"content": body, "headers": headers}


@pytest.mark.parametrize("who", ["chief", "worker", "guest", "stranger"])
def test_many_who_mean_harm_at_once_reach_nothing_of_others(
    house: House, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, seen, wrong = house.standing(), Counter[int](), list[str]()
    lock = threading.Lock()

    def harms(seed: int) -> None:
        requests = _requests(house, random.Random(f"{who} {seed}"))
        for _ in range(REQUESTS):
            method, path, more = next(requests)
            if path.endswith("/stream") or "/stream?" in path:
                continue  # goes on for as long as its job does
            answer = house.ask(who, method, path, **more)
            told = f"{method} {path} {more['content'][:60]!r} -> {answer.status_code} {answer.text[:200]}"
            bad = answer.status_code >= 500 or "x-injected" in answer.headers or "Traceback" in answer.text
            bad |= answer.status_code >= 400 and answer.headers["content-type"] != "application/problem+json"
            bad |= any(secret in answer.text for secret in house.tokens.values())
            with lock:
                seen[answer.status_code] += 1
                if bad:
                    wrong.append(told)

    with caplog.at_level(logging.ERROR):
        threads = [threading.Thread(target=harms, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert house.standing() == before
    assert seen[403] + seen[404] > sum(seen.values()) / 4, seen
    assert house.ask("guest", "GET", f"/v1/jobs/{house.jobs[OWN]}").status_code == 200, "who may, still can"


def test_what_was_refused_stands_in_the_audit_log_by_who_tried(house: House) -> None:
    for method, path, body in (
        ("POST", "/v1/tokens", {"user": "guest", "role": "admin", "everywhere": True}),
        ("PUT", f"/v1/projects/{OWN}/members/guest", {"role": "admin"}),
        ("POST", f"/v1/jobs/{house.jobs[OWN]}/cancel", None),
    ):
        answer = house.ask("guest", method, path, **({} if body is None else {"content": json.dumps(body),
                           "headers": {"content-type": "application/json"}}))  # fmt: skip
        assert answer.status_code == 403, answer.text
    lines = house.ask("root", "GET", "/v1/audit?limit=200").json()["items"]
    refused = {line["action"] for line in lines if line["actor"] == "guest" and line["outcome"] == "refused"}
    assert {"token.create", "member.set", "job.cancel"} <= refused
    assert house.ask("root", "GET", f"/v1/jobs/{house.jobs[OWN]}").json()["cancel_requested_at"] is None


def test_a_token_that_is_revoked_under_load_is_good_for_nothing_more(house: House) -> None:
    users = house.live.plane.service.accounts.users
    token, secret = users.create_token("worker", role=Role.SUBMITTER, everywhere=False, created_by="test")
    house.tokens["short"] = secret
    answers: list[int] = []

    def uses() -> None:
        for number in range(30):
            answers.append(house.ask("short", "GET", f"/v1/jobs?limit={number + 1}").status_code)

    threads = [threading.Thread(target=uses) for _ in range(4)]
    for thread in threads:
        thread.start()
    revoked = house.ask("root", "DELETE", f"/v1/tokens/{token.id}")
    after = [house.ask("short", "GET", "/v1/jobs").status_code for _ in range(3)]
    for thread in threads:
        thread.join()
    assert revoked.status_code == 200
    assert set(after) <= {401, 429}
    assert set(answers) <= {200, 401, 429}
    assert house.ask("worker", "GET", "/v1/jobs").status_code == 200, "others of the same user stay good"
