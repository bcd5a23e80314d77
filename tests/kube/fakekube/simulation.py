"""A cluster that does something: the simulated controllers over one fake API server, step by step or by themselves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .jobs import JOBSET, Jobs, JobSets
from .kubelet import Ending, Kubelet
from .kuberay import KubeRay
from .kueue import Kueue
from .resources import Object
from .server import FakeServer
from .world import World, going


class Simulation:
    """JobSet's controller, KubeRay's operator, Kueue, the job controller, and the nodes.

    By steps: `step()` lets each look once, `settle()` until nothing changes. By itself: `with simulation.running():`.
    """

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.world = World(server.objects)
        self.jobsets, self.jobs = JobSets(self.world), Jobs(self.world)
        self.kueue, self.kuberay = Kueue(self.world), KubeRay(self.world)
        self.kubelet = Kubelet(self.world, server.logs)
        self.paused = threading.Event()
        """Set: they do nothing, while they run by themselves."""
        self._lock = threading.Lock()

    def step(self) -> bool:
        """Let each controller look once; return whether anything changed."""
        with self._lock:
            before = self.server.objects.version
            for each in (self.kueue, self.jobsets, self.jobs, self.kuberay, self.kubelet):
                each.step()
            return self.server.objects.version != before

    def settle(self, most: int = 100) -> int:
        """Step until nothing changes; return how many steps that took."""
        for count in range(most):
            if not self.step():
                return count
        raise AssertionError(f"the cluster is not at rest after {most} steps")

    @contextlib.contextmanager
    def running(self, every: float = 0.02) -> Iterator[Simulation]:
        """Let the controllers work by themselves."""
        ended = threading.Event()
        failed: list[BaseException] = []

        def work() -> None:
            while not ended.wait(every):
                try:
                    if not self.paused.is_set():
                        self.step()
                except BaseException as error:
                    failed.append(error)
                    return

        thread = threading.Thread(target=work, name="simulated-cluster", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join(timeout=20)
        if failed:
            raise failed[0]

    # ---- what a test does ----

    def pods(self, run_label: str = "", *, slice_index: int | None = None, host: int | None = None) -> list[Object]:
        """Return pods that are not being deleted: of a workload or a run, of a slice, of a host."""
        found = []
        for pod in self.server.all("Pod"):
            labels = pod["metadata"].get("labels") or {}
            if going(pod) or (run_label and run_label not in labels.values()):
                continue
            if slice_index is not None and labels.get(f"{JOBSET}/job-index") != str(slice_index):
                continue
            if host is not None and labels.get("batch.kubernetes.io/job-completion-index") != str(host):
                continue
            found.append(pod)
        return found

    def end(self, run_label: str = "", ending: Ending | None = None, **which: int) -> int:
        """Let the pods of a workload or a run end; return how many."""
        with self._lock:
            found = [pod for pod in self.pods(run_label, **which) if pod["status"].get("phase") == "Running"]
            for pod in found:
                self.kubelet.end(pod, ending)
            return len(found)
