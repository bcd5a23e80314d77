"""From text or plain data to a JobSpec, and from pydantic's complaints to faults a person can act on. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import NAME_MAX, JobSpec

MAX_SPEC_BYTES = 256 * 1024  # a spec is a page or two; more is a wrong file, or an attempt to exhaust memory
MAX_DEPTH = 32
MAX_GIVEN = 120


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, less aliases (a few lines could unfold to gigabytes) and less doubled keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key must be a single word")
            key = key_node.value
            if key in seen:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-8 as text and wants 1.0e-8; JSON, YAML 1.2 and people write the former.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


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
        data = yaml.load(raw.decode("utf-8"), Loader=_StrictLoader)  # noqa: S506  a subclass of SafeLoader
    except UnicodeDecodeError as error:
        raise SpecError(f"{source} is not UTF-8 text (byte {error.start})", remedy="save it as UTF-8") from None
    except RecursionError:
        raise SpecError(f"{source} is nested too deeply", remedy="a spec has at most three levels") from None
    except (yaml.YAMLError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise SpecError(f"{source} is not valid YAML: {detail}", remedy="mend the line named") from None
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
        faults = spec_faults(error, data)
        count = len(faults)
        raise SpecError(
            f"{source} is not valid: {count} field{'s' if count > 1 else ''} to mend",
            remedy="; ".join(fault.remedy for fault in faults if fault.remedy) or "mend the fields named",
            faults=faults,
        ) from None


def spec_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a JobSpec."""
    return JobSpec.model_json_schema()


def dump_spec(spec: JobSpec) -> str:
    """Return the spec as YAML, fields in declaration order; parses back to an equal spec."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def spec_faults(error: ValidationError, data: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Turn pydantic's errors into faults: field, given, allowed, nearest valid value."""
    faults: dict[str, Fault] = {}
    for item in error.errors(include_url=False):
        fault = _fault(dict(item), data)
        faults.setdefault(fault.field + fault.problem, fault)
    return tuple(faults.values())


def _fault(item: dict[str, Any], data: Mapping[str, Any]) -> Fault:
    path = _user_path(item["loc"], data)
    kind, context = item["type"], item.get("ctx") or {}
    field, given = ".".join(str(part) for part in path), show(item.get("input"))
    if kind == "extra_forbidden":
        return _unknown_key(path, given)
    if kind == "missing":
        return Fault(field=field, problem="is required", remedy=f"add `{path[-1]}:`")
    if kind in ("literal_error", "union_tag_invalid"):
        allowed = context.get("expected") or context.get("expected_tags", "")
        options = re.findall(r"'([^']*)'", allowed)
        wrong = context.get("tag", item.get("input"))
        if kind == "union_tag_invalid":
            field, given = f"{field}.kind" if field else "kind", show(wrong)
        return Fault(
            field=field,
            problem="is not one of the values it can have",
            given=given,
            allowed=", ".join(options),
            remedy=f"{path[-1] if kind == 'literal_error' else 'kind'}: {nearest(str(wrong), options)}",
        )
    if kind == "union_tag_not_found":
        return Fault(
            field=f"{field}.kind",
            problem="is required",
            given=given,
            allowed="cpu, tpu, gpu",
            remedy="kind: cpu",
        )
    if (bounds := _out_of_range(item, path, given)) is not None:
        return bounds
    if field == "name":
        return Fault(
            field=field,
            problem="is not a valid name",
            given=given,
            allowed=f"1 to {NAME_MAX} lower-case letters, digits and '-', starting with a letter",
            remedy=f"name: {suggest_name(item.get('input'))}",
        )
    message = str(item["msg"]).removeprefix("Value error, ")
    return Fault(
        field=field,
        problem=_plain(message),
        given=given,
        allowed=_allowed(kind, context),
        remedy=f"mend {field}" if field else "mend the spec",
    )


_BOUNDS = (("ge", "at least", 0), ("gt", "more than", 1), ("le", "at most", 0), ("lt", "less than", -1))


