"""The parts of a control plane that look after runs in a cluster, without pages and HTTP, for tests that break them.

Several may stand on one database, one after another or at once; each can be killed between any two steps: before a
request or a write to the store is made, or after it and before its answer is known.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.scheduler.cluster.kube import KubeCluster
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.patience import Patience
from twinstep.platform.scheduler.cluster.reconcile import ClusterReconciler, Workers
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.platform.store.cluster_runs import ClusterRuns
from twinstep.platform.store.records import JobDetail
from twinstep.platform.store.store import Store
from twinstep.spec.parse import validate_spec
from twinstep.spec.states import FINAL

IMAGE = "registry.example/worker@sha256:" + "0" * 64
API_URL = "http://10.0.0.1:8765"
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
GPU = {"kind": "gpu", "model": "h100", "count": 8}
FASTER = 40.0  # waits between two tries are for people and servers, not for tests


class Killed(BaseException):
    """The control plane is gone, at this very point."""


class Plane:
    """One control plane: its reconciler passes when it is told to."""

    def __init__(
        self, directory: Path, kubeconfig: Path, *, leads: Callable[[], bool] = lambda: True, read_s: float = 0.4
    ) -> None:
        self.store = Store(f"sqlite:///{directory / 'twinstep.db'}")
        self.api = KubeApi(Access(kubeconfig=kubeconfig), read_s=read_s)
        self.watcher = Watcher(self.api, namespaces=("default",), watch_seconds=2)
        self.cluster = KubeCluster(self.api, self.watcher)
        self.runs = ClusterRuns(self.store.database, changed=self.store.changes.bump)
        self.reconciler = ClusterReconciler(
            self.runs,
            self.cluster,
            workers=Workers(image=IMAGE, api_url=API_URL),
            every_seconds=0.05,
            leads=leads,
            patience=Patience(clock=lambda: time.monotonic() * FASTER),
        )
        self.steps = 0
        """Requests and writes so far, each counted before and after."""
        self._kill_at = 0
        self._count_steps()
        self.watcher.start()

    def close(self) -> None:
        """End; or what is left to do after it was killed."""
        self.watcher.stop()
        self.api.close()
        self.store.close()

    def kill_at(self, step: int) -> None:
        """Be killed at a step from now on; 0: never."""
        self.steps, self._kill_at = 0, step

    # ---- what a user does ----

    def submit(self, name: str = "a-run", accelerator: dict[str, Any] | None = None, **spec: Any) -> JobDetail:
        """Store a job, as the service does."""
        kubernetes = {"image": IMAGE, **spec.pop("kubernetes", {})}
        body = {"name": name, "accelerator": accelerator or TPU, "kubernetes": kubernetes, **spec}
        return self.store.create_job(validate_spec(body))

    def state(self, job_id: str) -> str:
        """Return a job's state."""
        return self.store.job(job_id).state.value

    def events(self, job_id: str) -> list[str]:
        """Return what happened to a job: states it came to, and what is no state."""
        found = self.store.events(job_id, after=0, limit=200).items
        return [str((each.data or {}).get("to") or each.name) for each in found]

    # ---- time goes on ----

    def go_on(self, cluster: Simulation, until: Callable[[], Any], *, seconds: float = 30) -> Any:
        """Let the cluster and the reconciler work until something is so."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            cluster.step()
            self.reconciler.run_once()
            if found := until():
                return found
            time.sleep(0.01)
        jobs = [f"{job.name} {job.state} ({job.reason[:120]})" for job in self.store.jobs(limit=3).items]
        raise AssertionError(f"it did not come to pass: {jobs}")

    def until_ended(self, cluster: Simulation, job_id: str, **how: Any) -> str:
        """Go on until a job has ended; return how."""
        self.go_on(cluster, lambda: self.store.job(job_id).state in FINAL, **how)
        return self.state(job_id)

    # ---- being killed ----

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self._kill_at:
            raise Killed

    def _count_steps(self) -> None:
        ask, write = self.api._open, self.store.database.write

        def asks(verb: str, *args: Any, **kwargs: Any) -> Any:
            if verb == "watch" or "list" in verb:  # the mirror's own threads are not killed: nothing hangs on them
                return ask(verb, *args, **kwargs)
            self._step()
            answer = ask(verb, *args, **kwargs)
            try:
                self._step()
            except Killed:
                answer.close()
                raise
            return answer

        @contextlib.contextmanager
        def writes() -> Iterator[Any]:
            self._step()
            with write() as connection:
                yield connection
            self._step()

        self.api._open = asks  # type: ignore[method-assign]
        self.store.database.write = writes  # type: ignore[method-assign]


def left_of(server: FakeServer, run_id: str) -> list[str]:
    """Return what there is of a run in the cluster."""
    kinds = ("JobSet", "RayJob", "RayCluster", "Job", "Pod", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Secret")
    return [
        f"{kind}/{each['metadata']['name']}"
        for kind in kinds
        for each in server.all(kind)
        if (each["metadata"].get("labels") or {}).get("twinstep.dev/run") == run_id
    ]


def times_made(server: FakeServer, kind: str = "JobSet") -> int:
    """Return how many workloads of a kind there ever were."""
    changes = [change for change in server.objects._changes if change.resource.kind == kind]
    return sum(change.type == "ADDED" for change in changes)
