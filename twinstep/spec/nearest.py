"""The valid value nearest to one that is not: found by trying candidates on the field itself. Pure.

`parse.py` asks, for the remedy of a fault. A field's own type decides, so a new field needs no word here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from twinstep.spec.job import NAME_MAX, NAME_PATTERN, JobSpec
from twinstep.spec.text import plain_text

Path = tuple[str | int, ...]
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")
_MISSING = object()
MOST_COMPARED = 200  # characters of what was given that are looked at; no word of a spec is longer


def nearest_value(path: Path, given: Any, data: Any) -> Any:
    """Return a value that the field at `path` of a spec takes, as near to `given` as can be.

    Args:
        path: a field that a spec has.
        given: what stands there; anything.
        data: the whole spec as given, which tells the kind of a field that has several.

    Raises:
        LookupError: the spec has no such field, or no valid value could be found.
    """
    parent, part = _annotation_at(path[:-1], data), path[-1]
    kind, field = _child(parent, part, _value_at(data, path[:-1]))
    for candidate in _candidates(kind, field, given):
        if _valid(kind, candidate):
            return candidate
    raise LookupError(path)


def fields_at(path: Path, data: Any) -> list[str]:
    """Return the names of the fields a spec has under `path`, sorted; none where it takes any name, or nothing."""
    try:
        kind = _annotation_at(path, data)
    except LookupError:
        return []
    return sorted({name for model in _models(kind, _value_at(data, path)) for name in model.model_fields})


def kinds_at(path: Path, data: Any) -> list[str]:
    """Return the kinds that the field at `path` of a spec may have."""
    models = _models(_annotation_at(path, data), None)
    return [kind for model in models for kind in _options(model.model_fields["kind"].annotation)]


def nearest(given: str, options: Iterable[str]) -> str:
    """Return the option most like `given`: by spelling, else the first."""
    choices = list(options)
    close = difflib.get_close_matches(given[:MOST_COMPARED].lower(), choices, n=1, cutoff=0.0)
    return close[0] if close else (choices[0] if choices else "")


def suggest_name(given: Any) -> str:
    """Return a valid name as near to `given` as can be."""
    text = (
        re.sub(r"[^a-z0-9]+", "-", plain_text(given)[:MOST_COMPARED].lower())
        .lstrip("-0123456789")[:NAME_MAX]
        .rstrip("-")
    )
    return text or "my-job"


def _annotation_at(path: Path, data: Any) -> Any:
    kind: Any = JobSpec
    for depth, part in enumerate(path):
        kind, _ = _child(kind, part, _value_at(data, path[:depth]))
    return kind


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        try:
            data = data[part]
        except (TypeError, KeyError, IndexError):
            return None
    return data


def _child(kind: Any, part: str | int, value: Any) -> tuple[Any, FieldInfo | None]:
    """Return the type of the part `part` of a `kind`, and its field where it is one; `value` tells a union's member."""
    for model in _models(kind, value):
        if part in model.model_fields:
            field = model.model_fields[str(part)]
            return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation, field
    for each in _flat(kind):
        arguments = get_args(each)
        if get_origin(each) is dict:
            return arguments[1], None
        if get_origin(each) is tuple and isinstance(part, int) and part < len(arguments):
            return arguments[part], None
    raise LookupError(part)


def _models(kind: Any, value: Any) -> list[type[BaseModel]]:
    """Return the models that `kind` may be: the one that `value` says it is, or that it is when it says nothing."""
    found = [each for each in _flat(kind) if isinstance(each, type) and issubclass(each, BaseModel)]
    wanted = value.get("kind") if isinstance(value, Mapping) else value
    named = [model for model in found if len(found) > 1 and wanted in _options(model.model_fields["kind"].annotation)]
    if len(found) > 1 and isinstance(value, Mapping) and "kind" not in value:
        named = [model for model in found if not model.model_fields["kind"].is_required()]
    return named if len(named) == 1 else found