def _out_of_range(item: dict[str, Any], path: tuple[str | int, ...], given: str) -> Fault | None:
    context = item.get("ctx") or {}
    for name, sign, step in _BOUNDS:
        if name in context:
            return Fault(
                field=".".join(str(part) for part in path),
                problem="is out of range",
                given=given,
                allowed=f"{sign} {context[name]}",
                remedy=f"{path[-1]}: {_inside(context[name], step, item.get('input'))}",
            )
    return None


def _unknown_key(path: tuple[str | int, ...], given: str) -> Fault:
    parent, key = path[:-1], str(path[-1])
    options = sorted(_fields_at(parent))
    close = difflib.get_close_matches(key, options, n=1, cutoff=0.6)
    return Fault(
        field=".".join(str(part) for part in path),
        problem="is not a field",
        given=given,
        allowed=", ".join(options),
        remedy=f"did you mean {close[0]}?" if close else f"remove {key}",
    )


def _user_path(loc: Iterable[str | int], data: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Drop the parts of pydantic's location that name a union's member and not a key the user wrote."""
    out: list[str | int] = []
    parts = list(loc)
    for index, part in enumerate(parts):
        is_tag = out and out[-1] == "accelerator" and part in ("cpu", "tpu", "gpu") and index < len(parts)
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


def _fields_at(path: tuple[str | int, ...]) -> set[str]:
    """Return the names of the fields a spec has under `path`."""
    models: list[type[BaseModel]] = [JobSpec]
    for part in path:
        found: list[type[BaseModel]] = []
        for model in models:
            if part in model.model_fields:
                found.extend(_models_in(model.model_fields[str(part)].annotation))
        models = found
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [model for arg in get_args(annotation) for model in _models_in(arg)]
    if get_origin(annotation) is Literal:
        return []
    return []


def nearest(given: str, options: Iterable[str]) -> str:
    """Return the option most like `given`: by spelling, else the first."""
    choices = list(options)
    close = difflib.get_close_matches(given.lower(), choices, n=1, cutoff=0.0)
    return close[0] if close else (choices[0] if choices else "")


def suggest_name(given: Any) -> str:
    """Return a valid name as near to `given` as can be."""
    text = re.sub(r"[^a-z0-9]+", "-", str(given).lower()).lstrip("-0123456789")[:NAME_MAX].rstrip("-")
    return text or "my-job"


def show(value: Any) -> str:
    """Return `value` as a user would write it, cut to 120 characters."""
    if isinstance(value, Mapping | list | tuple):
        text = json.dumps(value, default=str)
    else:
        text = (
            "null"
            if value is None
            else repr(value)
            if isinstance(value, str)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
    return text if len(text) <= MAX_GIVEN else text[: MAX_GIVEN - 1] + "…"


def _inside(bound: Any, step: int, given: Any) -> Any:
    """Return the value nearest to `given` inside a bound; exclusive bounds step in by one, or by a small share."""
    if step == 0:
        return bound
    if isinstance(given, int) and not isinstance(given, bool) and isinstance(bound, int) and abs(bound) > 1:
        return bound + step
    return bound + step * 0.001 if bound == 0 else round(bound * (1 + 0.001 * step), 6)


def _plain(message: str) -> str:
    table = {
        "Input should be a valid integer": "must be a whole number, without quotes",
        "Input should be a valid number": "must be a number, without quotes",
        "Input should be a valid boolean": "must be true or false",
        "Input should be a valid string": "must be text",
    }
    for start, plain in table.items():
        if message.startswith(start):
            return plain
    return message[:1].lower() + message[1:]


def _allowed(kind: str, context: Mapping[str, Any]) -> str:
    if "pattern" in context:
        return f"text of the form {context['pattern']}"
    return {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true, false",
        "string_type": "text",
        "model_type": "a mapping of fields",
        "dict_type": "a mapping",
    }.get(kind, "")


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else f"a single value ({show(value)})"


def _depth(value: Any, depth: int = 0) -> int:
    if depth > MAX_DEPTH:
        return depth
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return max((_depth(child, depth + 1) for child in children), default=depth)
