"""What stands beside runs that go on (ConfigMap, ServiceAccount, NetworkPolicy) is there, whoever deleted it.

No watch tells of it, since reading every ConfigMap of a namespace is more than a control plane should be allowed: each
pass asks by name for what stands beside a few runs, those first that were asked about the longest ago.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from twinstep.platform.scheduler.cluster.evidence import Object
from twinstep.platform.scheduler.cluster.port import Cluster, WorkloadRef
from twinstep.platform.scheduler.passes import trouble_with
from twinstep.spec.errors import UnavailableError

log = logging.getLogger(__name__)

AGAIN_S = 30.0  # between two looks at what stands beside one run
EACH_PASS = 8  # runs that one pass asks about: three requests each


class Beside:
    """Sees to it, a few runs a pass."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._looked: dict[str, float] = {}
        self._told: dict[str, str] = {}
        """By run, what keeps its objects from being put back; told once."""
        self._stand: dict[str, tuple[WorkloadRef, Callable[[], Sequence[Object]]]] = {}

    def stands(self, run_id: str, ref: WorkloadRef, objects: Callable[[], Sequence[Object]]) -> None:
        """Say that a run's workload is in the cluster and goes on; `objects` renders all that belongs to it."""
        self._stand[run_id] = (ref, objects)

    def see_to(self, *, until: float) -> None:
        """Put back what is missing of the runs that stand, up to a monotonic time; what fails is tried again."""
        stand, self._stand = self._stand, {}
        self._looked = {run_id: when for run_id, when in self._looked.items() if run_id in stand}
        self._told = {run_id: told for run_id, told in self._told.items() if run_id in stand}
        due = time.monotonic() - AGAIN_S
        wanted = [run_id for run_id in stand if self._looked.get(run_id, -math.inf) <= due]
        for run_id in sorted(wanted, key=lambda run_id: self._looked.get(run_id, -math.inf))[:EACH_PASS]:
            if time.monotonic() > until:
                return
            self._looked[run_id] = time.monotonic()
            ref, objects = stand[run_id]
            try:
                for name in self._cluster.put_back(run_id, ref, objects()):
                    log.warning("%s: somebody deleted its %s: it is put back", run_id, name)
                self._told.pop(run_id, None)
            except Exception as error:
                told = trouble_with(run_id, error)
                if self._told.get(run_id) != told:
                    self._told[run_id] = told
                    log.warning("%s: what stands beside its workload cannot be put back: %s", run_id, told)
                if isinstance(error, UnavailableError):
                    return  # the others would wait for the same
