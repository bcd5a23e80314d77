"""Collect the logs of runs in a cluster, from before their pods exist until they are gone.

Logs are asked for again and again, each from where it was read up to, by a few threads: a stream for each of a run's
hundreds of pods would cost a thread, a connection and a place among the API server's long requests each. Who writes
is asked often; who is silent, more and more seldom. How far a log was read is stored with what was read, so another
collector, or this one after a crash, goes on at that very byte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from twinstep.platform.scheduler.cluster.evidence import Object, number
from twinstep.platform.scheduler.cluster.kube_api import KubeApi, Stream
from twinstep.platform.scheduler.cluster.log_lines import TIME_MAX, LogReader, since, whole
from twinstep.platform.scheduler.cluster.mirror import Mirror
from twinstep.platform.store.logs import Logs, LogSource, Place
from twinstep.spec.errors import NotFoundError, SpecError, UnavailableError

log = logging.getLogger(__name__)

THREADS = 8
LOOK_S = 0.25  # between two looks at which pods there are and whose log is due
SOONEST_S, LATEST_S = 0.5, 8.0  # between two requests for one log: who writes, who is silent
RESCUE_S = 2.0  # what who leads has not read by then of a pod that ends, others read
PER_SECOND = 100.0  # requests at most, whatever there is to collect
BUDGET = 8 * 1024 * 1024  # bytes of one log that are read at once; others wait meanwhile
CHUNK = 256 * 1024  # bytes that are stored at once
HALF_LINE_S = 2.0  # a line without an end is shown after so long: a progress bar, a prompt
ROLES = {
    "worker": "worker",
    "ray-worker": "worker",
    "ray-head": "head",
    "ray-job-submitter": "submitter",
}
"""The containers whose logs are collected, and what they do."""


@dataclass(slots=True)
class Feed:
    """One container's log, as this collector has it in hand."""

    run_id: str
    pod: Object
    container: str
    source: LogSource | None = None
    """Where it is stored, and read up to; None: not looked up yet."""
    due: float = 0.0
    every: float = SOONEST_S
    busy: Future[None] | None = None
    gone: bool = False
    """Nothing can come any more: its pod is gone, or nobody here knows its run."""
    places: deque[Place] = field(default_factory=lambda: deque(maxlen=32))
    """Where it was read up to lately; see `LogCollector._change_over`."""
    half_since: float | None = None
    """Since when its last line has had no end."""
    at_end: bool = True
    """Its last answer was read to its end."""
    read_at: float = float("-inf")
    """When that was asked for."""


@dataclass(slots=True)
class LogCounts:
    """What was collected by this process, for /metrics."""

    bytes: int = 0
    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """By kind of error."""


