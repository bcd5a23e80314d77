"""Tell webhooks what happens: sign each message, post it, try again later, give up after days.

Signed by the Standard Webhooks scheme (https://www.standardwebhooks.com): HMAC-SHA256 over id, time and body, in the
headers webhook-id, webhook-timestamp and webhook-signature. At least once, always with the same id; of one job in the
order in which things happened.

A webhook's address is a user's word, so what it may reach is checked each time, by the very address that is then
connected to, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import difflib
import hashlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from urllib.parse import SplitResult, urlsplit

import httpx

from twinstep.platform.backoff import backoff
from twinstep.platform.settings import Settings, is_loopback
from twinstep.platform.store.outbox import MAX_PAUSE_S, TYPES, Notice, Outbox, Webhook
from twinstep.spec.address import web_address
from twinstep.spec.errors import Fault, SpecError, TwinstepError, UnavailableError

log = logging.getLogger(__name__)

VERSION = 1
"""Of the message's form: grows when a field goes or changes its meaning; fields may be added without."""
FIRST_PAUSE_S = 5.0
GIVE_UP_S = 3 * 24 * 3600.0
MIN_TRIES = 10  # before anything is given up: a clock that was set forward makes seconds look like days
TIMEOUT_S = 10.0  # from the connection to the end of the answer's head, however slowly that trickles
AT_ONCE = 16  # messages on their way
EACH = 2  # of them to one webhook: a slow one keeps no other waiting
LOOK_S = 1.0
MAX_URL = 2000

Resolve = Callable[[str, int], Sequence[str]]
"""Addresses of a host name."""


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of webhook-signature; `secret` is `whsec_` and base64."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def body_of(message: Notice) -> bytes:
    """Return what is posted: the same bytes at each try."""
    told = {
        "type": message.type,
        "version": VERSION,
        "timestamp": datetime.fromtimestamp(message.time, UTC).isoformat().replace("+00:00", "Z"),
        "data": {
            "event_id": message.event_id,
            "job_id": message.job_id,
            "job_name": message.job_name,
            "run_id": message.run_id,
            "attempt": message.attempt,
            "state": message.data.get("to"),
            "state_before": message.data.get("from"),
            "reason": message.reason,
            "actor": message.actor,
        },
    }
    return json.dumps(told, separators=(",", ":")).encode()


def pause(attempts: int, *, share: float | None = None) -> float:
    """Return the seconds until the next try after so many; `share`, from 0 to 1, is chance's part in it."""
    return backoff(attempts, first=FIRST_PAUSE_S, longest=MAX_PAUSE_S, share=share)


class Target:
    """What may be reached: public addresses by https; from a control plane on loopback also loopback; named hosts."""

    def __init__(self, settings: Settings, *, resolve: Resolve | None = None) -> None:
        self._local = is_loopback(settings.host)
        self._named = frozenset(host.lower() for host in settings.webhook_hosts)
        self._resolve = resolve or _resolve

    def check(self, url: str) -> tuple[SplitResult, str]:
        """Return a URL's parts and the address to connect to.

        Raises:
            SpecError: it may never be reached.
            UnavailableError: its name has no address now.
        """
        parts = self._parts(url)
        host = parts.hostname or ""
        if host in self._named:
            return parts, self._addresses(host, parts)[0]
        if parts.scheme != "https" and not (self._local and is_loopback(host)):
            raise _refused(url, "is not https", "https://…", remedy=f"https://{host}{parts.path}")
        addresses = self._addresses(host, parts)
        for address in addresses:
            if not (is_public(address) or (self._local and is_loopback(address))):
                raise _refused(
                    url, "leads to an address that is not public", "a public host, or one in TWINSTEP_WEBHOOK_HOSTS",
                    remedy=f"TWINSTEP_WEBHOOK_HOSTS={host}, set where the control plane starts",
                )  # fmt: skip
        return parts, addresses[0]

    @staticmethod
    def _parts(url: str) -> SplitResult:
        parts = web_address(url)
        if parts is None or len(url) > MAX_URL or not url.isprintable() or not url.isascii() or " " in url:
            raise _refused(url, "is not the address of a web server", f"https://…, {MAX_URL} characters at most")
        if parts.username is not None or parts.fragment:
            raise _refused(url, "has a user name or a fragment", "a URL without them")
        return parts

    def _addresses(self, host: str, parts: SplitResult) -> Sequence[str]:
        found = self._resolve(host, parts.port or (443 if parts.scheme == "https" else 80))
        if not found:
            raise UnavailableError(f"the host {host} has no address", remedy="see that its name is right")
        return found


