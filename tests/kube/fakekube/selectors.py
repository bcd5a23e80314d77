"""Label and field selectors, as the query parameters of a list or a watch have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .resources import bad_request

_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_SIMPLE = re.compile(r"^\s*([^!=\s]+)\s*(==|=|!=)\s*(\S*)\s*$")

FIELDS = {
    "Pod": ("spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase", "status.podIP"),
    "Event": (
        "involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid", "reason",
        "reportingComponent", "source", "type",
    ),
    "Secret": ("type",),
    "Job": ("status.successful",),
    "Node": ("spec.unschedulable",),
    "Namespace": ("status.phase",),
}  # fmt: skip
"""What each kind may be selected by, beside `metadata.name` and `metadata.namespace`; any other field is a 400."""

Selector = Callable[[dict[str, Any]], bool]


def selector(kind: str, labels: str, fields: str) -> Selector:
    """Return whether an object is selected."""
    tests = [_label(part) for part in _parts(labels)] + [_field(kind, part) for part in _parts(fields)]
    return lambda value: all(test(value) for test in tests)


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label(part: str) -> Selector:
    def labels(value: dict[str, Any]) -> dict[str, str]:
        return value["metadata"].get("labels") or {}

    if found := _SET.match(part):
        key, wanted = found[1], [each.strip() for each in found[3].split(",")]
        if found[2] == "in":
            return lambda value: labels(value).get(key) in wanted
        return lambda value: labels(value).get(key) not in wanted
    if found := _SIMPLE.match(part):
        key, text = found[1], found[3]
        if found[2] == "!=":
            return lambda value: labels(value).get(key) != text
        return lambda value: labels(value).get(key) == text
    key = part.strip()
    if key.startswith("!"):
        return lambda value: key[1:].strip() not in labels(value)
    if re.fullmatch(r"[\w./-]+", key):
        return lambda value: key in labels(value)
    raise bad_request(f"unable to parse requirement: {part!r}")


def _field(kind: str, part: str) -> Selector:
    found = _SIMPLE.match(part)
    if not found:
        raise bad_request(f"invalid selector: {part!r}; can't understand {part!r}")
    key, text, equal = found[1], found[3], found[2] != "!="
    if key not in ("metadata.name", "metadata.namespace", *FIELDS.get(kind, ())):
        raise bad_request(f"field label not supported: {key}")

    def at(value: Any) -> str:
        for step in key.split("."):
            value = (value or {}).get(step)
        return "" if value is None else str(value)

    return lambda value: (at(value) == text) is equal
