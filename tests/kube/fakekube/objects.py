"""The state of a cluster: objects with uid, version and managers, what may be done to them, and every change in order.

Everything here is plain Python under one lock; `server.py` puts it on HTTP, the simulated controllers use it directly.
Stored objects are never changed in place: a change stores a new one, so whatever was given out stays what it was.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from . import patches
from .admission import admit
from .resources import (
    BY_KIND,
    BY_PATH,
    Object,
    Refusal,
    Resource,
    already_exists,
    bad_request,
    conflict,
    gone,
    modified,
    not_found,
)

FOREGROUND = "foregroundDeletion"
Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as watches tell it."""

    version: int
    type: str
    resource: Resource
    object: Object
    before: Object | None


@dataclass(slots=True)
class _Stored:
    object: Object
    owned: dict[tuple[str, str, str], set[patches.Path]] = field(default_factory=dict)
    """(manager, operation, subresource) → fields."""


class Objects:
    """All objects of a cluster. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.collecting = True
        """Whether the garbage collector works."""
        self._all: dict[Key, _Stored] = {}
        self._changes: list[Change] = []
        self._version = 1
        self._oldest = 0
        """Changes up to this version are forgotten."""
        self._listeners: list[Callable[[Change], None]] = []
        for name in ("default", "kube-system", "kube-public"):
            self.namespace(name)

    # ---- reading ----

    @property
    def version(self) -> int:
        """The newest resourceVersion."""
        return self._version

    @property
    def oldest(self) -> int:
        """The resourceVersion up to which changes are forgotten."""
        return self._oldest

    def get(self, kind: str, namespace: str, name: str) -> Object:
        """Return an object, or raise Refusal (404)."""
        return copy.deepcopy(self._find(BY_KIND[kind], namespace, name).object)

    def list(self, kind: str, namespace: str = "", *, labels: dict[str, str] | None = None) -> list[Object]:
        """Return all objects of a kind, in order of namespace and name."""
        wanted = (labels or {}).items()
        return [
            copy.deepcopy(each)
            for each in self.of(BY_KIND[kind], namespace)
            if all((each["metadata"].get("labels") or {}).get(key) == text for key, text in wanted)
        ]

    def of(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Return the stored objects of a resource themselves, to be read only."""
        with self.lock:
            items = list(self._all.items())
        found = [
            (key, each.object)
            for key, each in items
            if key[:2] == (resource.group, resource.plural) and (not namespace or key[2] == namespace)
        ]
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

    def since(self, resource: Resource, version: int, listener: Callable[[Change], None]) -> list[Change]:
        """Return changes of a resource after a version, and tell `listener` of all that come from now on.

        Raises:
            Refusal: 410, they are forgotten.
        """
        with self.lock:
            if version < self._oldest:
                raise gone(f"too old resource version: {version} ({self._oldest})")
            self._listeners.append(listener)
            return [each for each in self._changes if each.version > version and each.resource is resource]

    def unlisten(self, listener: Callable[[Change], None]) -> None:
        """Tell `listener` no more."""
        with self.lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def history(self, kind: str, name: str) -> list[Change]:
        """Return every change of one object that is not forgotten."""
        with self.lock:
            return [c for c in self._changes if c.resource.kind == kind and c.object["metadata"]["name"] == name]

    def compact(self) -> None:
        """Forget all changes so far, as etcd does every five minutes."""
        with self.lock:
            self._oldest = self._version
            self._changes.clear()

    # ---- writing ----

    def namespace(self, name: str) -> Object:
        """Make a namespace."""
        return self.create(BY_KIND["Namespace"], "", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    def put(self, value: Object, *, manager: str = "test") -> Object:
        """Create an object as somebody else in the cluster would: unchecked, and with its status."""
        resource = BY_KIND[value["kind"]]
        with self.lock:
            made = self.create(
                resource, value["metadata"].get("namespace", ""), value, manager=manager, unknown="trust"
            )
            if resource.status and value.get("status"):
                made = self.set_status(made, value["status"])
        return made

    def create(
        self, resource: Resource, namespace: str, value: Object, *, manager: str = "unknown", dry_run: bool = False,
        unknown: str = "warn", warnings: list[str] | None = None, operation: str = "Update",
    ) -> Object:  # fmt: skip
        """Create an object."""
        with self.lock:
            value = self._new(resource, namespace, value)
            if resource.status:
                value.pop("status", None)
                if resource.kind == "Pod":
                    value["status"] = {"phase": "Pending"}
            owned = {path for path, _ in patches.leaves(value)}
            value, said = admit(resource, value, None, unknown=unknown)
            (warnings if warnings is not None else []).extend(said)
            name = value["metadata"]["name"]
            if self._key(resource, namespace, name) in self._all:
                raise already_exists(resource, name)
            value["metadata"] |= {
                "uid": str(uuid.uuid4()),
                "creationTimestamp": self.now(),
                "generation": 1,
            }
            stored = _Stored(value, {(manager, operation, ""): owned})
            return self._store("ADDED", resource, stored, None, dry_run)

    def replace(
        self, resource: Resource, namespace: str, name: str, value: Object, *, manager: str = "unknown",
        subresource: str = "", dry_run: bool = False, unknown: str = "warn", warnings: list[str] | None = None,
        operation: str = "Update", owned: dict[tuple[str, str, str], set[patches.Path]] | None = None,
    ) -> Object:  # fmt: skip
        """Put `value` in an object's place; only its status, where `subresource` says so."""
        with self.lock:
            old = self._find(resource, namespace, name)
            now, before = copy.deepcopy(value), old.object
            metadata = now.setdefault("metadata", {})
            if metadata.get("name", name) != name:
                raise bad_request(f"the name of the object ({metadata['name']}) does not match the name on the URL")
            if metadata.get("uid") not in (None, "", before["metadata"]["uid"]):
                raise conflict(resource, name, _other_uid(metadata["uid"], before))
            if metadata.get("resourceVersion") not in (None, "", before["metadata"]["resourceVersion"]):
                raise modified(resource, name)
            now = self._fit(resource, now, before, subresource)
            if subresource != "status":
                now, said = admit(resource, now, before, unknown=unknown)
                (warnings if warnings is not None else []).extend(said)
            if (now.get("spec"), now.get("data")) != (before.get("spec"), before.get("data")):
                now["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
            stored = _Stored(now, old.owned if owned is None else owned)
            if owned is None:
                stored.owned = _took(old.owned, (manager, operation, subresource), before, now)
            if _same(now, before) and stored.owned == old.owned:
                return copy.deepcopy(before)
            freed = before["metadata"].get("finalizers") and not now["metadata"].get("finalizers")
            if now["metadata"].get("deletionTimestamp") and freed:
                return self._drop(resource, stored, dry_run)
            return self._store("MODIFIED", resource, stored, before, dry_run)

    def patch(
        self, resource: Resource, namespace: str, name: str, patch: Any, *, kind: str = "merge",
        subresource: str = "", **how: Any,
    ) -> Object:  # fmt: skip
        """Change an object by a merge, strategic or JSON patch."""
        change = {"merge": patches.merge, "strategic": patches.strategic, "json": patches.json_patch}[kind]
        with self.lock:
            old = copy.deepcopy(self._find(resource, namespace, name).object)
            old["metadata"].pop("managedFields", None)
            new = change(old, patch)
            return self.replace(resource, namespace, name, new, subresource=subresource, **how)

    def set_status(self, value: Object, status: Object, *, manager: str = "controller") -> Object:
        """Replace an object's status, as its controller does."""
        resource, metadata = BY_KIND[value["kind"]], value["metadata"]
        patch = [{"op": "add", "path": "/status", "value": status}]
        return self.patch(
            resource, metadata.get("namespace", ""), metadata["name"], patch, kind="json", subresource="status",
            manager=manager,
        )  # fmt: skip

    def apply(
        self, resource: Resource, namespace: str, name: str, value: Object, *, manager: str, force: bool = False,
        dry_run: bool = False, subresource: str = "", warnings: list[str] | None = None,
    ) -> tuple[Object, bool]:  # fmt: skip
        """Server-side apply; return the object, and whether it was created."""
        if not manager:
            causes = [("fieldManager", "Required value: is required for apply patch")]
            raise Refusal(422, "Invalid", f'PatchOptions.meta.k8s.io "" is invalid: {causes[0][0]}: {causes[0][1]}')
        if (value.get("metadata") or {}).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        value = {"apiVersion": resource.api_version, "kind": resource.kind, **value}
        value["metadata"] = {"name": name, **(value.get("metadata") or {})}
        with self.lock:
            try:
                old = self._find(resource, namespace, name)
            except Refusal:
                if value["metadata"].get("uid"):
                    message = "the object was deleted: its uid was given, and there is none of that name"
                    raise conflict(resource, name, message) from None
                made = self.create(
                    resource, namespace, value, manager=manager, dry_run=dry_run, unknown="apply", warnings=warnings,
                    operation="Apply",
                )  # fmt: skip
                return made, True
            now, owned = _applied(resource, name, value, old, (manager, "Apply", subresource), force)
            if subresource != "status" and "status" in old.object:
                now["status"] = old.object["status"]
            found = self.replace(
                resource, namespace, name, now, manager=manager, dry_run=dry_run, unknown="apply", warnings=warnings,
                operation="Apply", owned=owned, subresource=subresource,
            )  # fmt: skip
            return found, False

    def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", version: str = "",
        propagation: str = "", grace: int | None = None, dry_run: bool = False,
    ) -> Object:  # fmt: skip
        """Delete an object, or begin to."""
        with self.lock:
            old = self._find(resource, namespace, name)
            metadata = old.object["metadata"]
            if uid and uid != metadata["uid"]:
                raise conflict(resource, name, _other_uid(uid, old.object))
            if version and version != metadata["resourceVersion"]:
                raise conflict(
                    resource, name,
                    f"Precondition failed: ResourceVersion in precondition: {version}, ResourceVersion in object meta: "
                    f"{metadata['resourceVersion']}",
                )  # fmt: skip
            if propagation == "Orphan" and not dry_run:
                self._let_go(metadata["uid"])
            if resource.kind == "Namespace" and not dry_run:
                self._empty(name)
            finalizers = list(metadata.get("finalizers") or [])
            if propagation == "Foreground" and FOREGROUND not in finalizers and self._children(metadata["uid"]):
                finalizers.append(FOREGROUND)
            seconds = grace if grace is not None else old.object.get("spec", {}).get("terminationGracePeriodSeconds", 0)
            if resource.kind != "Pod" or not old.object["spec"].get("nodeName") or _ended(old.object):
                seconds = 0
            if not finalizers and not seconds:
                return self._drop(resource, old, dry_run)
            if metadata.get("deletionTimestamp") and not (resource.kind == "Pod" and grace == 0):
                return copy.deepcopy(old.object)
            now = {**old.object, "metadata": {**metadata, "deletionTimestamp": self.now()}}
            if finalizers:
                now["metadata"]["finalizers"] = finalizers
            if resource.kind == "Pod":
                now["metadata"]["deletionGracePeriodSeconds"] = seconds
            found = self._store("MODIFIED", resource, _Stored(now, old.owned), old.object, dry_run)
            if not dry_run:
                self.collect()
            return found

    # ---- garbage ----

    def collect(self) -> int:
        """Delete what is owned by nobody that is there any more; return how much."""
        count = 0
        with self.lock:
            while self.collecting and (found := list(self._orphans())):
                for resource, each in found:
                    metadata = each["metadata"]
                    with contextlib.suppress(Refusal):  # deleting the one before may have taken it along
                        self.delete(
                        resource, metadata.get("namespace", ""), metadata["name"], uid=metadata["uid"],
                        propagation="Foreground" if self._awaited(each) else "",
                    )  # fmt: skip
                        count += 1
            self._finish_foreground()
        return count

    def _orphans(self) -> Iterator[tuple[Resource, Object]]:
        alive = {each.object["metadata"]["uid"]: each.object for each in self._all.values()}
        for (group, plural, *_), stored in list(self._all.items()):
            metadata = stored.object["metadata"]
            owners = metadata.get("ownerReferences") or ()
            if not owners or metadata.get("deletionTimestamp"):
                continue
            there = [alive[each["uid"]]["metadata"] for each in owners if each["uid"] in alive]
            waits = [
                owner for owner in there
                if owner.get("deletionTimestamp") and FOREGROUND in (owner.get("finalizers") or ())
            ]  # fmt: skip
            if len(there) == len(waits):
                yield BY_PATH[group, plural], stored.object

    def _awaited(self, value: Object) -> bool:
        """Say whether an owner that is being deleted waits for an object to be gone."""
        owners = {each["uid"] for each in value["metadata"].get("ownerReferences") or ()}
        return any(each.object["metadata"]["uid"] in owners for each in self._all.values())

    def _finish_foreground(self) -> None:
        for (group, plural, namespace, name), stored in list(self._all.items()):
            metadata = stored.object["metadata"]
            waits = metadata.get("deletionTimestamp") and FOREGROUND in (metadata.get("finalizers") or ())
            if waits and not self._children(metadata["uid"]):
                rest = [each for each in metadata["finalizers"] if each != FOREGROUND]
                patch = {"metadata": {"finalizers": rest or None}}
                self.patch(BY_PATH[group, plural], namespace, name, patch)

    def _children(self, uid: str) -> list[Object]:
        return [
            each.object
            for each in self._all.values()
            if any(owner["uid"] == uid for owner in each.object["metadata"].get("ownerReferences") or ())
        ]

    def _empty(self, namespace: str) -> None:
        """Delete all that is in a namespace, as it is deleted itself."""
        for group, plural, within, name in [key for key in self._all if key[2] == namespace]:
            with contextlib.suppress(Refusal):  # it went with another
                self.delete(BY_PATH[group, plural], within, name, grace=0)

    def _let_go(self, uid: str) -> None:
        for each in self._children(uid):
            owners = [owner for owner in each["metadata"]["ownerReferences"] if owner["uid"] != uid]
            patch = [{"op": "add", "path": "/metadata/ownerReferences", "value": owners}]
            metadata = each["metadata"]
            self.patch(BY_KIND[each["kind"]], metadata.get("namespace", ""), metadata["name"], patch, kind="json")

    # ---- parts ----

    def now(self) -> str:
        """The cluster's time, to the second, as objects have it."""
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _key(self, resource: Resource, namespace: str, name: str) -> Key:
        return (resource.group, resource.plural, namespace if resource.namespaced else "", name)

    def _find(self, resource: Resource, namespace: str, name: str) -> _Stored:
        with self.lock:
            found = self._all.get(self._key(resource, namespace, name))
        if found is None:
            raise not_found(resource, name)
        return found

    def _new(self, resource: Resource, namespace: str, value: Object) -> Object:
        value = copy.deepcopy(value)
        metadata = value.setdefault("metadata", {})
        if value.get("kind", resource.kind) != resource.kind:
            raise bad_request(f"the kind {value['kind']!r} is not that of {resource.full}")
        if metadata.get("resourceVersion"):
            raise Refusal(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if resource.namespaced:
            if metadata.get("namespace", namespace) != namespace:
                raise bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
            self._find(BY_KIND["Namespace"], "", namespace)
            metadata["namespace"] = namespace
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        for key in ("uid", "creationTimestamp", "deletionTimestamp", "generation", "managedFields"):
            metadata.pop(key, None)
        return {"apiVersion": resource.api_version, "kind": resource.kind, **value}

    def _fit(self, resource: Resource, now: Object, before: Object, subresource: str) -> Object:
        """Return `now` with what the server alone decides taken from `before`."""
        if subresource == "status":
            now = {**before, "status": now.get("status", {})}
        elif resource.status:
            now = {key: each for key, each in now.items() if key != "status"}
            if "status" in before:
                now["status"] = before["status"]
        now = {"apiVersion": resource.api_version, "kind": resource.kind, **now}
        now["metadata"] = {**now["metadata"], "name": before["metadata"]["name"]}
        for key in ("namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp", "resourceVersion"):
            now["metadata"].pop(key, None)
            if key in before["metadata"]:
                now["metadata"][key] = before["metadata"][key]
        now["metadata"].pop("managedFields", None)
        return now

    def _store(self, kind: str, resource: Resource, stored: _Stored, before: Object | None, dry_run: bool) -> Object:
        metadata = stored.object["metadata"] = dict(stored.object["metadata"])
        metadata["managedFields"] = _managed(resource, stored.owned, self.now())
        if dry_run:
            metadata.setdefault("resourceVersion", "0")
            return copy.deepcopy(stored.object)
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self._all[self._key(resource, metadata.get("namespace", ""), metadata["name"])] = stored
        self._tell(Change(self._version, kind, resource, stored.object, before))
        if metadata.get("ownerReferences") != ((before or {}).get("metadata") or {}).get("ownerReferences"):
            self.collect()
        return copy.deepcopy(stored.object)

    def _drop(self, resource: Resource, stored: _Stored, dry_run: bool) -> Object:
        last = copy.deepcopy(stored.object)
        if dry_run:
            return last
        self._version += 1
        last["metadata"]["resourceVersion"] = str(self._version)
        del self._all[self._key(resource, last["metadata"].get("namespace", ""), last["metadata"]["name"])]
        self._tell(Change(self._version, "DELETED", resource, last, stored.object))
        self.collect()
        return last

    def _tell(self, change: Change) -> None:
        self._changes.append(change)
        for listener in list(self._listeners):
            listener(change)


def _ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _other_uid(uid: str, value: Object) -> str:
    return f"Precondition failed: UID in precondition: {uid}, UID in object meta: {value['metadata']['uid']}"


def _same(now: Object, before: Object) -> bool:
    def bare(value: Object) -> Object:
        metadata = {key: each for key, each in value["metadata"].items() if key != "managedFields"}
        return {**value, "metadata": metadata}

    return bare(now) == bare(before)


def _took(
    owned: dict[tuple[str, str, str], set[patches.Path]], who: tuple[str, str, str], before: Object, now: Object
) -> dict[tuple[str, str, str], set[patches.Path]]:
    """Return who owns what after a plain write: whatever it changed is its manager's, and nobody else's."""
    old, new = dict(patches.leaves(before)), dict(patches.leaves(now))
    changed = {path for path, each in new.items() if path not in old or old[path] != each}
    lost = old.keys() - new.keys()
    found = {each: paths - changed - lost for each, paths in owned.items()}
    if changed:
        found[who] = found.get(who, set()) | changed
    return {each: paths for each, paths in found.items() if paths}


def _applied(
    resource: Resource, name: str, value: Object, old: _Stored, who: tuple[str, str, str], force: bool
) -> tuple[Object, dict[tuple[str, str, str], set[patches.Path]]]:
    """Return the live object with an applied one in it, and who owns what then.

    Raises:
        Refusal: 409, somebody else owns a field that would change, and `force` is off.
    """
    wanted, live = dict(patches.leaves(value)), dict(patches.leaves(old.object))
    differ = {path for path, each in wanted.items() if path[-1] != "." and path in live and live[path] != each}
    foes = {each: paths & differ for each, paths in old.owned.items() if each != who and paths & differ}
    if foes and not force:
        causes = [
            {"reason": "FieldManagerConflict", "message": f'conflict with "{each[0]}"', "field": _dotted(path)}
            for each, paths in foes.items()
            for path in sorted(paths)
        ]
        said = "; ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
        message = f"Apply failed with {len(causes)} conflict{'s' if len(causes) > 1 else ''}: {said}"
        raise Refusal(409, "Conflict", message, details={"causes": causes})
    bare = {**old.object, "metadata": {k: v for k, v in old.object["metadata"].items() if k != "managedFields"}}
    now = copy.deepcopy(patches.strategic(bare, value))
    owned = {each: paths - differ if each in foes else set(paths) for each, paths in old.owned.items()}
    others: set[patches.Path] = set().union(*(paths for each, paths in owned.items() if each != who))
    for path in sorted(owned.get(who, set()) - wanted.keys() - others, reverse=True):
        patches.remove(now, path)
    owned[who] = set(wanted)
    return now, {each: paths for each, paths in owned.items() if paths}


def _dotted(path: patches.Path) -> str:
    return "".join(f"[{step[2:]}]" if step.startswith("k:") else f".{step.removeprefix('f:')}" for step in path)


def _managed(resource: Resource, owned: dict[tuple[str, str, str], set[patches.Path]], now: str) -> list[Object]:
    return [
        {
            "manager": manager,
            "operation": operation,
            "apiVersion": resource.api_version,
            "time": now,
            "fieldsType": "FieldsV1",
            "fieldsV1": patches.fields_v1(paths),
            **({"subresource": subresource} if subresource else {}),
        }
        for (manager, operation, subresource), paths in owned.items()
    ]
