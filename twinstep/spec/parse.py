"""From text or plain data to a JobSpec, and from pydantic's complaints to faults a person can act on. Pure."""

from __future__ import annotations

import difflib
import functools
import json
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import yaml
from pydantic import ValidationError

from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import NAME_MAX, JobSpec
from twinstep.spec.nearest import Path, fields_at, kinds_at, nearest, nearest_value
from twinstep.spec.text import dump_yaml, load_yaml, plain_text

MAX_SPEC_BYTES = 256 * 1024  # a spec is a page or two; more is a wrong file, or an attempt to exhaust memory
MAX_DEPTH = 32
MAX_GIVEN = 120
UNION_TAGS: Mapping[str | int, tuple[str, ...]] = {
    "accelerator": ("cpu", "tpu", "gpu"),
    "model": ("dlrmv3", "dlrm", "module"),
}
"""What pydantic puts behind the name of a field that is a union, between it and what the user wrote."""
MAX_FAULTS = 50  # nobody mends more at a time, and each costs a search for the nearest valid value


def parse_spec(text: str | bytes, *, source: str = "spec") -> JobSpec:
    """Return the JobSpec that YAML or JSON `text` holds.

    Raises:
        SpecError: the text is no YAML, is too large or too deep, or its content is no valid JobSpec.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > MAX_SPEC_BYTES:
        raise SpecError(
            f"{source} has {len(raw):,} bytes, more than the {MAX_SPEC_BYTES:,} a spec may have",
            remedy="give the path of a job spec (examples/ has some)",
        )
    try:
        data = load_yaml(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SpecError(f"{source} is not UTF-8 text (byte {error.start})", remedy="save it as UTF-8") from None
    except RecursionError:
        raise SpecError(f"{source} is nested too deeply", remedy="a spec has at most three levels") from None
    except (yaml.YAMLError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise SpecError(
            f"{source} is not valid YAML: {detail}", remedy="correct the line named; examples/ has whole specs"
        ) from None
    return validate_spec(data, source=source)


def validate_spec(data: Any, *, source: str = "spec") -> JobSpec:
    """Return the JobSpec that plain data (mappings, lists, scalars) describes, or raise SpecError naming each field."""
    if not isinstance(data, Mapping):
        raise SpecError(
            f"{source} holds {_kind(data)}, not a mapping of fields",
            remedy="start with `name: my-job`; examples/ has whole ones",
        )
    if _depth(data) > MAX_DEPTH:
        raise SpecError(f"{source} is nested too deeply", remedy="a spec has at most three levels")
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        faults, more = spec_faults(error, data)
        count = len(faults) + more
        raise SpecError(
            f"{source} is not valid: {count:,} field{'s' if count > 1 else ''} to mend"
            + (f"; here are {len(faults)}, and {more:,} more" if more else ""),
            remedy="; ".join(fault.remedy for fault in faults if fault.remedy) or "mend the fields named",
            faults=faults,
        ) from None


def spec_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a JobSpec."""
    return JobSpec.model_json_schema()


def dump_spec(spec: JobSpec) -> str:
    """Return the spec as YAML, fields in declaration order; parses back to an equal spec."""
    return dump_yaml(spec.model_dump(mode="json"))


def spec_faults(error: ValidationError, data: Mapping[str, Any]) -> tuple[tuple[Fault, ...], int]:
    """Turn pydantic's errors into faults: field, given, allowed, nearest valid value.

    Return the first ones, `MAX_FAULTS` at most, and how many errors there are beyond them.
    """
    faults: dict[str, Fault] = {}
    items = error.errors(include_url=False)
    for done, item in enumerate(items):
        if len(faults) == MAX_FAULTS:
            return tuple(faults.values()), len(items) - done
        fault = _fault(dict(item), data)
        faults.setdefault(fault.field + fault.problem, fault)
    return tuple(faults.values()), 0


