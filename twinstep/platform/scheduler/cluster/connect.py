"""A control plane's side of one cluster, put together: API server, watches, the lease, the reconciler of its runs."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import make_url

from twinstep.platform.scheduler.cluster.kube import KubeCluster
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.lease import Elector
from twinstep.platform.scheduler.cluster.logs import LogCollector
from twinstep.platform.scheduler.cluster.reconcile import ClusterReconciler, Workers
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.platform.settings import ClusterSettings, Settings
from twinstep.platform.store.cluster_runs import ClusterRuns
from twinstep.platform.store.logs import Logs
from twinstep.platform.store.records import View
from twinstep.platform.store.store import Store

LEASE_READ_S = 4.0  # a renewal that takes longer is given up and tried again, well before the lease runs out


class ClusterHealth(View):
    """How this control plane stands with its cluster."""

    leads: bool
    """This replica looks after the cluster's runs; of several, one does."""
    watch_age_seconds: float | None
    """Since the API server was last heard of, by the stalest of the watches; null before it ever was."""
    watch_ages_seconds: dict[str, float | None]
    """The same for each kind that is watched."""
    troubles: list[str]
    """What keeps the watches from going on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFigures:
    """What this control plane has asked of its cluster so far, for /metrics."""

    lists: Mapping[str, int]
    """Of all objects of a kind; every one but the first of each watch, because the watch had lost its place."""
    requests: Mapping[tuple[str, str], int]
    """By (verb, kind)."""
    errors: Mapping[str, int]
    """By status code, `timeout` or `connection`."""
    log_bytes: int
    """Of containers' logs that were collected."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The parts, not yet started."""

    apis: tuple[KubeApi, ...]
    watcher: Watcher
    cluster: KubeCluster
    elector: Elector | None
    """None: no other replica can have this database, so this one leads."""
    collector: LogCollector
    reconciler: ClusterReconciler

    def start(self) -> None:
        """Begin to watch, to take part in the election, to collect logs and to look after runs."""
        self.watcher.start()
        if self.elector is not None:
            self.elector.start()
        self.collector.start()
        self.reconciler.start()

    def stop(self) -> None:
        """End: first what acts, then what it acts by. Another replica may lead at once."""
        self.reconciler.stop()
        self.collector.stop()
        if self.elector is not None:
            self.elector.stop()
        self.watcher.stop()
        for api in self.apis:
            api.close()

    def health(self) -> ClusterHealth:
        """Say how it stands; asks nobody."""
        return ClusterHealth(
            leads=self.elector is None or self.elector.leads,
            watch_age_seconds=self.watcher.age(),
            watch_ages_seconds=self.watcher.ages(),
            troubles=self.watcher.troubles(),
        )

    def figures(self) -> ClusterFigures:
        """Return what was asked so far; asks nobody."""
        return ClusterFigures(
            lists=self.watcher.lists(),
            requests=sum((api.counts.requests.copy() for api in self.apis), Counter()),
            errors=sum((api.counts.errors.copy() for api in self.apis), Counter()),
            log_bytes=self.collector.counts.bytes,
        )


def connect(settings: Settings, cluster: ClusterSettings, store: Store) -> Connection:
    """Return the parts for a cluster; nothing is asked of it yet.

    Raises:
        UnavailableError: what says where it is cannot be read.
    """
    access = _access(cluster)
    api = KubeApi(access)
    watcher = Watcher(api, namespaces=cluster.namespaces)
    kube = KubeCluster(api, watcher)
    elector, apis = None, [api]
    if settings.database_url is not None:  # which other replicas may share; a data directory has one control plane
        apis.append(KubeApi(access, read_s=LEASE_READ_S))
        elector = Elector(
            apis[-1],
            namespace=cluster.lease_namespace or cluster.namespaces[0],
            name=lease_name(settings.database_url),
            identity=f"{socket.gethostname()}-{secrets.token_hex(3)}",
        )

    def leads() -> bool:
        return elector is None or elector.leads

    collector = LogCollector(api, watcher.mirror, Logs(store.database, store.changes), leads=leads)
    reconciler = ClusterReconciler(
        ClusterRuns(store.database, changed=store.changes.bump),
        kube,
        workers=Workers(image=settings.worker_image, api_url=cluster.api_url),
        every_seconds=settings.reconcile_seconds,
        leads=leads,
        drain=collector.drain,
    )
    watcher.on_change = reconciler.nudge
    if elector is not None:
        elector.on_change = reconciler.nudge
    return Connection(tuple(apis), watcher, kube, elector, collector, reconciler)


def check_access(cluster: ClusterSettings) -> None:
    """Read what says where a cluster is, before anything is made.

    Raises:
        UnavailableError: it cannot be read.
    """
    KubeApi(_access(cluster)).close()


def _access(cluster: ClusterSettings) -> Access:
    return Access(kubeconfig=cluster.kubeconfig, context=cluster.context, in_cluster=cluster.in_cluster)


def lease_name(database_url: str) -> str:
    """Return the name of the Lease that replicas on one database hold in turn.

    Control planes with databases of their own may share a namespace: each looks after its own runs.
    """
    url = make_url(database_url)
    place = f"{url.host}:{url.port}/{url.database}"  # whoever asks, by whatever user and password
    return f"twinstep-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
