"""A cluster in memory, as the reconciler's port has it: objects by name, a mirror that can be late, calls that fail."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from twinstep.platform.scheduler.cluster.evidence import Evidence, Object
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.spec.errors import ConflictError, NotFoundError, SpecError

RUN = "twinstep.dev/run"


class StandInCluster:
    """Remembers every workload that was ever made: a run of two workloads is a run that was doubled."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.secrets: dict[str, str] = {}
        self.pods: dict[str, list[Object]] = {}
        self.made: list[str] = []
        """Run ids, one per workload that was made."""
        self.asked: list[str] = []
        """Calls, in their order."""
        self.filled = True
        self.late: dict[tuple[str, str, str], dict[str, Any]] | None = None
        """What the mirror still holds; None: it is up to date."""
        self.fail: Callable[[str, str], None] = lambda call, run_id: None
        """Called before each call; raises what is to be raised."""
        self.refuses: str = ""
        self._uids = itertools.count(1)

    # ---- the port ----

    def apply(self, run_id: str, objects: Sequence[Object], *, token: str | None = None) -> WorkloadRef:
        self._call("apply", run_id)
        if self.refuses:
            raise SpecError(self.refuses, remedy="mend it")
        workload = copy.deepcopy(dict(objects[-1]))
        metadata = workload["metadata"]
        key = (workload["kind"], metadata["namespace"], metadata["name"])
        found = self.there.get(key)
        if found is not None and found["metadata"]["labels"].get(RUN) != run_id:
            raise ConflictError(f"a {key[0]} {key[2]} is there already", remedy="delete it")
        if found is not None and found["metadata"].get("deletionTimestamp"):
            raise ConflictError(f"the {key[0]} {key[2]} is being deleted", remedy="wait")
        if token is not None:
            self.secrets[run_id] = token
        if found is None:
            metadata["uid"] = f"uid-{next(self._uids)}"
            workload["status"] = {}
            self.there[key] = found = workload
            self.made.append(run_id)
        return WorkloadRef(kind=key[0], namespace=key[1], name=key[2], uid=found["metadata"]["uid"])

    def put_back(self, run_id: str, ref: WorkloadRef, objects: Sequence[Object]) -> list[str]:
        self._call("put_back", run_id)
        return []

    def workloads(self) -> dict[str, WorkloadRef]:
        held = self.there if self.late is None else self.late
        return {
            found["metadata"]["labels"][RUN]: WorkloadRef(
                kind=kind, namespace=namespace, name=name, uid=found["metadata"]["uid"]
            )
            for (kind, namespace, name), found in held.items()
        }

    def look(self, run_id: str, ref: WorkloadRef) -> Evidence | None:
        if not self.filled:
            return None
        return self._evidence(run_id, ref, self.there if self.late is None else self.late)

    def confirm(self, run_id: str, ref: WorkloadRef) -> Evidence:
        self._call("confirm", run_id)
        return self._evidence(run_id, ref, self.there)

    def suspend(self, run_id: str, ref: WorkloadRef, suspended: bool) -> None:
        self._call("suspend" if suspended else "unsuspend", run_id)
        found = self._mine(run_id, ref, self.there)
        if found is None:
            raise NotFoundError("it is gone", remedy="nothing")
        found["spec"]["suspend"] = suspended

    def delete(self, run_id: str, ref: WorkloadRef) -> bool:
        self._call("delete", run_id)
        found = self._mine(run_id, ref, self.there)
        if found is None:
            self.secrets.pop(run_id, None)
            return False
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return True

    def age(self) -> float | None:
        return 0.0 if self.filled else None

    # ---- what happens there ----

    def of(self, run_id: str) -> dict[str, Any]:
        """Return the one workload of a run."""
        (found,) = [each for each in self.there.values() if each["metadata"]["labels"][RUN] == run_id]
        return found

    def ready(self, run_id: str, *, restarts: int = 0) -> None:
        found = self.of(run_id)
        (job,) = found["spec"]["replicatedJobs"]
        ready = {"name": job["name"], "ready": job["replicas"]}
        found["status"] |= {"replicatedJobsStatus": [ready], "restarts": restarts, "conditions": []}

    def restarting(self, run_id: str, restarts: int) -> None:
        condition = {"type": "RestartingJobSet", "status": "True"}
        self.of(run_id)["status"] |= {"replicatedJobsStatus": [], "restarts": restarts, "conditions": [condition]}

    def ends(self, run_id: str, how: str = "Completed", *, reason: str = "", message: str = "") -> None:
        condition = {"type": how, "status": "True", "reason": reason, "message": message}
        self.of(run_id)["status"] |= {"terminalState": how, "conditions": [condition]}

    def collect(self) -> None:
        """Take away what is being deleted, as the garbage collector does."""
        self.there = {key: found for key, found in self.there.items() if not found["metadata"].get("deletionTimestamp")}

    def _call(self, call: str, run_id: str) -> None:
        self.asked.append(call)
        self.fail(call, run_id)

    def _mine(self, run_id: str, ref: WorkloadRef, place: dict[Any, dict[str, Any]]) -> dict[str, Any] | None:
        found = place.get((ref.kind, ref.namespace, ref.name))
        if found is None or found["metadata"]["labels"].get(RUN) != run_id:
            return None
        return found if ref.uid in ("", found["metadata"]["uid"]) else None

    def _evidence(self, run_id: str, ref: WorkloadRef, place: dict[Any, dict[str, Any]]) -> Evidence:
        return Evidence(workload=self._mine(run_id, ref, place), pods=self.pods.get(run_id, ()), now=time.time())
