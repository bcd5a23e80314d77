"""Merge, JSON and (as far as a client needs it) strategic merge patches; the fields that server-side apply owns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from .resources import Object, Refusal, bad_request

LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",), "initContainers": ("name",), "volumes": ("name",), "env": ("name",),
    "volumeMounts": ("mountPath",), "ports": ("containerPort", "protocol"), "conditions": ("type",),
    "ownerReferences": ("uid",), "replicatedJobs": ("name",), "replicatedJobsStatus": ("name",),
    "imagePullSecrets": ("name",),
}  # fmt: skip
"""Lists that are maps, by name of the field; every other list is one value."""
SETS = ("finalizers",)


def merge(value: Any, patch: Any) -> Any:
    """Return `value` with an RFC 7396 merge patch in it."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    found = dict(value) if isinstance(value, dict) else {}
    for key, each in patch.items():
        if each is None:
            found.pop(key, None)
        else:
            found[key] = merge(found.get(key), each)
    return found


def strategic(value: Any, patch: Any, field: str = "") -> Any:
    """Return `value` with a strategic merge patch: as `merge`, but lists that are maps are merged by their key."""
    if isinstance(patch, dict):
        found = dict(value) if isinstance(value, dict) else {}
        for key, each in patch.items():
            if each is None:
                found.pop(key, None)
            else:
                found[key] = strategic(found.get(key), each, key)
        return found
    if isinstance(patch, list) and field in LIST_KEYS and isinstance(value, list):
        return _merge_list(value, patch, field)
    if isinstance(patch, list) and field in SETS:
        return [*(value or []), *[each for each in patch if each not in (value or [])]]
    return copy.deepcopy(patch)


def _merge_list(value: list[Any], patch: list[Any], field: str) -> list[Any]:
    found = list(value)
    for each in patch:
        at = next((i for i, old in enumerate(found) if _key(old, field) == _key(each, field)), None)
        if each.get("$patch") == "delete":
            if at is not None:
                del found[at]
        elif at is None:
            found.append(copy.deepcopy(each))
        else:
            found[at] = strategic(found[at], each)
    return found


def json_patch(value: Any, steps: list[Object]) -> Any:
    """Return `value` with an RFC 6902 patch in it."""
    found = copy.deepcopy(value)
    for step in steps:
        path = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        try:
            _step(found, step, path)
        except (LookupError, TypeError, ValueError):
            said = "testing value" if step["op"] == "test" else step["op"]
            raise Refusal(
                422, "Invalid", f"the server rejected our request due to an error in our request: {said} {step['path']}"
            ) from None
    return found


def _step(root: Any, step: Object, path: list[str]) -> None:
    at = root
    for part in path[:-1]:
        at = at[int(part)] if isinstance(at, list) else at[part]
    last, op = path[-1], step["op"]
    if isinstance(at, list):
        index = len(at) if last == "-" else int(last)
        if op == "add":
            at.insert(index, step["value"])
        elif op == "remove":
            del at[index]
        elif op == "replace":
            at[index] = step["value"]
        elif op == "test" and at[index] != step["value"]:
            raise ValueError(op)
    elif op == "add" or (op == "replace" and last in at):
        at[last] = step["value"]
    elif op == "remove":
        del at[last]
    elif op == "test":
        if at.get(last) != step["value"]:
            raise ValueError(op)
    else:
        raise LookupError(op)


# ---- server-side apply ----

Path = tuple[str, ...]
_SERVERS = ("managedFields", "uid", "resourceVersion", "creationTimestamp", "generation", "name", "namespace")


def leaves(value: Any, path: Path = (), field: str = "") -> Iterator[tuple[Path, Any]]:
    """Yield each field that somebody can own, in the words of FieldsV1 (`f:spec`, `k:{"name":"a"}`)."""
    if path == () and isinstance(value, dict):
        value = {key: each for key, each in value.items() if key not in ("apiVersion", "kind")}
        if "metadata" in value:
            own = {key: each for key, each in value["metadata"].items() if key not in _SERVERS}
            value = {**value, "metadata": own}
    if isinstance(value, dict) and (value or path == () or path == ("f:metadata",)):
        for key, each in value.items():
            yield from leaves(each, (*path, f"f:{key}"), key)
    elif isinstance(value, list) and field in LIST_KEYS and value:
        for each in value:
            here = (*path, f"k:{_key(each, field)}")
            yield (*here, "."), None
            yield from leaves(each, here)
    else:
        yield path, value


def _key(value: Any, field: str) -> str:
    if not isinstance(value, dict):
        raise bad_request(f"{field}: expected a map, got {value!r}")
    defaults = {"protocol": "TCP"}
    parts = (f'"{name}":"{value.get(name, defaults.get(name, ""))}"' for name in LIST_KEYS[field])
    return "{" + ",".join(parts) + "}"


def remove(value: Any, path: Path, field: str = "") -> None:
    """Take one field out of an object, and what is empty then."""
    if value is None:
        return
    step, *rest = path
    if step.startswith("k:"):
        at = next((i for i, each in enumerate(value) if f"k:{_key(each, field)}" == step), None)
        if at is not None:
            if tuple(rest) == (".",):
                del value[at]
            else:
                remove(value[at], tuple(rest))
        return
    key = step.removeprefix("f:")
    if not isinstance(value, dict) or key not in value:
        return
    if rest:
        remove(value[key], tuple(rest), key)
        if value[key] in ({}, []):
            del value[key]
    else:
        del value[key]


def fields_v1(paths: set[Path]) -> Object:
    """Return a set of fields as `fieldsV1`."""
    found: Object = {}
    for path in sorted(paths):
        at = found
        for step in path:
            at = at.setdefault(step, {})
    return found
