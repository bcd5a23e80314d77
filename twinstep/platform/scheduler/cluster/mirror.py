"""What the watches have told of the cluster: the newest of each object, joined by run. In memory; asks no cluster.

It never goes backwards: an event that is older than what is held changes nothing, and what was deleted does not come
back by a late event. It holds the fields that are read and no others, so that thousands of runs fit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from twinstep.platform.scheduler.cluster.evidence import Evidence, Object
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.platform.scheduler.render.context import DOMAIN
from twinstep.platform.scheduler.render.names import label_value

MANAGED_LABEL, MANAGER = "app.kubernetes.io/managed-by", "twinstep"
MANAGED = f"{MANAGED_LABEL}={MANAGER}"
JOBSET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
RUN_LABEL = f"{DOMAIN}/run"

TOMBSTONES = 8192  # uids of what was deleted that are remembered
EVENTS_EACH = 20  # events of one object that are kept
EVENT_OBJECTS = 4096  # objects whose events are kept

Key = tuple[str, str]
"""(namespace, name)."""


class Mirror:
    """The newest known of every object. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._pods: dict[str, set[Key]] = defaultdict(set)
        """Of a run, by the value of its label."""
        self._admissions: dict[str, Key] = {}
        """Kueue's Workload, by the uid of what it admits."""
        self._rayjobs: dict[str, Key] = {}
        """Of a run, by the value of its label."""
        self._deleted: OrderedDict[str, str] = OrderedDict()
        """Resource version at which an object was seen to be gone, by its uid."""
        self._events: OrderedDict[str, OrderedDict[str, Object]] = OrderedDict()
        """By the uid of what they are about, then by their own; the least lately told of is dropped first."""

    # ---- what the watches tell ----

    def put(self, kind: str, found: Object) -> bool:
        """Take in an object as it is now; return whether that is news of a run.

        An event, or Kueue's Workload, that comes before what it is about is none yet: that one will be.
        """
        metadata = found["metadata"]
        version = metadata.get("resourceVersion") or ""
        with self._lock:
            if kind == "Event":
                return self._put_event(found)
            if metadata["uid"] in self._deleted and not newer(version, self._deleted[metadata["uid"]]):
                return False
            key = _key(found)
            known = self._objects[kind].get(key)
            if known is not None:
                if not newer(version, known["metadata"].get("resourceVersion")):
                    return False
                if known["metadata"]["uid"] != metadata["uid"]:
                    self._drop(kind, key, version)
            elif kind == "Workload" and not _owners(found):
                return False
            self._objects[kind][key] = trimmed(kind, found)
            self._index(kind, key, found)
            return self._is_ours(kind, key)

    def remove(self, kind: str, found: Object) -> bool:
        """Take in that an object is gone; return whether that is news."""
        if kind == "Event":
            return False  # the API server forgets them after an hour; what they told stays true
        uid, version = found["metadata"]["uid"], found["metadata"].get("resourceVersion") or ""
        with self._lock:
            known = self._objects[kind].get(_key(found))
            if known is None or known["metadata"]["uid"] != uid:
                self._bury(uid, version)
                return False
            held = known["metadata"].get("resourceVersion")
            if version != held and not newer(version, held):
                return False  # of a time before it came back into view
            self._drop(kind, _key(found), version)
            return True

    def replace(self, kind: str, namespace: str | None, items: Iterable[Object], version: str) -> bool:
        """Take in a whole list of a kind, of one namespace or of all; return whether anything is news.

        What is not in it is gone, as of the list's resource version.
        """
        with self._lock:
            gone = {
                key: known
                for key, known in self._objects[kind].items()
                if namespace is None or key[0] == namespace
            }  # fmt: skip
            changed = False
            for item in items:
                gone.pop(_key(item), None)
                changed |= self.put(kind, item)
            for key in gone:
                self._drop(kind, key, version)
            return changed or bool(gone)

    def forget(self, kind: str, namespace: str | None) -> None:
        """Drop all of a kind without a trace, so that an older state may be believed."""
        with self._lock:
            for key in [key for key in self._objects[kind] if namespace is None or key[0] == namespace]:
                uid = self._objects[kind][key]["metadata"]["uid"]
                self._drop(kind, key, "")
                del self._deleted[uid]

    # ---- what is asked of it ----

    def evidence(self, run_id: str, ref: WorkloadRef, *, now: float) -> Evidence:
        """Return what is held of a run: its workload, and what belongs to that very one."""
        with self._lock:
            workload = self._objects[ref.kind].get((ref.namespace, ref.name))
            if workload is not None:
                metadata = workload["metadata"]
                # Where somebody took its label away, the API server is asked, and has it put back.
                foreign = (metadata.get("labels") or {}).get(RUN_LABEL) != label_value(run_id)
                if foreign or ref.uid not in ("", metadata["uid"]):
                    workload = None
            if workload is None:
                return Evidence(workload=None, now=now)
            admission = self._admission(workload["metadata"]["uid"])
            pods = [pod for pod in self._pods_of(run_id) if of_workload(pod, workload)]
            about = [workload, *([admission] if admission else []), *pods]
            events = [event for each in about for event in self._events.get(each["metadata"]["uid"], {}).values()]
            events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
            return Evidence(workload=workload, admission=admission, pods=pods, events=events, now=now)

    def pods(self, run_id: str) -> list[Object]:
        """Return the pods that bear a run's label, also where their workload is gone."""
        with self._lock:
            return list(self._pods_of(run_id))

    def workloads(self) -> dict[str, WorkloadRef]:
        """Return every JobSet and RayJob that bears a run's label, by its value."""
        with self._lock:
            found = [(kind, each["metadata"]) for kind in ("JobSet", "RayJob") for each in self._objects[kind].values()]
        return {
            run: WorkloadRef(kind=kind, namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
            for kind, metadata in found
            if (run := (metadata.get("labels") or {}).get(RUN_LABEL))
        }

    def runs(self) -> list[str]:
        """Return the runs that have pods."""
        with self._lock:
            return list(self._pods)

    def restarts(self, run_id: str) -> int:
        """Return how often a run's Ray cluster was made anew; 0 where it has none."""
        with self._lock:
            found = self._rayjobs.get(label_value(run_id))
            known = self._objects["RayJob"].get(found) if found else None
            return int(((known or {}).get("status") or {}).get("failed") or 0)

    def count(self) -> dict[str, int]:
        """Return how many objects of each kind are held."""
        with self._lock:
            return {kind: len(found) for kind, found in self._objects.items()} | {
                "Event": sum(map(len, self._events.values()))
            }

    # ---- within ----

    def _pods_of(self, run_id: str) -> Iterable[Object]:
        pods = self._objects["Pod"]
        return [pods[key] for key in sorted(self._pods.get(label_value(run_id), ()))]

    def _admission(self, uid: str) -> Object | None:
        key = self._admissions.get(uid)
        return None if key is None else self._objects["Workload"].get(key)

    def _index(self, kind: str, key: Key, found: Object) -> None:
        run = (found["metadata"].get("labels") or {}).get(RUN_LABEL)
        if run and kind == "Pod":
            self._pods[run].add(key)
        if run and kind == "RayJob":
            self._rayjobs[run] = key
        if kind == "Workload":
            for uid in _owners(found):
                self._admissions[uid] = key

    def _drop(self, kind: str, key: Key, version: str) -> None:
        known = self._objects[kind].pop(key)
        self._bury(known["metadata"]["uid"], version)
        run = (known["metadata"].get("labels") or {}).get(RUN_LABEL)
        if run and kind == "Pod":
            self._pods[run].discard(key)
            if not self._pods[run]:
                del self._pods[run]
        if run and kind == "RayJob" and self._rayjobs.get(run) == key:
            del self._rayjobs[run]
        if kind == "Workload":
            for uid in _owners(known):
                if self._admissions.get(uid) == key:
                    del self._admissions[uid]

    def _bury(self, uid: str, version: str) -> None:
        self._deleted[uid] = version
        self._deleted.move_to_end(uid)
        while len(self._deleted) > TOMBSTONES:
            self._deleted.popitem(last=False)

    def _put_event(self, found: Object) -> bool:
        involved = found.get("involvedObject") or {}
        about = involved.get("uid") or ""
        told = self._events.setdefault(about, OrderedDict())
        self._events.move_to_end(about)
        uid = found["metadata"]["uid"]
        known = told.get(uid)
        if known is not None and not newer(
            found["metadata"].get("resourceVersion"), known["metadata"].get("resourceVersion")
        ):
            return False
        told[uid] = trimmed("Event", found)
        told.move_to_end(uid)
        while len(told) > EVENTS_EACH:
            told.popitem(last=False)
        while len(self._events) > EVENT_OBJECTS:
            self._events.popitem(last=False)
        return self._is_ours(involved.get("kind") or "", (involved.get("namespace") or "", involved.get("name") or ""))

    def _is_ours(self, kind: str, key: Key) -> bool:
        """Say whether an object is held, and belongs to a run: of Kueue's Workloads, which all are, some do not."""
        known = self._objects.get(kind, {}).get(key)
        if known is None or kind != "Workload":
            return known is not None
        owners = known["metadata"].get("ownerReferences") or ()
        ours = (self._objects.get(each.get("kind"), {}).get((key[0], each.get("name"))) for each in owners)
        return any(each is not None for each in ours)


def newer(given: str | None, known: str | None) -> bool:
    """Say whether a resource version is newer than another; one that is no number counts as newer.

    Versions of one kind are numbers that grow (Kubernetes says so since 1.35, and has always kept to it).
    """
    try:
        return int(given or "") > int(known or "")
    except ValueError:
        return given != known


def of_workload(pod: Object, workload: Object) -> bool:
    """Say whether a pod with the run's label belongs to this very workload, not to an earlier one of its name."""
    of = (pod["metadata"].get("labels") or {}).get(JOBSET_UID_LABEL)
    return of is None or of == workload["metadata"]["uid"]


def _key(found: Object) -> Key:
    return found["metadata"].get("namespace") or "", found["metadata"]["name"]


def _owners(found: Object) -> list[str]:
    metadata = found["metadata"]
    label = (metadata.get("labels") or {}).get(JOB_UID_LABEL)
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("uid")]
    return [*owners, *([label] if label and label not in owners else [])]