def is_public(address: str) -> bool:
    """Say whether an address is one that anybody on the internet reaches, however it is wrapped."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found not in _UNICAST or any(found in each for each in _NO_SERVERS):
            return False
        elif found.packed[8:12] in _ISATAP:
            return False  # an address of the old kind inside, and no server has need of it
    elif any(found in each for each in _OLD_NO_SERVERS):
        return False
    return found.is_global and not found.is_multicast


_UNICAST = ipaddress.ip_network("2000::/3")
"""All that was ever given out: what lies elsewhere leads to this machine, its site, or an address of the old kind.
Source: IANA's registries of IPv6 and IPv4 addresses for special purposes."""
_NO_SERVERS = tuple(map(ipaddress.ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_OLD_NO_SERVERS = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24")))
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")


def _resolve(host: str, port: int) -> Sequence[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _refused(url: str, problem: str, allowed: str, *, remedy: str = "give another url") -> SpecError:
    fault = Fault(field="url", problem=problem, given=repr(url[:118]), allowed=allowed, remedy=remedy)
    return SpecError(f"the webhook cannot be made: url {problem}", remedy=remedy, faults=(fault,))


class Webhooks:
    """What routes and the command may ask: make, list, delete."""

    def __init__(self, outbox: Outbox, target: Target) -> None:
        self._outbox = outbox
        self._target = target

    def create(self, url: str, types: Sequence[str]) -> tuple[Webhook, str]:
        """Store a webhook; return it and the secret that its messages are signed with, which nobody is shown again.

        Raises:
            SpecError: the URL may not be reached, or a type is none.
            ConflictError: there are too many.
        """
        if unknown := [each for each in types if each not in TYPES]:
            near = difflib.get_close_matches(unknown[0], TYPES, n=1, cutoff=0.0)[0]
            fault = Fault(
                field="types", problem="is not a type of event", given=repr(unknown[0][:100]),
                allowed=", ".join(TYPES), remedy=near,
            )  # fmt: skip
            raise SpecError(
                "the webhook cannot be made: a type is no type of event",
                remedy=f"give types such as {near}",
                faults=(fault,),
            )
        self._target.check(url)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        return self._outbox.add(url, sorted(set(types)), secret=secret), secret

    def list(self) -> list[Webhook]:
        """Return every webhook, the oldest first."""
        return self._outbox.all()

    def get(self, hook_id: str) -> Webhook:
        """Return a webhook, or raise NotFoundError."""
        return self._outbox.get(hook_id)

    def delete(self, hook_id: str) -> None:
        """Delete a webhook, or raise NotFoundError; what it was yet to be told goes too."""
        self._outbox.remove(hook_id)


class Messenger:
    """The thread that delivers. Several control planes may each have one: a message is taken by one of them."""

    def __init__(self, outbox: Outbox, target: Target, *, every_seconds: float = LOOK_S) -> None:
        self._outbox = outbox
        self._target = target
        self._every = every_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="webhooks", daemon=True)
        self._tls = httpx.create_ssl_context(trust_env=False)
        self.under_way: dict[Future[None], str] = {}
        """The webhook of each message that is on its way."""

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def stop(self) -> None:
        """End after the messages under way; what waits is for the next control plane."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * TIMEOUT_S)

    def _loop(self) -> None:
        told = ""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._stopping.is_set():
                try:
                    busy = self.run_once(pool)
                    told = ""
                except UnavailableError as error:
                    busy = False
                    if told != str(error):
                        told = str(error)
                        log.error("webhooks are not told of what happens: %s", told)
                except Exception:
                    busy = False
                    log.exception("webhooks are not told of what happens; the next look tries again")
                if busy:  # the next message of a job follows the one before at once
                    wait(self.under_way, timeout=self._every, return_when=FIRST_COMPLETED)
                else:
                    self._stopping.wait(self._every)

    def run_once(self, pool: ThreadPoolExecutor) -> bool:
        """Begin to deliver what is due and there is room for, each message once; say whether any is on its way."""
        done = [future for future in self.under_way if future.done()]
        for future in done:
            del self.under_way[future]
        for future in done:
            future.result()  # the database's trouble, if it had any
        busy = Counter(self.under_way.values())
        for message in self._outbox.claim(limit=AT_ONCE - len(self.under_way), each=EACH, under_way=busy):
            self.under_way[pool.submit(self.deliver, message)] = message.webhook_id
        return bool(self.under_way)

    def deliver(self, message: Notice) -> None:
        """Post one message and note what became of it."""
        problem, gone = self._post(message)
        if not problem:
            self._outbox.delivered(message)
            return
        now = time.time()
        host = urlsplit(message.url).hostname
        log.warning("webhook %s at %s was not told of %s: %s", message.webhook_id, host, message.type, problem)
        tired = message.attempts >= MIN_TRIES
        since = message.failing_since
        if gone:
            self._outbox.disable(message, f"its server said that it is gone: {problem}")
        elif tired and since is not None and now - since > GIVE_UP_S:
            days = GIVE_UP_S / 86400
            self._outbox.disable(message, f"it has taken no message for {days:g} days; last: {problem}")
        else:
            self._outbox.put_off(
                message,
                problem,
                pause_s=pause(message.attempts),
                webhook_pause_s=pause(message.failures + 1),
                drop=tired and now - message.first_tried_at > GIVE_UP_S,
            )

    def _post(self, message: Notice) -> tuple[str, bool]:
        """Return what went wrong, empty where nothing did, and whether the receiver wants no more."""
        body, timestamp = body_of(message), int(time.time())
        message_id = f"{message.job_id}.{message.event_id}"
        try:
            parts, address = self._target.check(message.url)
            headers = {
                "Host": parts.netloc,
                "Content-Type": "application/json",
                "User-Agent": "twinstep-webhooks/1",
                "webhook-id": message_id,
                "webhook-timestamp": str(timestamp),
                "webhook-signature": sign(message.secret, message_id, timestamp, body),
            }
            status = asyncio.run(self._status_of(_at(parts, address), body, headers, str(parts.hostname)))
        except TwinstepError as error:
            return error.problem, False
        except TimeoutError:
            return f"did not answer within {TIMEOUT_S:g} s", False
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], False
        if 200 <= status < 300:
            return "", False
        return f"answered {status}", status == 410

    async def _status_of(self, url: str, body: bytes, headers: dict[str, str], host: str) -> int:
        """Post a message and return the answer's status; raises TimeoutError once it has taken too long in all.

        No proxy of the environment is asked: the address that was checked is the one to reach. The answer's body is
        not read: it is nobody's business, and may be endless.
        """
        client = httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False, verify=self._tls)
        async with asyncio.timeout(TIMEOUT_S), client as http:
            asks = http.stream("POST", url, content=body, headers=headers, extensions={"sni_hostname": host})
            async with asks as answer:
                return answer.status_code


def _at(parts: SplitResult, address: str) -> str:
    """Return the URL with the address in place of the name."""
    host = f"[{address}]" if ":" in address else address
    return parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host).geturl()