def _flat(kind: Any) -> list[Any]:
    """Return the members of a union without the annotations around them."""
    if get_origin(kind) is Annotated:
        return _flat(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [each for member in get_args(kind) for each in _flat(member)]
    return [kind]


def _options(kind: Any) -> list[str]:
    return [str(option) for each in _flat(kind) if get_origin(each) is Literal for option in get_args(each)]


def _candidates(kind: Any, field: FieldInfo | None, given: Any) -> Iterator[Any]:
    """Yield what may be valid and near, the nearest first."""
    bounds, options = _bounds(kind), _options(kind)
    if given is None:
        yield from _defaults(field)
        yield from options
    numbers = list(_numbers(given))
    yield from numbers
    for number in numbers:
        for name, bound in bounds.items():
            if (number <= bound) if name in ("ge", "gt") else (number >= bound):
                yield _inside(name, bound, number)
    if isinstance(given, str):
        yield given.strip()
        yield _WORDS.get(given.strip().lower(), _MISSING)
    if options:
        yield nearest(plain_text(given), options)
    if isinstance(given, int | float) and not isinstance(given, bool):
        yield plain_text(given)
    if any(getattr(each, "pattern", None) == NAME_PATTERN for each in _constraints(kind)):
        yield suggest_name("" if given is None else given)
    if isinstance(given, list | tuple):
        yield from _sequences(kind, field, list(given))
    if isinstance(given, Mapping):
        yield dict(given)
    yield from _defaults(field)
    yield from (bound for name, bound in bounds.items() if name in ("ge", "le"))
    yield {}


def _defaults(field: FieldInfo | None) -> Iterator[Any]:
    if field is None:
        return
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        yield {}
        yield getattr(default, "kind", None)
    elif default is not PydanticUndefined:
        yield list(default) if isinstance(default, tuple) else default
    yield from field.examples or ()


def _sequences(kind: Any, field: FieldInfo | None, given: list[Any]) -> Iterator[list[Any]]:
    """Mend a sequence element by element; one of fixed length from its default where nothing was given."""
    for each in _flat(kind):
        members = get_args(each)
        if get_origin(each) is not tuple or field is None:
            continue
        if members[-1:] == (...,):  # of any length: an element is mended, or left out, and stands once
            found = [next((one for one in (v, *_candidates(members[0], None, v)) if _valid(members[0], one)), None)
                     for v in given]  # fmt: skip
            yield list(dict.fromkeys(one for one in found if one is not None))
            continue
        default = list(field.default)
        mended = []
        for index, member in enumerate(members):
            value = given[index] if index < len(given) else default[index]
            candidates = (value, *_candidates(member, None, value), default[index])
            mended.append(next(each for each in candidates if _valid(member, each)))
        yield mended


def _valid(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def _numbers(given: Any) -> Iterator[int | float]:
    """Yield the numbers that `given` may have been meant as, whole ones first where it is whole."""
    if isinstance(given, str):
        text = given.strip().replace("_", "").replace(",", "").lower()
        if not _NUMBER.fullmatch(text) or len(text) > 40:
            return
        given = float(text) if re.search("[.e]", text) else int(text)
    if isinstance(given, bool) or not isinstance(given, int | float):
        return
    yield given
    if isinstance(given, float) and math.isfinite(given):
        yield math.floor(given)


def _constraints(kind: Any) -> list[Any]:
    """Return what is annotated anywhere around the members of `kind`."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        unpacked = [each for note in notes for each in (note.metadata if isinstance(note, FieldInfo) else [note])]
        return [*unpacked, *_constraints(inner)]
    if get_origin(kind) in (Union, UnionType):
        return [each for member in get_args(kind) for each in _constraints(member)]
    return []


def _bounds(kind: Any) -> dict[str, Any]:
    found = {}
    for each in _constraints(kind):
        for name in ("ge", "gt", "le", "lt"):
            if (bound := getattr(each, name, None)) is not None:
                found[name] = bound
    return found


def _inside(name: str, bound: Any, given: Any) -> Any:
    """Return the value at a bound; exclusive bounds step in by one, or by a small share."""
    step = {"gt": 1, "lt": -1}.get(name, 0)
    if step == 0:
        return bound
    if isinstance(given, int) and isinstance(bound, int) and abs(bound) > 1:
        return bound + step
    return bound + step * 0.001 if bound == 0 else round(bound * (1 + 0.001 * step), 6)
