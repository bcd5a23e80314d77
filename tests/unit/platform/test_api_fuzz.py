"""The whole API, fuzzed from its own OpenAPI document: no failure of ours, nothing undocumented, whoever asks.

Seeded, so that what fails today fails tomorrow. A stream is asked for what it refuses, never to be followed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.unit.platform.conftest import eventually, settings_in
from twinstep.platform.api.access import ROUTES
from twinstep.platform.server import assemble
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import Role

DATABASES = ("sqlite",)


@dataclass
class Fuzzed:
    """A control plane that starts no run, what its document says, and tokens of all kinds."""

    url: str
    schema: Any
    known: dict[str, list[str]]
    tokens: dict[str, str | None]


EXAMPLES = {"admin": 8, "member": 4, "nobody": 1}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = settings_in(tmp_path_factory.mktemp("fuzz") / "data")
        plane = assemble(replace(told, port=listener.getsockname()[1], worker_image="w:1"), pages=False)
        server = uvicorn.Server(uvicorn.Config(plane.app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started)
        users = plane.service.accounts.users
        _, root = users.create_token("root", role=Role.ADMIN, everywhere=True, created_by="test")
        spare, _ = users.create_token("spare", role=Role.ADMIN, everywhere=True, created_by="test")
        _, member = users.create_token("ada", role=Role.SUBMITTER, everywhere=False, created_by="root")
        users.create_project("team", namespace="team", queue=None, image=None)
        users.set_member("team", "ada", Role.SUBMITTER)
        jobs = [
            plane.store.create_job(JobSpec(name="a"), actor="ada", project=project) for project in ("team", "default")
        ]
        known = {
            "job_id": [job.id for job in jobs],
            "run_id": [job.run_id for job in jobs],
            "project": ["team", "default"],
            "user": ["bob"],
            "token_id": [spare.id],
        }
        plane.service._age = lambda: 0.1  # no reconciler passes, so no run starts
        plane.app.state.failures.note = lambda address: None  # how often one may fail is held elsewhere
        url = plane.settings.url
        schema = schemathesis.openapi.from_dict(plane.app.openapi())
        schema.config.update(base_url=url)
        yield Fuzzed(url, schema, known, {"admin": root, "member": member, "nobody": None})
        plane.service.closing.set()
        server.should_exit = True
        thread.join(timeout=20)
        plane.close()


SAID_ELSEWHERE = {
    "/v1/jobs",
    "/v1/jobs:plan",
    "/v1/jobs/{job_id}/resize",
    "/v1/webhooks",
    "/v1/tokens",
    "/v1/projects/{project}/members/{user}",
    "/v1/jobs/{job_id}/stream",
}
"""What a schema cannot say (rules between fields, what is here, what a job is for, names taken) is refused too."""


def check(fuzzed: Fuzzed, case: Any, token: str | None) -> None:
    """Ask, and hold the answer to the document, by every check there is."""
    case.headers = {k: v for k, v in (case.headers or {}).items() if k.lower() not in ("authorization", "cookie")}
    case.cookies = {}
    response = case.call(headers={} if token is None else {"Authorization": f"Bearer {token}"}, timeout=20)
    beyond = [positive_data_acceptance] if case.operation.path in SAID_ELSEWHERE else []
    case.validate_response(response, excluded_checks=beyond)


@pytest.mark.parametrize("who", ["admin", "member", "nobody"])
@pytest.mark.parametrize(("method", "path"), sorted(ROUTES), ids=[" ".join(each) for each in sorted(ROUTES)])
def test_a_route_answers_as_its_document_says(fuzzed: Fuzzed, method: str, path: str, who: str) -> None:
    operation = fuzzed.schema[path][method]

    @seed(20)
    @settings(
        max_examples=EXAMPLES[who],
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        modes = [GenerationMode.NEGATIVE] if path.endswith("/stream") else list(GenerationMode)
        case = data.draw(st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))
        for name, values in fuzzed.known.items():
            if name in (case.path_parameters or {}) and data.draw(st.booleans()):
                case.path_parameters[name] = data.draw(st.sampled_from(values))
        check(fuzzed, case, fuzzed.tokens[who])

    fuzz()


def test_a_route_that_takes_a_key_documents_what_it_makes_and_what_it_finds(fuzzed: Fuzzed) -> None:
    """What comes of a key sent twice is seldom met by chance."""
    found = 0
    for path, operations in fuzzed.schema.raw_schema["paths"].items():
        for method, operation in operations.items():
            if "idempotency-key" in {each["name"].lower() for each in operation.get("parameters", ())}:
                found += 1
                assert {"200", "201"} <= operation["responses"].keys(), f"{method} {path}"
    assert found >= 2
