"""What the control plane asks of a cluster: the one door between the reconciler and the API server.

Everything is by run: a run's objects carry its id as a label, and nothing without that label is ever touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinstep.platform.scheduler.cluster.evidence import Evidence, Object


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRef:
    """A run's JobSet or RayJob. `uid` tells it from another of the same name."""

    kind: str
    namespace: str
    name: str
    uid: str = ""
    """Empty: not known (yet)."""


class Cluster(Protocol):
    """A Kubernetes cluster, as the reconciler needs it. Every method is safe to call again after a crash.

    All raise UnavailableError where the API server does not answer or answers 429 or 5xx (try again later), and
    SpecError where it refuses an object for what it says (400, 422: trying again changes nothing).
    """

    def apply(self, run_id: str, objects: Sequence[Object], *, token: str | None = None) -> WorkloadRef:
        """See to it that a run's objects are there, the workload (the last one) after what it needs.

        The Secret with the run's token, where one is given, is made before them, in place of one that is there: pods
        that have started with another keep that. So ask `confirm` first, and give a new token only where no workload
        is there. Everything beside the workload is owned by it then, so that nothing outlives it.

        A workload of the run that is there is adopted as it is.

        Raises:
            ConflictError: an object of one of the names is there and is not this run's, or is being deleted.
        """
        ...

    def put_back(self, run_id: str, ref: WorkloadRef, objects: Sequence[Object]) -> Sequence[str]:
        """Apply what stands beside a workload that is there, where it is missing; return what was, as `Kind name`.

        Secrets are left out: nobody here knows a run's token any more.

        Raises:
            ConflictError: an object of one of the names is there and is not this run's, or is being deleted.
        """
        ...

    def workloads(self) -> Mapping[str, WorkloadRef]:
        """Return every workload that the mirror holds, by the run whose label it bears."""
        ...

    def look(self, run_id: str, ref: WorkloadRef) -> Evidence | None:
        """Return what the mirror of the cluster holds of a run; None while the mirror is not filled (yet)."""
        ...

    def confirm(self, run_id: str, ref: WorkloadRef) -> Evidence:
        """Return what the API server itself says of a run now: asked before a run is called gone."""
        ...

    def suspend(self, run_id: str, ref: WorkloadRef, suspended: bool) -> None:
        """Suspend a workload or let it go on. Where a queue admits it, through its Workload, never by `suspend`.

        Raises:
            NotFoundError: the workload is not there (any more).
        """
        ...

    def delete(self, run_id: str, ref: WorkloadRef) -> bool:
        """Delete a workload, and by that all it owns; return False where it is not there. Never one of another uid.

        Where it is not there, what an unfinished apply left of the run is deleted.
        """
        ...

    def age(self) -> float | None:
        """Return the seconds since the mirror last heard of the API server; None before it ever did."""
        ...
