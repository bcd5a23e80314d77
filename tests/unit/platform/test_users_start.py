"""Where a control plane starts and by which names it answers: never off loopback without an admin who can log in."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.platform.conftest import control_plane
from twinstep.platform.api.limits import ADDRESSES, FAILURES, FAILURES_IN_ALL, Failures
from twinstep.platform.scheduler.accounts import Accounts, _no_admin, create_offline
from twinstep.platform.server import serve
from twinstep.platform.settings import Settings
from twinstep.platform.store.store import Store
from twinstep.platform.store.users import new_token
from twinstep.spec.errors import UnavailableError
from twinstep.spec.roles import BOOTSTRAP, Role

AWAY = "10.255.255.1"  # no address of this machine: what listens there has been checked before


@pytest.fixture
def away(settings: Settings) -> Settings:
    return replace(settings, host=AWAY)


def prepared(store: Store, settings: Settings) -> Accounts:
    accounts = Accounts(store.database, settings)
    accounts.prepare(settings)
    return accounts


def make(store: Store, **more: Any) -> tuple[Any, str]:
    told = {"role": Role.ADMIN, "everywhere": True, "created_by": "test"} | more
    return Accounts(store.database, Settings(data_dir=Path("x"))).users.create_token("root", **told)


def test_off_loopback_it_does_not_start_without_an_admin_who_can_log_in(store, away) -> None:
    with pytest.raises(UnavailableError, match="no admin's token") as caught:
        prepared(store, away)
    assert "--admin --offline" in caught.value.remedy
    make(store, expires_at=time.time() - 1)
    with pytest.raises(UnavailableError):
        prepared(store, away)
    make(store, role=Role.VIEWER)
    make(store, everywhere=False)
    with pytest.raises(UnavailableError):
        prepared(store, away)
    make(store)
    assert prepared(store, away).asks_for_login() is True


def test_a_process_that_may_not_start_says_so_and_serves_nothing(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", host="0.0.0.0", port=0)  # noqa: S104
    with pytest.raises(UnavailableError, match="no admin's token") as caught:
        serve(settings, on_ready=lambda url: pytest.fail("it must not be ready"), pages=False)
    assert list(tmp_path.iterdir()) == []
    assert caught.value.remedy.endswith(f"--offline --data-dir {tmp_path / 'data'}")


def test_what_makes_the_first_token_names_a_database_without_its_password(tmp_path: Path) -> None:
    url = "postgresql://ada:secret@db/twinstep"
    spaced = tmp_path / "my data"
    for settings, says in (
        (Settings(data_dir=spaced, host="0.0.0.0"), f"--data-dir '{spaced}'"),  # noqa: S104
        (Settings(data_dir=spaced, database_url=url, host="0.0.0.0"), "--database-url URL"),  # noqa: S104
    ):
        remedy = _no_admin(settings).remedy
        assert remedy.endswith(says)
        assert "secret" not in remedy


def test_on_loopback_it_asks_once_there_was_a_token_and_for_good(store, settings) -> None:
    assert prepared(store, settings).asks_for_login() is False
    make(store, expires_at=time.time() - 1)
    assert prepared(store, settings).asks_for_login() is True
    assert prepared(store, replace(settings, no_login=True)).asks_for_login() is False


def test_a_token_made_beside_a_running_control_plane_is_noticed(live) -> None:
    assert live.http.get("/v1/jobs").status_code == 200
    create_offline(live.plane.settings, "ada", role=Role.ADMIN, everywhere=True, expires_at=None)
    ends = time.monotonic() + 20
    while live.http.get("/v1/jobs").status_code == 200 and time.monotonic() < ends:
        time.sleep(0.05)
    assert live.http.get("/v1/jobs").status_code == 401


def test_the_bootstrap_token_is_an_admins_as_long_as_the_secret_holds_it(store, away, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with_file = replace(away, bootstrap_token_file=file)
    with pytest.raises(UnavailableError, match="cannot be read"):
        prepared(store, with_file)
    for wrong in ("", "tsp_short", "x" * 60, "tsp_" + "\u00e9" * 43):
        file.write_text(wrong)
        with pytest.raises(UnavailableError):
            prepared(store, with_file)
    first, second = new_token(), new_token()
    file.write_text(first + "\n")
    for _ in range(2):  # a second replica, or a second start, makes no second token
        principal = prepared(store, with_file).by_token(first)
        assert principal is not None
        assert (principal.user, principal.role, principal.everywhere) == (BOOTSTRAP, Role.ADMIN, True)
    users = prepared(store, with_file).users
    assert len(users.list_tokens()) == 1
    made, _ = users.create_token("ada", role=Role.ADMIN, everywhere=True, created_by=BOOTSTRAP)
    file.write_text(second)
    after = prepared(store, with_file)
    assert after.by_token(first) is None
    assert after.by_token(second) is not None
    assert {each.id for each in users.list_tokens() if each.usable(time.time())} >= {made.id}
    # An admin's word stands over the Secret's.
    users.revoke_token(next(each.id for each in users.list_tokens(user=BOOTSTRAP) if each.usable(time.time())))
    assert prepared(store, with_file).by_token(second) is None


def test_names_from_afar_are_answered_once_a_login_is_asked_for(settings) -> None:
    told = replace(settings, public_url="https://Twinstep.example.com", allowed_hosts=("other.example.com",))
    with control_plane(told) as live:
        far = {"host": "twinstep.example.com"}
        assert live.http.get("/v1/jobs", headers=far).status_code == 403
        users = live.plane.service.accounts.users
        _, secret = users.create_token("root", role=Role.ADMIN, everywhere=True, created_by="test")
        live.plane.service.accounts.look_again()
        bearer = {"authorization": f"Bearer {secret}"}
        assert live.http.get("/v1/jobs", headers=bearer).status_code == 200

        for host in ("twinstep.example.com", "TWINSTEP.example.com:443", "other.example.com", "localhost"):
            assert live.http.get("/v1/session", headers={"host": host}).status_code == 401
        origin = {"origin": "https://twinstep.example.com"}
        opened = live.http.post("/v1/session", json={"token": secret}, headers=far | origin)
        assert opened.status_code == 201
        assert "secure" in opened.headers["set-cookie"].lower()
        assert live.http.post("/v1/session", json={"token": secret}, headers=origin).status_code == 403
        # A page that rebinds its name has no token to send; a worker in a pod has, and comes by a name of the cluster.
        odd = {"host": "evil.example"}
        assert live.http.get("/v1/session", headers=odd).status_code == 403
        assert live.http.get("/v1/session", headers=odd | {"cookie": "twinstep_session=x"}).status_code == 403
        assert live.http.get("/v1/session", headers=odd | bearer).status_code == 200
        assert live.http.get("/v1/session", headers=odd | bearer | {"origin": "http://x.example"}).status_code == 403
        for path in ("/healthz", "/readyz"):
            assert live.http.get(path, headers={"host": "10.1.2.3:8765"}).status_code in (200, 503)
        live.http.headers.update(bearer)


def test_metrics_are_for_those_who_see_every_project_or_for_anybody(settings) -> None:
    with control_plane(settings) as live:
        users = live.plane.service.accounts.users
        _, secret = users.create_token("root", role=Role.ADMIN, everywhere=True, created_by="test")
        _, reader = users.create_token("prom", role=Role.VIEWER, everywhere=True, created_by="root")
        _, member = users.create_token("ada", role=Role.ADMIN, everywhere=False, created_by="root")
        live.plane.service.accounts.look_again()
        codes = {
            token: live.http.get("/metrics", headers={"authorization": f"Bearer {token}"}).status_code
            for token in (secret, reader, member)
        }
        assert list(codes.values()) == [200, 200, 403]
        assert live.http.get("/metrics").status_code == 401
    with control_plane(replace(settings, open_metrics=True)) as live:
        assert live.http.get("/metrics").status_code == 200
        assert live.http.get("/v1/jobs").status_code == 401


@pytest.mark.parametrize(
    "url", ["twinstep.example.com", "ftp://x", "https://", "https://x/path", "https://x:0", "https://["]
)
def test_a_public_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UnavailableError, match="public_url"):
        Settings(data_dir=tmp_path, public_url=url)


def test_failures_are_counted_in_bounded_memory_and_forgiven_with_time(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr("twinstep.platform.api.limits.time.monotonic", lambda: now)
    failures = Failures()
    assert [failures.note("10.0.0.1") for _ in range(FAILURES)] == [None] * FAILURES
    assert failures.note("10.0.0.1") is not None
    assert failures.note("10.0.0.2") is None
    now += 6.5
    assert failures.note("10.0.0.1") is None
    assert failures.note("10.0.0.1") is not None
    # One machine has a /64 of addresses, and a name is no address.
    assert [failures.note(f"2001:db8::{number:x}") for number in range(FAILURES + 1)][-1] is not None
    assert failures.note("not an address") is None
    many = Failures()
    for number in range(ADDRESSES + 500):
        now += 1.0
        many.note(f"10.1.{number >> 8}.{number & 255}")
    assert len(many) == ADDRESSES
    now += 3600
    assert sum(many.note(f"10.9.{n >> 8}.{n & 255}") is None for n in range(1000)) == FAILURES_IN_ALL