def _fault(item: dict[str, Any], data: Mapping[str, Any]) -> Fault:
    path = _user_path(item["loc"], data)
    kind, context, given = item["type"], item.get("ctx") or {}, item.get("input")
    if "part" in context:  # a rule between a part of this field and another field
        path, given = (*path, context["part"]), given.get(context["part"]) if isinstance(given, Mapping) else given
    if "at" in context:  # a rule of two fields that stands at neither
        path, given = context["at"], context["given"]
    if kind == "extra_forbidden":
        return _unknown_key(path, given, data)
    if kind == "invalid_key" or item["loc"][-1:] == ("[key]",):
        allowed = f"text of the form {context['pattern']}" if "pattern" in context else "text"
        return _named(path, "is not a name it can have", allowed=allowed, remedy=f"remove {_cut(plain_text(path[-1]))}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = kinds_at(path, data)
        wrong = context.get("tag", given.get("kind") if isinstance(given, Mapping) else given)
        problem = "is required" if wrong is None else "is not one of the values it can have"
        remedy = f"kind: {kinds[0] if wrong is None else nearest(plain_text(wrong), kinds)}"
        return _named((*path, "kind"), problem, given=wrong, allowed=", ".join(kinds), remedy=remedy)
    problem, allowed = _complaint(item, path)
    return _named(
        path,
        problem,
        given=_MISSING if kind == "missing" else given,
        allowed=allowed,
        remedy=_set_to(
            path, context["nearest"] if kind == "between_fields" else given, data, missing=kind == "missing"
        ),
    )


_MISSING = object()
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
_TYPES = {
    "int_type": ("must be a whole number", "a whole number"),
    "int_from_float": ("must be a whole number", "a whole number"),
    "float_type": ("must be a number", "a number"),
    "finite_number": ("must be finite", "a finite number"),
    "bool_type": ("must be true or false", "true, false"),
    "string_type": ("must be text", "text"),
    "model_type": ("must be a mapping of fields", "a mapping of fields"),
    "model_attributes_type": ("must be a mapping of fields", "a mapping of fields"),
    "dict_type": ("must be a mapping", "a mapping"),
    "tuple_type": ("must be a list", "a list"),
    "too_long": ("has too many values", ""),
}


def _complaint(item: dict[str, Any], path: Path) -> tuple[str, str]:
    """Return what is wrong with a value, and what is allowed."""
    kind, context, given = item["type"], item.get("ctx") or {}, item.get("input")
    if kind == "missing":
        return "is required", ""
    if kind == "between_fields":
        return str(item["msg"]), context["allowed"]
    if kind == "literal_error":
        return "is not one of the values it can have", ", ".join(re.findall(r"'([^']*)'", context["expected"]))
    if path == ("name",):
        return "is not a valid name", f"1 to {NAME_MAX} lower-case letters, digits and '-', starting with a letter"
    for name, sign in _BOUNDS:
        if name in context:
            return "is out of range", f"{sign} {context[name]}"
    if kind in _TYPES:
        problem, allowed = _TYPES[kind]
        quoted = kind in ("int_type", "float_type") and isinstance(given, str) and given.strip().isdecimal()
        return f"{problem}, without quotes" if quoted else problem, allowed
    if "pattern" in context:
        return "has not the form it must have", f"text of the form {context['pattern']}"
    message = str(item["msg"])
    return message[:1].lower() + message[1:], ""


def _named(path: Path, problem: str, *, allowed: str, remedy: str, given: Any = _MISSING) -> Fault:
    field = ".".join(_cut(plain_text(part)) for part in path)
    shown = "" if given is _MISSING else show(given)
    return Fault(field=field, problem=problem, given=shown, allowed=allowed, remedy=remedy)


def _set_to(path: Path, given: Any, data: Mapping[str, Any], *, missing: bool) -> str:
    """Return `field: value` with the valid value nearest to what was given; for a part of a list, the whole list."""
    index = next((depth for depth, part in enumerate(path) if isinstance(part, int)), None)
    if index is not None:
        path, missing = path[:index], False
        given = functools.reduce(operator.getitem, path, cast(Any, data))
    try:
        value = nearest_value(path, None if missing else given, data)
    except LookupError:
        return f"remove {_cut(plain_text(path[-1]))}"
    return dump_yaml({path[-1]: value}, flow=True).strip()[1:-1]


def _unknown_key(path: Path, given: Any, data: Mapping[str, Any]) -> Fault:
    key, options = _cut(plain_text(path[-1])), fields_at(path[:-1], data)
    close = difflib.get_close_matches(key, options, n=1, cutoff=0.6)
    remedy = f"did you mean {close[0]}?" if close else f"remove {key}"
    return _named(path, "is not a field", given=given, allowed=", ".join(options), remedy=remedy)


def _user_path(loc: Iterable[str | int], data: Mapping[str, Any]) -> Path:
    """Drop the parts of pydantic's location that name a union's member and not a key the user wrote."""
    out: list[str | int] = []
    parts = list(loc)
    for index, part in enumerate(parts):
        is_tag = index == 1 and part in UNION_TAGS.get(parts[0], ())
        is_type_note = isinstance(part, str) and ("[" in part or part in ("constrained-int", "int", "float", "str"))
        if not (is_tag or (is_type_note and not _has(data, [*out, part]))):
            out.append(part)
    return tuple(out)


def _has(data: Any, path: list[str | int]) -> bool:
    for part in path:
        try:
            data = data[part]
        except (TypeError, KeyError, IndexError):
            return False
    return True


def show(value: Any) -> str:
    """Return `value` as a user would write it, cut to 120 characters."""
    if value is None:
        return "null"
    if isinstance(value, Mapping | list | tuple):
        try:
            return _cut(json.dumps(value, default=str))
        except (ValueError, TypeError):  # a number of too many digits, a key that JSON has none of
            return _cut(plain_text(value))
    if isinstance(value, str):
        return _cut(repr(value))
    return str(value).lower() if isinstance(value, bool) else _cut(plain_text(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_GIVEN else text[: MAX_GIVEN - 1] + "…"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else f"a single value ({show(value)})"


def _depth(value: Any, depth: int = 0) -> int:
    if depth > MAX_DEPTH:
        return depth
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return max((_depth(child, depth + 1) for child in children), default=depth)
