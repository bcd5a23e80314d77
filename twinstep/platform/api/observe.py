"""What a Prometheus server asks for: runs by state, how live ones get on, requests, reports. Names no secret, no spec.

Counters are this process's; states and progress are read from the store when they are asked for, so that every replica
says the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinstep import __version__
from twinstep.platform import logs
from twinstep.platform.scheduler.service import Readiness, Service
from twinstep.spec.report import TIME_PARTS
from twinstep.spec.states import RunState

router = APIRouter(tags=["health"])

access = logging.getLogger("twinstep.access")
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that machines ask every few seconds."""
MOST_RUNS = 500
"""Live runs that have series of their own, the oldest first: a scrape stays of bounded size."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of request durations, in seconds."""


class Observed:
    """The metrics of one app."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Runs(service))
        self.requests = Histogram(
            "twinstep_http_request_seconds",
            "Duration of requests, streams left out.",
            ("method", "route", "status"),
            registry=self.registry,
            buckets=BUCKETS,
        )
        self._durations: dict[tuple[str, str, str], Histogram] = {}
        self.records = Counter("twinstep_report_records", "Records that workers sent.", registry=self.registry)

    def took(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. The series of each kind is looked up once: that takes longer than to count."""
        kind = method, route, str(status)
        series = self._durations.get(kind)
        if series is None:
            series = self._durations[kind] = self.requests.labels(*kind)
        series.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Runs(Collector):
    """Reads the store once a scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not ask the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield what the store says now."""
        info = GaugeMetricFamily("twinstep_build", "Version of the control plane.", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info
        states = GaugeMetricFamily("twinstep_runs", "Runs by state.", labels=("state",))
        counts = self._service.count_runs()
        for state in RunState:
            states.add_metric((state.value,), counts.get(state, 0))
        yield states
        yield from self._live()
        readiness = self._service.readiness()
        ready = GaugeMetricFamily("twinstep_ready", "1 while runs are looked after.", value=float(readiness.ready))
        yield ready
        yield from _cluster(readiness)
        yield from _asked(self._service)
        if readiness.reconciler_age_seconds is not None:
            yield GaugeMetricFamily(
                "twinstep_reconciler_age_seconds",
                "Since the last whole pass over the runs.",
                value=readiness.reconciler_age_seconds,
            )

    def _live(self) -> Iterator[Metric]:
        labels = ("job", "run")
        families = {
            "step": GaugeMetricFamily("twinstep_run_step", "Steps that a live run has done.", labels=labels),
            "total_steps": GaugeMetricFamily("twinstep_run_steps", "Steps of a live run in all.", labels=labels),
            "examples_per_s": GaugeMetricFamily(
                "twinstep_run_examples_per_second", "Training examples a second, lately.", labels=labels
            ),
            "tokens_per_s": GaugeMetricFamily(
                "twinstep_run_tokens_per_second", "History tokens a second, lately.", labels=labels
            ),
            "eta_s": GaugeMetricFamily("twinstep_run_eta_seconds", "Seconds to the last step.", labels=labels),
            "goodput": GaugeMetricFamily(
                "twinstep_run_goodput_ratio", "Useful step time over wall time so far.", labels=labels
            ),
            "chip_hours": GaugeMetricFamily(
                "twinstep_run_chip_hours", "Chips, or devices of a CPU, times hours so far.", labels=labels
            ),
        }
        spent = GaugeMetricFamily(
            "twinstep_run_time_seconds", "Wall seconds so far by what they went to.", labels=(*labels, "part")
        )
        silence = GaugeMetricFamily(
            "twinstep_run_silence_seconds", "Since the worker was last heard of.", labels=labels
        )
        now, live = time.time(), self._service.live_runs()
        yield GaugeMetricFamily(
            "twinstep_runs_untold", "Live runs beyond those that have series here.", value=max(0, len(live) - MOST_RUNS)
        )
        for run in live[:MOST_RUNS]:
            seconds = run.progress.time_s if run.progress else {}
            for part in TIME_PARTS:  # and no other: what a worker calls its time makes no series
                if (found := seconds.get(part)) is not None:
                    spent.add_metric((run.job_id, run.id, part), found)
            for field, family in families.items():
                value = getattr(run.progress, field, None)
                if value is not None:
                    family.add_metric((run.job_id, run.id), value)
            if run.heartbeat_at is not None:
                silence.add_metric((run.job_id, run.id), max(0.0, now - run.heartbeat_at))
        yield from (*families.values(), spent, silence)


def _cluster(readiness: Readiness) -> Iterator[Metric]:
    cluster = readiness.cluster
    if cluster is None:
        return
    yield GaugeMetricFamily(
        "twinstep_cluster_leads", "1 while this replica looks after the cluster's runs.", value=float(cluster.leads)
    )
    ages = GaugeMetricFamily(
        "twinstep_cluster_watch_age_seconds", "Since the API server was last heard of, by a kind's watch.",
        labels=("kind",),
    )  # fmt: skip
    for kind, age in cluster.watch_ages_seconds.items():
        if age is not None:
            ages.add_metric((kind,), age)
    yield ages


def _asked(service: Service) -> Iterator[Metric]:
    figures = service.cluster_figures()
    if figures is None:
        return
    lists = CounterMetricFamily(
        "twinstep_cluster_lists", "Lists of all objects of a kind: a watch began, or had lost its place.",
        labels=("kind",),
    )  # fmt: skip
    for kind, count in figures.lists.items():
        lists.add_metric((kind,), count)
    requests = CounterMetricFamily(
        "twinstep_cluster_requests", "Requests to the API server.", labels=("verb", "kind")
    )  # fmt: skip
    for asked, count in figures.requests.items():
        requests.add_metric(asked, count)
    errors = CounterMetricFamily(
        "twinstep_cluster_errors", "Requests that failed: a status, timeout or connection.", labels=("code",)
    )  # fmt: skip
    for code, count in figures.errors.items():
        errors.add_metric((code,), count)
    yield from (lists, requests, errors)
    yield CounterMetricFamily("twinstep_cluster_log_bytes", "Bytes of logs collected.", value=figures.log_bytes)
    yield GaugeMetricFamily(
        "twinstep_cluster_log_dropped_bytes", "Bytes of logs that are not kept.", value=service.logs.dropped_bytes()
    )


class RequestTimer:
    """ASGI middleware: the duration of each request by method, route and status, counted and logged."""

    def __init__(self, app: ASGIApp, observed: Observed) -> None:
        self.app = app
        self._observed = observed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note how long it took."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, streams = time.perf_counter(), 500, False

        async def note(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status = message["status"]
                streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            await send(message)

        with logs.about():
            try:
                await self.app(scope, receive, note)
            finally:
                took = time.perf_counter() - started
                # The route's pattern, never the path: ids would make a series each, and a path may hold anything.
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if route != "other" else "any"
                if not streams:
                    self._observed.took(method, route, status, took)
                level = logging.DEBUG if route in QUIET else logging.INFO
                if access.isEnabledFor(level):
                    access.log(
                        level, "%s %s %s %.1f ms", method, route, status, 1000 * took,
                        extra={"method": method, "route": route, "status": status, "ms": round(1000 * took, 1)},
                    )  # fmt: skip


@router.get("/metrics", summary="What Prometheus asks for", response_class=Response)
def metrics(request: Request) -> Response:
    """Return runs by state, the progress of live ones, request durations, in Prometheus' text format."""
    observed: Observed = request.app.state.observed
    return Response(observed.text(), media_type=CONTENT_TYPE_LATEST)