_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "labels", "annotations",
    "ownerReferences",
)  # fmt: skip
_SPEC: Mapping[str, tuple[str, ...]] = {
    "JobSet": ("suspend", "ttlSecondsAfterFinished"),
    "RayJob": ("suspend", "ttlSecondsAfterFinished"),
    "Workload": ("active", "queueName"),
    "Pod": ("nodeName",),
}
"""What is read of a spec, by kind."""
_EVENT = ("involvedObject", "type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime")


def trimmed(kind: str, found: Object) -> Object:
    """Return an object with the fields that are read: the rest (managed fields, templates) is most of its size."""
    metadata = {name: found["metadata"][name] for name in _METADATA if name in found["metadata"]}
    if kind == "Event":
        return {"metadata": metadata, **{name: found[name] for name in _EVENT if name in found}}
    given: Mapping[str, Any] = found.get("spec") or {}
    spec = {name: given[name] for name in _SPEC.get(kind, ()) if name in given}
    if kind == "JobSet":
        spec["replicatedJobs"] = [
            {name: job[name] for name in ("name", "replicas") if name in job}
            for job in given.get("replicatedJobs") or ()
        ]
    if kind == "Pod":
        spec["containers"] = [{"name": container["name"]} for container in given.get("containers") or ()]
    return {"kind": kind, "metadata": metadata, "spec": spec, "status": found.get("status") or {}}