class LogCollector:
    """Collects while it leads."""

    def __init__(self, api: KubeApi, mirror: Mirror, logs: Logs, *, leads: Callable[[], bool] = lambda: True) -> None:
        """Prepare; nothing is asked before `start`.

        Args:
            leads: whether this process looks after the cluster now; of several, one collects.
        """
        self.counts = LogCounts()
        self._api = api
        self._mirror = mirror
        self._logs = logs
        self._leads = leads
        self._feeds: dict[tuple[str, str], Feed] = {}
        """By (pod uid, container)."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="logs")
        self._thread = threading.Thread(target=self._loop, name="log-collector", daemon=True)

    def start(self) -> None:
        """Begin to collect."""
        self._thread.start()

    def stop(self) -> None:
        """End after the requests that are under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            under_way = [feed.busy for feed in self._feeds.values() if feed.busy is not None]
        wait(under_way, timeout=5)  # one that the API server lets wait is not waited for

    def drain(self, run_id: str, *, seconds: float = 2.0) -> bool:
        """Read a run's logs up to now; to be called before its objects are deleted.

        Return whether all of them were read to their ends; False where the time was up, or the API server is away.
        """
        ends = time.monotonic() + seconds
        self._discover(run_id)
        with self._lock:
            waiting = [feed for feed in self._feeds.values() if feed.run_id == run_id and not self._done(feed)]
        began = time.monotonic()
        while waiting and not self._stopping.is_set():
            left = ends - time.monotonic()
            if left <= 0:
                return False
            wait([future for feed in waiting if (future := self._submit(feed)) is not None], timeout=left)
            # An answer that was asked for before this began may lack what was written last.
            waiting = [feed for feed in waiting if not self._done(feed) and not (feed.at_end and feed.read_at > began)]
            if waiting:
                self._stopping.wait(min(0.1, left))
        return not waiting

    # ---- which logs there are ----

    def _loop(self) -> None:
        allowed = 0.0
        while not self._stopping.wait(LOOK_S):
            try:
                if not self._leads():
                    self._rescue()
                    continue
                allowed = min(PER_SECOND, allowed + PER_SECOND * LOOK_S)
                for run_id in self._mirror.runs():
                    self._discover(run_id)
                self._forget()
                allowed -= self._ask(int(allowed))
            except Exception:
                log.exception("collecting logs failed; it goes on")

    def _discover(self, run_id: str) -> None:
        """Take in the containers of a run that have begun to run."""
        for pod in self._mirror.pods(run_id):
            for container in _begun(pod):
                key = (pod["metadata"]["uid"], container)
                with self._lock:
                    feed = self._feeds.setdefault(key, Feed(run_id=run_id, pod=pod, container=container))
                if feed.pod is not pod:
                    if _state(feed.pod, container) != _state(pod, container):
                        feed.due = 0.0  # it was started again, or has ended
                    feed.pod = pod

    def _forget(self) -> None:
        """Drop what belongs to pods that are not there any more."""
        there = {pod["metadata"]["uid"] for run_id in self._mirror.runs() for pod in self._mirror.pods(run_id)}
        with self._lock:
            for key in [key for key, feed in self._feeds.items() if key[0] not in there and feed.busy is None]:
                del self._feeds[key]

    def _rescue(self) -> None:
        """While another leads, read the logs of pods that end where that one has not read them to their ends.

        It may have died together with them, and they may be gone before this one leads. What both read is stored once.
        All else is forgotten: who leads reads it, and how far, the store says when this one leads again.
        """
        ending = {
            (pod["metadata"]["uid"], container): Feed(run_id=run_id, pod=pod, container=container)
            for run_id in self._mirror.runs()
            for pod in self._mirror.pods(run_id)
            for container in _begun(pod)
            if pod["metadata"].get("deletionTimestamp") or _state(pod, container) == "terminated"
        }
        now = time.monotonic()
        with self._lock:
            for key in [key for key, feed in self._feeds.items() if key not in ending and feed.busy is None]:
                del self._feeds[key]
            for key, seen in ending.items():
                feed = self._feeds.setdefault(key, seen)
                feed.due = feed.due if feed is not seen else now + RESCUE_S
                feed.pod = seen.pod
            due = [feed for key, feed in self._feeds.items() if key in ending and feed.busy is None and feed.due <= now]
        due = [feed for feed in due if not self._done(feed)]
        for feed in due[: int(PER_SECOND * LOOK_S)]:
            feed.source = None  # who leads may have read on
            self._submit(feed)

    def _ask(self, most: int) -> int:
        now = time.monotonic()
        with self._lock:
            due = [feed for feed in self._feeds.values() if feed.busy is None and feed.due <= now]
        due = [feed for feed in due if not self._done(feed)]
        due.sort(key=lambda feed: feed.due)
        for feed in due[:most]:
            self._submit(feed)
        return min(most, len(due))

    def _done(self, feed: Feed) -> bool:
        if feed.gone:
            return True
        place = feed.source.place if feed.source else None
        return place is not None and place.ended and place.instance >= _instance(feed.pod, feed.container)

    def _submit(self, feed: Feed) -> Future[None] | None:
        with self._lock:
            if feed.busy is None and not self._stopping.is_set():
                feed.busy = self._pool.submit(self._run, feed)
            return feed.busy

    # ---- one log ----

    def _run(self, feed: Feed) -> None:
        asked_at = time.monotonic()
        try:
            came, feed.at_end = self._collect(feed)
            feed.every = SOONEST_S if came else min(LATEST_S, feed.every * 2)
            feed.read_at = asked_at
        except Exception as error:
            feed.every, feed.at_end = min(LATEST_S, max(1.0, feed.every * 2)), True
            self.counts.errors[type(error).__name__] += 1
            if not isinstance(error, UnavailableError):
                log.exception("the log of %s cannot be collected; it is tried again", feed.pod["metadata"]["name"])
        finally:
            if feed.pod["metadata"].get("deletionTimestamp"):
                feed.every = SOONEST_S  # it will be gone soon
            feed.due = time.monotonic() + (feed.every if feed.at_end else 0.0)
            with self._lock:
                feed.busy = None

    def _collect(self, feed: Feed) -> tuple[bool, bool]:
        """Read a log from its place on; return whether anything came, and whether that was all there is."""
        if feed.source is None:
            feed.source = self._logs.open(self._identity(feed))
            if feed.source is None:
                feed.gone = True
                return False, True
            if self._done(feed):
                return False, True  # another collector came to its end
        came = False
        if feed.source.place.instance < _instance(feed.pod, feed.container):
            came, at_end = self._change_over(feed, feed.source.place)
            if not at_end:
                return came, at_end  # the rest of it first
        more, at_end = self._read(feed, previous=False)
        return came or more, at_end

    def _change_over(self, feed: Feed, place: Place) -> tuple[bool, bool]:
        """Read what the instance before wrote last, and go on to the one that runs now.

        A log may have been that of the new instance before its pod's status said so; the place is one of the new
        instance then. The newest place whose time the old instance's log knows is where that was read up to.
        """
        instance, came = _instance(feed.pod, feed.container), False
        now = replace(place, instance=instance, ended=False)
        if place.instance == instance - 1 and not place.ended:
            known = self._last_known(feed)
            if known is None or known == place:
                came, at_end = self._read(feed, previous=True)
                if not at_end:
                    return came, at_end
                now = replace(feed.source.place if feed.source else place, instance=instance, ended=False)
            else:
                reader = LogReader(known.time, known.count)
                with self._open_log(feed, known, previous=True) as stream:
                    missed = b"".join(map(reader.take, stream))
                self._move(feed, missed + reader.rest(), now)
                return True, True
        self._move(feed, b"", now)
        return came, True

    def _last_known(self, feed: Feed) -> Place | None:
        """Return the newest of the last places that the log of the instance before has; None where it has none."""
        oldest, known, held = next(iter(feed.places), None), set[str](), b""
        if oldest is None:
            return None
        try:
            with self._open_log(feed, oldest, previous=True) as stream:
                for data in stream:
                    held = held[-TIME_MAX:] + data
                    known |= {place.time for place in feed.places if place.time.encode() in held}
        except (NotFoundError, SpecError):  # nothing is left of it
            return None
        return next((place for place in reversed(feed.places) if place.time and place.time in known), None)

    def _open_log(self, feed: Feed, place: Place, *, previous: bool) -> Stream:
        metadata = feed.pod["metadata"]
        query = {"container": feed.container, "timestamps": "true"}
        if place.time:
            query["sinceTime"] = since(place.time)
        if previous:
            query["previous"] = "true"
        self.counts.requests += 1
        return self._api.pod_log(metadata["namespace"], metadata["name"], query)

    def _read(self, feed: Feed, *, previous: bool) -> tuple[bool, bool]:
        source = feed.source
        if source is None:
            return False, True
        # Before the log is asked for: what ends later may still write.
        ended = previous or _state(feed.pod, feed.container) == "terminated"
        reader = LogReader(source.place.time, source.place.count)
        came, over = False, False
        try:
            with self._open_log(feed, source.place, previous=previous) as stream:
                held, length = b"", 0
                for data in stream:
                    new = reader.take(data)
                    held += new
                    length += len(new)
                    if length >= BUDGET:
                        over = True
                        break
                    if len(held) >= CHUNK:
                        held, came = self._store(feed, held, reader, end=False), True
                if not over:
                    held += reader.rest()
                before = feed.source
                self._store(feed, held, reader, end=ended and not over)
                came = came or feed.source is not before
        except NotFoundError:
            feed.gone = True  # with its pod; what was read is stored
        except SpecError:  # 400: the container waits to be started, or nothing is left of the one before
            if previous:
                self._move(feed, b"", replace(source.place, ended=True))
        return came or over, not over

    def _store(self, feed: Feed, data: bytes, reader: LogReader, *, end: bool) -> bytes:
        """Store what was read; return the rest, of a line that is still being written."""
        if feed.source is None:
            return b""
        time_, count, kept = reader.time, reader.count, data
        if not end:
            half = len(data) - (data.rfind(b"\n") + 1)
            if not half:
                feed.half_since = None
            elif half < CHUNK // 4 and not self._waited(feed):
                (time_, count), kept = reader.line_end, data[: len(data) - half]
            else:
                kept = whole(data)
                count -= len(data) - len(kept)
        place = replace(feed.source.place, time=time_, count=count, ended=end)
        if kept or place != feed.source.place:
            self._move(feed, kept, place)
        return data[len(kept) :]

    def _waited(self, feed: Feed) -> bool:
        now = time.monotonic()
        if feed.half_since is None:
            feed.half_since = now
        return now - feed.half_since >= HALF_LINE_S

    def _move(self, feed: Feed, data: bytes, place: Place) -> None:
        if feed.source is None:
            return
        moved = self._logs.append(feed.source, data, place)
        if moved is None:  # another collector was quicker: go on where it is
            feed.source = None
            raise UnavailableError("another control plane collects this log", remedy="one of them ceases to lead soon")
        feed.source = moved
        feed.places.append(place)
        self.counts.bytes += len(data)

    def _identity(self, feed: Feed) -> LogSource:
        """Say which process of its run a container is. Sources: JobSet's and KubeRay's labels."""
        metadata = feed.pod["metadata"]
        labels, role = metadata.get("labels") or {}, ROLES[feed.container]
        index = labels.get("batch.kubernetes.io/job-completion-index") or (metadata.get("annotations") or {}).get(
            "batch.kubernetes.io/job-completion-index"
        )
        restart = labels.get("jobset.sigs.k8s.io/restart-attempt")
        return LogSource(
            run_id=feed.run_id,
            pod_uid=metadata["uid"],
            container=feed.container,
            pod=metadata["name"],
            role=role,
            slice=number(labels.get("jobset.sigs.k8s.io/job-index")) or 0,
            host=number(index) if role == "worker" else None,
            restart=(number(restart) or 0) if restart is not None else self._mirror.restarts(feed.run_id),
        )


def _status(pod: Object, container: str) -> Object:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((each for each in statuses if each.get("name") == container), {})


def _state(pod: Object, container: str) -> str:
    """Return waiting, running or terminated; "" where nothing is known yet."""
    return next(iter(_status(pod, container).get("state") or {}), "")


def _instance(pod: Object, container: str) -> int:
    """Return how often a container was started again within its pod."""
    return int(_status(pod, container).get("restartCount") or 0)


def _begun(pod: Object) -> Iterator[str]:
    """Yield the containers of a pod that have run, whose logs are collected."""
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        if each.get("name") in ROLES and (
            _state(pod, each["name"]) in ("running", "terminated") or each.get("restartCount")
        ):
            yield each["name"]
