"""Webhooks: told at least once, in order, signed; nothing lost in a crash; nobody led to where they may not go."""

from __future__ import annotations

import ipaddress
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook as Verifier

from tests.unit.platform.conftest import eventually
from twinstep.platform.scheduler import webhooks
from twinstep.platform.scheduler.webhooks import (
    AT_ONCE,
    EACH,
    FIRST_PAUSE_S,
    GIVE_UP_S,
    MIN_TRIES,
    Messenger,
    Target,
    Webhooks,
    is_public,
    pause,
)
from twinstep.platform.settings import Settings
from twinstep.platform.store import outbox as outbox_module
from twinstep.platform.store.moves import add_event
from twinstep.platform.store.outbox import CLAIM_S, MAX_PAUSE_S, MAX_WEBHOOKS, TYPES, Outbox
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import OutboxRow
from twinstep.spec.errors import ConflictError, NotFoundError, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.states import RunState

SPEC = JobSpec(name="a-job")


@dataclass
class Receiver:
    """A server that notes what it is sent."""

    url: str
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: Callable[[int], int] = lambda number: 204
    """The status of the answer to the nth message, from 0."""

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                found.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status = found.answers(len(found.got) - 1)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", found.url)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(f"http://127.0.0.1:{server.server_address[1]}/hook")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@dataclass
class Side:
    """Webhooks of a store, delivered by hand; a clock that can be set."""

    store: Store
    settings: Settings
    clock: dict[str, float]

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.store.database)
        self.target = Target(self.settings)
        self.hooks = Webhooks(self.outbox, self.target)

    def deliver(self, rounds: int = 1) -> None:
        messenger = Messenger(self.outbox, self.target)
        with ThreadPoolExecutor(4) as pool:
            for _ in range(rounds):
                messenger.run_once(pool)
                wait(messenger.under_way)
        messenger.stop()

    def later(self, seconds: float) -> None:
        self.clock["now"] += seconds


