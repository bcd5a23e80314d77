"""Keep the mirror up to date: list, watch, list again, one thread for each kind and namespace.

`kubernetes.informer.SharedInformer` was tried first and does not hold: it cannot list custom objects (their lists are
dicts, and it asks for `.items`), a newer object is overwritten by an older event, a watch that is refused is asked for
again at once and without end, and a connection that died in silence is waited for until the process ends.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from twinstep.platform.backoff import backoff
from twinstep.platform.scheduler.cluster.evidence import Evidence
from twinstep.platform.scheduler.cluster.kube_api import ExpiredError, KubeApi, Stream
from twinstep.platform.scheduler.cluster.mirror import MANAGED, Mirror, newer
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.spec.errors import NotFoundError, TwinstepError, UnavailableError

log = logging.getLogger(__name__)

WATCHED: dict[str, str | None] = {
    "JobSet": MANAGED,
    "RayJob": MANAGED,
    "Workload": None,  # Kueue makes them, without labels of ours
    "Pod": MANAGED,
    "Event": None,
}
"""The kinds that are watched, and the labels by which."""
PAGE = 500
MAX_LINE = 8 * 1024 * 1024  # bytes of one event of a watch; an object has 1.5 MiB at most
BACKOFF_S = (0.5, 30.0)  # first and longest
OLD_LISTS = 5  # in a row, and the API server was set back to an older state: it is believed then


class Watcher:
    """The threads that keep a mirror."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespaces: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        watch_seconds: float = 20.0,
        absent_seconds: float = 60.0,
    ) -> None:
        """Prepare; nothing is asked before `start`.

        Args:
            namespaces: the ones to watch; none: all of the cluster.
            on_change: called after every change, from any of the threads; must not block.
            watch_seconds: how long one watch lasts: in a cluster where nothing happens, the API server is heard of
                that often. A dead connection is found after that and a quarter.
            absent_seconds: how often a kind that the cluster does not have is asked for again.
        """
        self.mirror = Mirror()
        self.on_change = on_change
        self.stopping = threading.Event()
        self.watch_seconds = watch_seconds
        self.absent_seconds = absent_seconds
        self._sources = [
            Source(self, api, kind, selector, namespace)
            for kind, selector in WATCHED.items()
            for namespace in (namespaces or (None,))
        ]

    def start(self) -> None:
        """Begin to watch."""
        for source in self._sources:
            source.thread.start()

    def stop(self) -> None:
        """End. Threads that wait for the API server end by themselves when it speaks or falls silent."""
        self.stopping.set()
        for source in self._sources:
            source.cut()
        for source in self._sources:
            if source.thread.ident is not None:
                source.thread.join(timeout=2)

    def look(self, run_id: str, ref: WorkloadRef) -> Evidence | None:
        """Return what the mirror holds of a run; None before every kind was listed once."""
        if not all(source.filled for source in self._sources):
            return None
        return self.mirror.evidence(run_id, ref, now=time.time())

    def ages(self) -> dict[str, float | None]:
        """Return by kind the seconds since the API server was last heard of it, the worst of its namespaces."""
        found: dict[str, float | None] = {}
        for source in self._sources:
            age = source.age()
            known = found.get(source.kind, 0.0)
            found[source.kind] = None if age is None or known is None else max(age, known)
        return found

    def age(self) -> float | None:
        """Return the seconds since the mirror last heard of the API server, of the stalest kind."""
        ages = list(self.ages().values())
        return None if None in ages else max(age for age in ages if age is not None)

    def lists(self) -> Counter[str]:
        """Return how often each kind was listed; every time but the first, the watch had lost its place."""
        found: Counter[str] = Counter()
        for source in self._sources:
            found[source.kind] += source.lists
        return found

    def troubles(self) -> list[str]:
        """Return what keeps the watches from going on, each thing once."""
        return sorted({source.trouble for source in self._sources if source.trouble})


