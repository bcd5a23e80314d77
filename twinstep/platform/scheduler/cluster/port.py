"""What the control plane asks of a cluster: the one door between the reconciler and the API server.

Everything is by run: a run's objects carry its id as a label, and nothing without that label is ever touched.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Create or update a run's objects by server-side apply, the workload (the last one) after what it needs.

        The Secret with the run's token, where one is given, is applied before them. Everything beside the workload
        is owned by it then, so that nothing outlives it.

        Raises:
            ConflictError: an object of one of the names is there and is not this run's, or is being deleted.
        """
        ...

    def look(self, run_id: str, ref: WorkloadRef) -> Evidence | None:
        """Return what the mirror of the cluster holds of a run; None while the mirror is not filled (yet)."""
        ...

    def confirm(self, run_id: str, ref: WorkloadRef) -> Evidence:
        """Return what the API server itself says of a run now: asked before a run is called gone."""
        ...

    def suspend(self, ref: WorkloadRef, suspended: bool) -> None:
        """Suspend a workload or let it go on. Where a queue admits it, through its Workload, never by `suspend`."""
        ...

    def delete(self, ref: WorkloadRef) -> bool:
        """Delete a workload, and by that all it owns; return False where it is not there. Never one of another uid."""
        ...

    def age(self) -> float | None:
        """Return the seconds since the mirror last heard of the API server; None before it ever did."""
        ...
