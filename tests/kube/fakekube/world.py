"""What all simulated controllers share: how they read, write, own, and say what happened."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from twinstep.platform.scheduler.cluster.evidence import seconds

from .objects import Objects
from .resources import BY_KIND, Object, Refusal

_AGAIN_S = 10.0


class World:
    """A cluster's objects, as a controller sees them."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.objects.clock()

    @property
    def stamp(self) -> str:
        """The time as objects have it."""
        return self.objects.now()

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, or None."""
        try:
            return self.objects.get(kind, namespace, name)
        except Refusal:
            return None

    def owned(self, kind: str, owner: Object) -> list[Object]:
        """Return objects of a kind that `owner` controls, found by its uid: a name may have been another's before."""
        uid = owner["metadata"]["uid"]
        found = self.objects.of(BY_KIND[kind], owner["metadata"].get("namespace", ""))
        return [copy.deepcopy(each) for each in found if _owner(each) == uid]

    def create(self, value: Object, owner: Object | None = None, *, manager: str = "controller") -> Object | None:
        """Create an object, owned by `owner`; None where one of that name is there."""
        value = copy.deepcopy(value)
        if owner is not None:
            value["metadata"]["ownerReferences"] = [
                {
                    "apiVersion": owner["apiVersion"],
                    "kind": owner["kind"],
                    "name": owner["metadata"]["name"],
                    "uid": owner["metadata"]["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ]
        try:
            return self.objects.put(value, manager=manager)
        except Refusal as refusal:
            if refusal.reason == "AlreadyExists":
                return None
            raise

    def patch(self, value: Object, patch: Any, *, manager: str = "controller") -> Object | None:
        """Change an object by a merge patch; None where it is gone."""
        metadata = value["metadata"]
        try:
            resource = BY_KIND[value["kind"]]
            return self.objects.patch(
                resource, metadata.get("namespace", ""), metadata["name"], patch, manager=manager, unknown="trust"
            )
        except Refusal as refusal:
            if refusal.code == 404:
                return None
            raise

    def status(self, value: Object, status: Object) -> None:
        """Store a status, where it is another than before."""
        if status == (value.get("status") or {}):
            return
        try:
            self.objects.set_status(value, status)
        except Refusal as refusal:
            if refusal.code != 404:
                raise

    def delete(self, value: Object, *, grace: int | None = None, propagation: str = "Background") -> None:
        """Delete an object and nothing else of its name."""
        metadata = value["metadata"]
        try:
            self.objects.delete(
                BY_KIND[value["kind"]], metadata.get("namespace", ""), metadata["name"], uid=metadata["uid"],
                grace=grace, propagation=propagation,
            )  # fmt: skip
        except Refusal as refusal:
            if refusal.code not in (404, 409):
                raise

    def event(self, about: Object, reason: str, message: str, *, warning: bool = False, by: str = "controller") -> None:
        """Tell an event; the same one again counts up, not more often than every ten seconds."""
        metadata = about["metadata"]
        namespace = metadata.get("namespace") or "default"
        key = hashlib.sha256(f"{metadata['uid']}/{reason}/{message}".encode()).hexdigest()[:16]
        name = f"{metadata['name'][:40].rstrip('.-')}.{key}"
        old = self.get("Event", namespace, name)
        if old is not None:
            if self.now - (seconds(old.get("lastTimestamp")) or 0.0) < _AGAIN_S:
                return
            self.patch(old, {"count": old.get("count", 1) + 1, "lastTimestamp": self.stamp})
            return
        about_it = {"kind": about["kind"], "apiVersion": about["apiVersion"], "uid": metadata["uid"]}
        self.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": namespace},
                "involvedObject": {**about_it, "name": metadata["name"], "namespace": namespace},
                "type": "Warning" if warning else "Normal",
                "reason": reason,
                "message": message,
                "count": 1,
                "firstTimestamp": self.stamp,
                "lastTimestamp": self.stamp,
                "source": {"component": by},
            }
        )

    def condition(self, status: Object, kind: str, holds: bool, reason: str, message: str = "") -> None:
        """Set a condition; its time changes with its status only, and its place in the list never."""
        conditions = status.setdefault("conditions", [])
        text = "True" if holds else "False"
        new = {"type": kind, "status": text, "reason": reason, "message": message, "lastTransitionTime": self.stamp}
        for index, old in enumerate(conditions):
            if old["type"] == kind:
                if old["status"] == text:
                    new["lastTransitionTime"] = old["lastTransitionTime"]
                conditions[index] = new
                return
        conditions.append(new)


def holds(value: Object, kind: str) -> bool:
    """Say whether a condition is there and True."""
    conditions = (value.get("status") or {}).get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def going(value: Object) -> bool:
    """Say whether an object is being deleted."""
    return bool(value["metadata"].get("deletionTimestamp"))


def fresh_status(value: Object) -> Object:
    """Return a copy of an object's status to write into."""
    return copy.deepcopy(value.get("status") or {})


def _owner(value: Object) -> str:
    for each in value["metadata"].get("ownerReferences") or ():
        if each.get("controller"):
            return str(each["uid"])
    return ""