class Source:
    """One kind in one namespace."""

    def __init__(self, watcher: Watcher, api: KubeApi, kind: str, selector: str | None, namespace: str | None) -> None:
        self.kind = kind
        self.filled = False
        """It was listed once, or the cluster has no such kind."""
        self.lists = 0
        self.trouble = ""
        self.thread = threading.Thread(target=self._run, name=f"watch-{kind}-{namespace or 'all'}", daemon=True)
        self._watcher = watcher
        self._api = api
        self._namespace = namespace
        self._query = {"labelSelector": selector} if selector else {}
        self._version: str | None = None
        """Where to go on from; None: list anew."""
        self._newest: str | None = None
        """The newest version that was ever heard of."""
        self._old_lists = 0
        self._heard_at: float | None = None
        self._stream: Stream | None = None

    def age(self) -> float | None:
        """Return the seconds since the API server was last heard of; None before it ever was."""
        return None if self._heard_at is None else time.monotonic() - self._heard_at

    def cut(self) -> None:
        """Break off the watch that is under way."""
        if self._stream is not None:
            self._stream.break_off()

    def _run(self) -> None:
        failures = 0
        while not self._watcher.stopping.is_set():
            began = time.monotonic()
            try:
                if self._version is None:
                    self._list()
                self._watch()
                self.trouble = ""
            except NotFoundError:
                self._absent()
                self._watcher.stopping.wait(random.uniform(0.5, 1.0) * self._watcher.absent_seconds)
            except ExpiredError:
                self._version = None
            except Exception as error:
                self._tell(error)
            # A watch that ends at once is as good as refused, whatever ended it.
            lasted = time.monotonic() - began
            failures = failures + 1 if lasted < min(1.0, self._watcher.watch_seconds / 4) else 0
            self._watcher.stopping.wait(self._pause(failures))

    def _pause(self, failures: int) -> float:
        if not failures and not self.trouble:
            return 0.0
        # All of the range: whole control planes fail together here.
        return backoff(failures + 1, first=BACKOFF_S[0], longest=BACKOFF_S[1], spread=(0.0, 1.0))

    def _tell(self, error: Exception) -> None:
        if self._watcher.stopping.is_set():
            return
        if not isinstance(error, TwinstepError):
            self._version = None  # whatever it was, what is held may not be right any more
            log.exception("the watch of %s failed; it is listed anew", self.kind)
        elif self.trouble != str(error):  # once, not at every try until it is mended
            log.warning("the watch of %s is interrupted: %s", self.kind, error)
        self.trouble = str(error)

    def _hear(self) -> None:
        self._heard_at = time.monotonic()

    # ---- list ----

    def _list(self) -> None:
        items: list[dict[str, Any]] = []
        query = {**self._query, "limit": str(PAGE)}
        while True:
            page = self._api.list(self.kind, self._namespace, query)
            self._hear()
            items += page.get("items") or ()
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        version = str(metadata.get("resourceVersion") or "")
        self.lists += 1
        if self._newest is not None and version != self._newest and not newer(version, self._newest):
            self._old_lists += 1
            if self._old_lists < OLD_LISTS:
                raise UnavailableError(
                    f"the API server listed {self.kind} as of an older time than it had told of before",
                    remedy="it is listed anew; one of several API servers may be behind",
                )
            log.warning("the API server was set back to an older state; what it lists of %s is believed", self.kind)
            self._watcher.mirror.forget(self.kind, self._namespace)
        self._old_lists = 0
        if self._watcher.mirror.replace(self.kind, self._namespace, items, version):
            self._watcher.on_change()
        self._version = self._newest = version
        if not self.filled:
            self.filled = True
            self._watcher.on_change()

    def _absent(self) -> None:
        """The cluster has no such kind: that is an answer too."""
        self._hear()
        self._version, self.trouble = None, ""
        if self._watcher.mirror.replace(self.kind, self._namespace, (), self._newest or "") or not self.filled:
            self.filled = True
            self._watcher.on_change()

    # ---- watch ----

    def _watch(self) -> None:
        """Follow until the server ends the watch."""
        lasts = self._watcher.watch_seconds * random.uniform(0.8, 1.2)
        query = {
            **self._query,
            "resourceVersion": self._version or "",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(lasts))),
        }
        stream = self._api.watch(self.kind, self._namespace, query, silence_s=lasts * 1.25 + 5)
        self._stream = stream
        try:
            with stream:
                self._hear()
                for line in lines(stream):
                    if self._watcher.stopping.is_set():
                        return
                    self._take(line)
                self._hear()
        finally:
            self._stream = None

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            told, found = event["type"], event["object"]
            metadata = found.get("metadata") or {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UnavailableError(
                f"the watch of {self.kind} sent a line that is no event: {line[:100]!r}",
                remedy="it is taken up again where it was; see whether a proxy stands before the API server",
            ) from None
        self._hear()
        if told == "ERROR":
            if found.get("code") == 410:
                raise ExpiredError(f"the watch of {self.kind} is too old", remedy="it is listed anew")
            raise UnavailableError(
                f"the watch of {self.kind} ended: {found.get('message') or found.get('code')}",
                remedy="it is taken up again",
            )
        mirror = self._watcher.mirror
        changed = False
        if told in ("ADDED", "MODIFIED"):
            changed = mirror.put(self.kind, found)
        elif told == "DELETED":
            changed = mirror.remove(self.kind, found)
        version = metadata.get("resourceVersion")
        if version and (self._version is None or newer(version, self._version)):
            self._version = version  # never back: an old event that comes late would be told all over again
            if self._newest is None or newer(version, self._newest):
                self._newest = version
        if changed:
            self._watcher.on_change()


def lines(stream: Stream) -> Iterator[bytes]:
    """Yield the whole lines of a stream; half a line at its end is dropped, for the next watch tells it again.

    Raises:
        UnavailableError: a line is longer than any event.
    """
    held = bytearray()
    for data in stream:
        held += data
        if b"\n" in data:
            *whole, rest = held.split(b"\n")
            held = bytearray(rest)
            yield from (bytes(line) for line in whole if line.strip())
        if len(held) > MAX_LINE:
            raise UnavailableError(
                f"the API server sent a line of more than {MAX_LINE >> 20} MiB", remedy="it is taken up again"
            )