@pytest.fixture
def side(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Side:
    clock = {"now": 1_800_000_000.0}
    for module in (outbox_module, webhooks):
        monkeypatch.setattr(module, "time", _Clock(clock))
    return Side(store, settings, clock)


class _Clock:
    def __init__(self, clock: dict[str, float]) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock["now"]


def queue(store: Store) -> Any:
    job = store.create_job(SPEC)
    store.move(job.run_id, to=RunState.QUEUED, if_version=1, reason="waits", actor="scheduler")
    return job


def test_what_happens_is_posted_in_order_signed_and_in_words(side: Side, receiver: Receiver) -> None:
    hook, secret = side.hooks.create(receiver.url, [])
    job = queue(side.store)
    side.deliver(rounds=3)
    submitted, queued = receiver.messages()
    assert (submitted["type"], queued["type"]) == ("job.submitted", "run.queued")
    assert queued["version"] == 1
    assert queued["data"] == {
        "event_id": queued["data"]["event_id"], "job_id": job.id, "job_name": "a-job", "run_id": job.run_id,
        "attempt": 1, "state": "queued", "state_before": "pending", "reason": "waits", "actor": "scheduler",
    }  # fmt: skip
    assert queued["timestamp"].endswith("Z")
    assert side.hooks.get(hook.id).waiting == 0
    for headers, body in receiver.got:
        assert headers["content-type"] == "application/json"
        assert headers["webhook-id"].startswith(job.id)
        assert secret not in str(headers) + body.decode()
    with pytest.MonkeyPatch.context() as patch:  # the verifier compares with the real clock
        patch.setattr("standardwebhooks.webhooks.datetime", _Now(side.clock["now"]))
        for headers, body in receiver.got:
            assert Verifier(secret).verify(body, headers) == json.loads(body)
            with pytest.raises(Exception, match="signature"):
                Verifier(secret).verify(body + b" ", headers)


class _Now:
    """datetime, at another time."""

    def __init__(self, now: float) -> None:
        self._now = now

    def now(self, tz: Any = None) -> Any:
        import datetime

        return datetime.datetime.fromtimestamp(self._now, tz)

    def fromtimestamp(self, *args: Any, **kwargs: Any) -> Any:
        import datetime

        return datetime.datetime.fromtimestamp(*args, **kwargs)


def test_only_what_was_asked_for_is_told(side: Side, receiver: Receiver) -> None:
    side.hooks.create(receiver.url, ["run.queued"])
    job = queue(side.store)
    side.store.request_cancel(job.run_id, actor="user")
    side.deliver(rounds=3)
    assert [each["type"] for each in receiver.messages()] == ["run.queued"]


def test_a_message_is_in_the_outbox_iff_its_event_is_stored(side: Side, receiver: Receiver) -> None:
    first = side.store.create_job(SPEC)
    hook, _ = side.hooks.create(receiver.url, [])
    with side.store.database.write() as connection:
        add_event(connection, job_id=first.id, run_id=None, time=0.0, name="restarted", actor="", reason="", data={})
        connection.rollback()
    assert side.hooks.get(hook.id).waiting == 0
    side.store.create_job(SPEC)
    assert side.hooks.get(hook.id).waiting == 1


def test_a_message_that_is_not_taken_comes_again_with_its_id_and_body_and_keeps_those_behind_it(
    side: Side, receiver: Receiver
) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    receiver.answers = lambda number: 500 if number < 2 else 204
    queue(side.store)
    for _ in range(4):
        side.deliver(rounds=2)
        side.later(MAX_PAUSE_S)
    assert [each["type"] for each in receiver.messages()] == ["job.submitted"] * 3 + ["run.queued"]
    assert len({(headers["webhook-id"], body) for headers, body in receiver.got[:3]}) == 1
    found = side.hooks.get(hook.id)
    assert (found.failing_since, found.last_error, found.waiting) == (None, None, 0)


def test_a_webhook_that_fails_is_asked_with_one_message_at_a_time_and_others_go_on(
    side: Side, receiver: Receiver
) -> None:
    broken, _ = side.hooks.create("http://127.0.0.1:9/closed", [])
    side.hooks.create(receiver.url, [])
    for _ in range(5):
        side.store.create_job(SPEC)
    side.deliver(rounds=5)
    assert len(receiver.got) == 5
    found = side.hooks.get(broken.id)
    assert (found.waiting, found.last_error is not None, found.failing_since) == (5, True, side.clock["now"])
    side.later(MAX_PAUSE_S)
    assert len(side.outbox.claim(limit=8)) == 1


@contextmanager
def slow_receiver(letters: bytes) -> Iterator[str]:
    """The URL of a server that takes connections and answers with a letter every so often, and never to its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = threading.Event()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                for letter in itertools.cycle(letters) if letters else ():
                    connection.sendall(bytes([letter]))
                    if ends.wait(0.05):
                        return
                ends.wait(60)

        def take() -> None:
            with suppress(OSError):
                while not ends.is_set():
                    connection, _ = listener.accept()
                    threads.append(threading.Thread(target=answer, args=(connection,)))
                    threads[-1].start()

        threads = [threading.Thread(target=take)]
        threads[0].start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/slow"
        ends.set()
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("letters", [b"", b"x"], ids=["silent", "trickles"])
def test_a_slow_webhook_keeps_no_other_waiting_and_is_given_up_in_time(
    side: Side, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, letters: bytes
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 6.0)  # on a busy machine, too, longer than telling the others takes
    messenger = Messenger(side.outbox, side.target, every_seconds=0.02)
    with slow_receiver(letters) as url:
        slow, _ = side.hooks.create(url, [])
        side.hooks.create(receiver.url, [])
        for _ in range(AT_ONCE + 4):  # more than there is room for
            side.store.create_job(SPEC)
        messenger.start()
        eventually(lambda: len(receiver.got) == AT_ONCE + 4)
        assert side.hooks.get(slow.id).failing_since is None, "the others were told before that one was given up"
        eventually(lambda: "did not answer within 6 s" in (side.hooks.get(slow.id).last_error or ""))
        messenger.stop()


def test_of_one_webhook_a_few_are_taken_at_once_and_what_is_left_out_is_left(side: Side, receiver: Receiver) -> None:
    first, second = (side.hooks.create(receiver.url, [])[0].id for _ in range(2))
    for _ in range(4):
        side.store.create_job(SPEC)
    taken = [each.webhook_id for each in side.outbox.claim(limit=8, each=2)]
    assert sorted(taken) == sorted([first, first, second, second])
    assert {each.webhook_id for each in side.outbox.claim(limit=8, each=2, under_way={first: 2})} == {second}
    assert side.outbox.claim(limit=0) == []


def test_no_more_are_on_their_way_to_one_webhook_than_may_and_one_where_it_fails(side: Side) -> None:
    class Pool:
        """Messages stay on their way until somebody says what came of them."""

        def submit(self, deliver: object, message: Any) -> Future[None]:
            future: Future[None] = Future()
            sent.append((future, message))
            return future

    sent: list[tuple[Future[None], Any]] = []
    messenger, pool = Messenger(side.outbox, side.target), cast(ThreadPoolExecutor, Pool())
    side.hooks.create("http://127.0.0.1:9/closed", [])
    for _ in range(EACH + 4):
        side.store.create_job(SPEC)
    for _ in range(3):
        messenger.run_once(pool)
        assert len(messenger.under_way) == EACH
        future, message = next(each for each in sent if not each[0].done())
        side.outbox.delivered(message)
        future.set_result(None)
    messenger.run_once(pool)
    future, message = next(each for each in sent if not each[0].done())
    side.outbox.put_off(message, "is away", pause_s=1.0, webhook_pause_s=1.0, drop=False)
    future.set_result(None)
    side.later(2.0)
    messenger.run_once(pool)
    assert len(messenger.under_way) == EACH - 1, "one of before is on its way still: no second probe"


def test_what_one_that_died_had_taken_is_told_by_the_next(side: Side, receiver: Receiver) -> None:
    side.hooks.create(receiver.url, [])
    side.store.create_job(SPEC)
    (taken,) = side.outbox.claim(limit=8)  # and then the control plane is killed
    assert side.outbox.claim(limit=8) == []
    side.later(CLAIM_S + 1)
    side.deliver()
    ((headers, _),) = receiver.got
    assert headers["webhook-id"] == f"{taken.job_id}.{taken.event_id}"


def test_of_several_that_deliver_at_once_each_message_is_taken_by_one(side: Side, receiver: Receiver) -> None:
    side.hooks.create(receiver.url, [])
    for _ in range(12):
        side.store.create_job(SPEC)
    with ThreadPoolExecutor(4) as pool:
        taken = [each.place for part in pool.map(lambda _: side.outbox.claim(limit=8), range(8)) for each in part]
    taken += [each.place for each in side.outbox.claim(limit=20)]
    assert len(taken) == len(set(taken)) == 12


def test_a_webhook_that_takes_nothing_for_days_is_told_nothing_more_and_says_why(
    side: Side, receiver: Receiver
) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    receiver.answers = lambda number: 503
    side.store.create_job(SPEC)
    for _ in range(MIN_TRIES + 2):
        side.deliver()
        side.later(GIVE_UP_S / MIN_TRIES + 1)
    found = side.hooks.get(hook.id)
    assert found.disabled_reason == "it has taken no message for 3 days; last: answered 503"
    assert found.waiting == 0
    side.store.create_job(SPEC)
    assert side.hooks.get(hook.id).waiting == 0


def test_a_clock_that_is_set_forward_disables_nothing(side: Side, receiver: Receiver) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    receiver.answers = lambda number: 500 if number < 2 else 204
    side.store.create_job(SPEC)
    side.deliver()
    side.later(10 * 365 * 86400)
    side.deliver()
    side.later(MAX_PAUSE_S)
    side.deliver()
    assert side.hooks.get(hook.id).disabled_at is None
    assert len(receiver.got) == 3


def test_a_clock_that_is_set_back_delays_nothing_for_long(side: Side, receiver: Receiver) -> None:
    side.hooks.create(receiver.url, [])
    receiver.answers = lambda number: 500 if number < 1 else 204
    side.store.create_job(SPEC)
    side.deliver()
    side.later(-10 * 365 * 86400)
    side.deliver()
    assert len(receiver.got) == 2


def test_one_message_that_is_never_taken_does_not_stop_the_others(side: Side, receiver: Receiver) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    first = side.store.create_job(SPEC)
    receiver.answers = lambda number: 400 if first.id.encode() in receiver.got[number][1] else 204
    for _ in range(MIN_TRIES + 2):
        side.store.create_job(SPEC)
        side.deliver(rounds=2)
        side.later(GIVE_UP_S / MIN_TRIES + 1)
    side.deliver(rounds=3)
    found = side.hooks.get(hook.id)
    assert (found.waiting, found.disabled_at) == (0, None)
    assert sum(each["data"]["job_id"] != first.id for each in receiver.messages()) == MIN_TRIES + 2


def test_gone_is_taken_at_its_word(side: Side, receiver: Receiver) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    receiver.answers = lambda number: 410
    side.store.create_job(SPEC)
    side.deliver()
    assert "gone" in (side.hooks.get(hook.id).disabled_reason or "")


def test_redirects_are_not_followed(side: Side, receiver: Receiver) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    receiver.answers = lambda number: 302
    side.store.create_job(SPEC)
    side.deliver()
    assert len(receiver.got) == 1
    assert side.hooks.get(hook.id).last_error == "answered 302"


@given(attempts=st.integers(1, 10_000), share=st.floats(0, 1))
def test_pauses_grow_and_are_bounded_whatever_chance_says(attempts: int, share: float) -> None:
    assert FIRST_PAUSE_S / 2 <= pause(attempts, share=share) <= MAX_PAUSE_S
    assert pause(attempts, share=share) <= pause(attempts + 1, share=share)


REFUSED = [
    "ftp://example.org/x",
    "https://",
    "https://user:pw@example.org/",
    "http://example.org/",
    "https://10.0.0.1/",
    "https://169.254.169.254/latest/meta-data",
    "https://192.168.1.1/",
    "https://100.64.0.1/",
    "https://[::1]/",
    "https://[::ffff:10.0.0.1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[64:ff9b::a00:1]/",
    "https://[2002:a00:1::]/",
    "https://[fd00::1]/",
    "https://0.0.0.0/",
    "https://224.0.0.1/",
    "https://127.0.0.1/",
    "https://localhost/",
    "http://127.0.0.1/",
    "https://exa mple.org/",
    "https://example.org:0/",
    "https://example.org:99999/",
    "https://example.org/\n",
    "https://" + "a" * 3000,
    "https://internal.example/",
    "",
]


def resolve(host: str, port: int) -> list[str]:
    known = {
        "example.org": ["93.184.216.34"],
        "internal.example": ["93.184.216.34", "10.1.2.3"],
        "localhost": ["127.0.0.1"],
    }
    return known.get(host) or ([host] if host[:1].isdigit() or ":" in host else [])


def off_loopback(settings: Settings) -> Settings:
    remote = replace(settings)
    object.__setattr__(remote, "host", "10.9.8.7")
    return remote


@pytest.mark.parametrize("url", REFUSED)
def test_nobody_is_led_to_where_they_may_not_go(settings: Settings, url: str) -> None:
    with pytest.raises(SpecError) as caught:
        Target(off_loopback(settings), resolve=resolve).check(url)
    assert caught.value.faults[0].field == "url"


@pytest.mark.parametrize("inside", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1"])
@pytest.mark.parametrize(
    "around",
    [
        "{old}", "::{old}", "::ffff:{old}", "::ffff:0:{old}", "64:ff9b::{old}", "64:ff9b:1::{old}", "2002:{hex}::1",
        "2001:0:5db8:d822:0:1:{inverse}", "2606:2800:220:1:0:5efe:{old}", "2606:2800:220:1:200:5efe:{old}",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_none_however_it_is_wrapped(around: str, inside: str) -> None:
    packed = ipaddress.IPv4Address(inside).packed.hex()
    inverse = f"{int(packed, 16) ^ 0xFFFFFFFF:08x}"
    parts = {"hex": f"{packed[:4]}:{packed[4:]}", "inverse": f"{inverse[:4]}:{inverse[4:]}"}
    assert not is_public(around.format(old=inside, **parts))


NOWHERE = (
    "::/3", "4000::/2", "8000::/1", "fec0::/10", "fe80::/10", "fc00::/7", "ff00::/8", "5f00::/16", "100::/64",
    "2001:db8::/32", "2001::/23", "3fff::/20", "192.0.0.0/24", "192.88.99.0/24", "100.64.0.0/10", "198.18.0.0/15",
    "240.0.0.0/4", "224.0.0.0/4", "0.0.0.0/8",
)  # fmt: skip


@pytest.mark.parametrize("network", NOWHERE)
@given(share=st.floats(0, 1))
def test_no_address_of_a_network_that_is_nobodys_is_public(network: str, share: float) -> None:
    found = ipaddress.ip_network(network)
    address = found[min(found.num_addresses - 1, int(share * found.num_addresses))]
    mapped = getattr(address, "ipv4_mapped", None)
    assert not is_public(str(address)) or (mapped is not None and is_public(str(mapped)))


@pytest.mark.parametrize(
    "url", ["https://example.org/x?y=1", "https://example.org:8443/", "https://[2606:2800:220::1]/"]
)
def test_public_addresses_by_https_are_reached(settings: Settings, url: str) -> None:
    parts, address = Target(off_loopback(settings), resolve=resolve).check(url)
    assert parts.geturl() == url
    assert address in ("93.184.216.34", "2606:2800:220::1")


def test_a_host_that_the_owner_names_is_reached_and_loopback_from_loopback(settings: Settings) -> None:
    named = replace(off_loopback(settings), host="127.0.0.1", webhook_hosts=("10.0.0.1",))
    assert Target(off_loopback(named), resolve=resolve).check("http://10.0.0.1:9093/x")[1] == "10.0.0.1"
    assert Target(settings, resolve=resolve).check("http://localhost:1/")[1] == "127.0.0.1"
    with pytest.raises(SpecError):
        Target(settings, resolve=resolve).check("https://10.0.0.1/")


def test_a_name_that_leads_elsewhere_later_is_not_followed(side: Side, receiver: Receiver) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    side.target = Target(off_loopback(side.settings))  # as if the name had come to mean another address since
    side.store.create_job(SPEC)
    side.deliver()
    assert receiver.got == []
    assert "not https" in (side.hooks.get(hook.id).last_error or "")


def test_there_is_a_bound_on_webhooks(side: Side, receiver: Receiver) -> None:
    for _ in range(MAX_WEBHOOKS):
        side.hooks.create(receiver.url, [])
    with pytest.raises(ConflictError):
        side.hooks.create(receiver.url, [])


def test_the_outbox_of_a_webhook_that_is_deleted_goes_with_it(side: Side, receiver: Receiver) -> None:
    hook, _ = side.hooks.create(receiver.url, [])
    side.store.create_job(SPEC)
    side.hooks.delete(hook.id)
    side.deliver()
    assert receiver.got == []
    with side.store.database.read() as connection:
        assert connection.execute(OutboxRow.__table__.select()).all() == []
    with pytest.raises(NotFoundError):
        side.hooks.delete(hook.id)


def test_no_event_of_the_control_plane_has_a_type_that_nobody_can_ask_for() -> None:
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    place = spec_from_file_location("docs_generate_events", Path(__file__).parents[3] / "docs/generate.py")
    assert place is not None
    assert place.loader is not None
    generate = module_from_spec(place)
    place.loader.exec_module(generate)
    ours = {row[0] for row in generate.EVENTS if row[1] != "worker"} - {"submitted", "state_changed", "reports_lost"}
    assert {f"run.{name}" for name in ours} <= set(TYPES)


def test_over_http_a_webhook_is_made_listed_told_and_deleted(live: Any, receiver: Receiver, wait: Any) -> None:
    answer = live.http.post("/v1/webhooks", json={"url": receiver.url, "types": ["run.succeeded"]})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert made["secret"].startswith("whsec_")
    job = live.submit("reports-1")
    live.when(job["id"], "succeeded")
    ((headers, body),) = wait(lambda: list(receiver.got))
    assert Verifier(made["secret"]).verify(body, headers)["data"]["job_id"] == job["id"]
    listed = live.http.get("/v1/webhooks")
    assert made["secret"] not in listed.text
    assert [hook["id"] for hook in listed.json()["items"]] == [made["webhook"]["id"]]
    path = f"/v1/webhooks/{made['webhook']['id']}"
    assert "secret" not in live.http.get(path).json()
    assert live.http.delete(path).status_code == 204
    assert live.http.get(path).status_code == 404
    assert live.http.delete(path).status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": "https://x", "typ": []}, "typ"),
        ({"url": 1}, "url"),
        ({}, "url"),
        ({"url": "https://127.0.0.2:1/", "types": ["run.fail"]}, "types"),
    ],
)
def test_a_webhook_that_is_none_is_refused_by_field(shared: Any, body: dict[str, Any], field: str) -> None:
    answer = shared.http.post("/v1/webhooks", json=body)
    assert answer.status_code == 422
    assert answer.json()["faults"][0]["field"] == field
    assert not any("secret" in value for value in answer.text.split())
