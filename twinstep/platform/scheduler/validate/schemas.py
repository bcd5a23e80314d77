"""Structural schemas as the API server applies them with strict field validation. Reads schema files, sends nothing."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from twinstep.spec.errors import Fault, UnavailableError
from twinstep.spec.parse import show

KUBERNETES = "1.37"
"""Version whose core schemas are applied."""
_ROOT = ("apiVersion", "kind", "metadata")
_RANGES = {"int32": 2**31, "int64": 2**63}

Schema = Mapping[str, Any]
_formats = FormatChecker()


def _in_range(bits: int) -> Any:
    return lambda value: not isinstance(value, int) or isinstance(value, bool) or -bits <= value < bits


for _name, _bits in _RANGES.items():
    _formats.checks(_name)(_in_range(_bits))


class CustomResources:
    """The schemas of a directory of CRD files (`.yaml`, `.yaml.gz`), read when first asked for.

    Raises:
        UnavailableError: the directory is not there, or a file in it is no CRD.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not directory.is_dir():
            raise UnavailableError(
                f"the directory of custom resource definitions {directory} is not there",
                remedy="give one with the CRD files of JobSet, KubeRay and Kueue, or none",
            )

    def find(self, api_version: str, kind: str) -> CustomResource | None:
        """Return the schema of a kind, or None where the directory has none."""
        return self._all.get((api_version, kind))

    @functools.cached_property
    def _all(self) -> dict[tuple[str, str], CustomResource]:
        found: dict[tuple[str, str], CustomResource] = {}
        for path in sorted([*self._directory.glob("*.yaml"), *self._directory.glob("*.yaml.gz")]):
            for api_version, kind, version in _versions(path):
                found[api_version, kind] = CustomResource(version)
        return found


def _versions(path: Path) -> Iterator[tuple[str, str, Schema]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        definition = yaml.load(raw, Loader=loader)  # noqa: S506  a safe loader
        spec = definition["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            yield f"{spec['group']}/{version['name']}", spec["names"]["kind"], schema
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise UnavailableError(
            f"{path} is no custom resource definition: {type(error).__name__}: {str(error)[:200]}",
            remedy="fetch the file again from the project's release, or remove it",
        ) from None


class CustomResource:
    """One kind's schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    @functools.cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator(_json_schema(self._schema, root=True), format_checker=_formats)

    def faults(self, value: Mapping[str, Any]) -> list[Fault]:
        """Return what the API server would refuse in an object of this kind."""
        found = [_fault(error) for error in self._validator.iter_errors(value)]
        found += [
            Fault(field=path, problem="is not a field of this kind", remedy=f"remove {path.rsplit('.', 1)[-1]}")
            for path in _unknown(value, self._schema, "")
        ]
        return found + list(_doubled(value, self._schema, ""))


def core_faults(value: Mapping[str, Any]) -> list[Fault]:
    """Return what the API server would refuse in an object of a core kind."""
    return [_fault(error) for error in _core(value["apiVersion"], value["kind"]).iter_errors(value)]


@functools.cache
def _core(api_version: str, kind: str) -> Draft202012Validator:
    group, _, version = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0] + '-' if group else ''}{version}"
    directory = f"kubernetes-json-schema/v{_patch()}-local-strict"
    schema = schema_contents(f"{directory}/{name}.json", KUBERNETES)
    return Draft202012Validator(schema, registry=_definitions(directory), format_checker=_formats)


@functools.cache
def _definitions(directory: str) -> Registry[Any]:
    found: Resource[Any] = Resource.from_contents(schema_contents(f"{directory}/_definitions.json", KUBERNETES))
    return found @ Registry()


@functools.cache
def _patch() -> str:
    from kubernetes_validate.utils import all_versions

    return str(max(each for each in all_versions() if each.startswith(KUBERNETES)))


def _json_schema(schema: Schema, *, root: bool = False) -> dict[str, Any]:
    """Return a structural schema in plain JSON Schema: Kubernetes' own words (int-or-string, nullable) spelled out."""
    if schema.get("x-kubernetes-int-or-string"):
        found = {key: value for key, value in schema.items() if key not in ("type", "anyOf")}
        return {**found, "type": ["integer", "string"]}
    found = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "nullable"}
    if schema.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    if "properties" in found:
        found["properties"] = {name: _json_schema(each) for name, each in found["properties"].items()}
        if root:
            found["properties"]["metadata"] = {"type": "object"}  # the server owns its schema
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), Mapping):
            found[key] = _json_schema(found[key])
    return found


def _unknown(value: Any, schema: Schema, path: str) -> Iterator[str]:
    """Yield the path of each key that the schema does not know."""
    if isinstance(value, Mapping):
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        for key, each in value.items():
            place = f"{path}.{key}" if path else str(key)
            part = properties.get(key, more if isinstance(more, Mapping) else None)
            if part is not None:
                if path or key not in _ROOT:
                    yield from _unknown(each, part, place)
            elif more is not True and (path or key not in _ROOT):
                yield place
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for index, each in enumerate(value):
            yield from _unknown(each, schema["items"], f"{path}[{index}]")


def _doubled(value: Any, schema: Schema, path: str) -> Iterator[Fault]:
    """Yield a fault for each list that is a map or a set and has the same key twice."""
    if isinstance(value, Mapping):
        for key, part in schema.get("properties", {}).items():
            if key in value:
                yield from _doubled(value[key], part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        items = schema.get("items", {})
        keys = [_list_key(each, schema, items) for each in value] if schema.get("x-kubernetes-list-type") else []
        for index, key in enumerate(keys):
            if key is not None and key in keys[:index]:
                yield Fault(field=f"{path}[{index}]", problem="stands twice", given=key, remedy="give it once")
        for index, each in enumerate(value):
            yield from _doubled(each, items, f"{path}[{index}]")


def _list_key(value: Any, schema: Schema, items: Schema) -> str | None:
    kind = schema["x-kubernetes-list-type"]
    if kind == "set":
        return show(value)
    if kind != "map" or not isinstance(value, Mapping):
        return None
    names, properties = schema.get("x-kubernetes-list-map-keys", ()), items.get("properties", {})
    return ", ".join(f"{name}={value.get(name, properties.get(name, {}).get('default'))}" for name in names)


def _fault(error: ValidationError) -> Fault:
    path = ""
    for part in error.absolute_path:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    allowed = {"enum": "one of", "pattern": "text of the form", "type": "of type", "format": "within"}
    word = allowed.get(str(error.validator), "")
    limit = f"{word} {error.validator_value}" if word else ""
    return Fault(
        field=path, problem=str(error.message)[:300], given=show(error.instance), allowed=limit, remedy=f"mend {path}"
    )
