"""JSON Schema and OpenAPI in words, for the reference pages: what a field is and may hold, what an operation answers.

Names of schemas and values stand in backticks, for whoever writes the page to make code or links of. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
_NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
}
_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def type_words(field: Schema) -> str:
    """Return what a field is: `whole number or null`, "list of `Job`"."""
    if "anyOf" in field or "oneOf" in field:
        return " or ".join(type_words(each) for each in field.get("anyOf") or field["oneOf"])
    if "enum" in field or "const" in field:
        return "text"
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    kind = field.get("type", "any")
    if kind == "array" and "prefixItems" in field:
        return f"list of {len(field['prefixItems'])} numbers"
    if kind == "array":
        return f"list of {type_words(field.get('items', {}))}"
    if "patternProperties" in field:
        return f"mapping of name to {type_words(next(iter(field['patternProperties'].values())))}"
    if kind == "object" and "additionalProperties" in field and field["additionalProperties"] is not True:
        return f"mapping of name to {type_words(field['additionalProperties'])}"
    return str(_NAMES.get(kind, kind))


def value_words(value: Any) -> str:
    """Return a value as JSON has it, in backticks."""
    if isinstance(value, bool) or value is None:
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if value == "":
        return '`""`'
    return "`{}`" if value == {} else f"`{list(value) if isinstance(value, tuple) else value}`"


def limit_words(field: Schema) -> str:
    """Return the limits of a field's value, those of its parts included."""
    parts = []
    if "enum" in field or "const" in field:
        parts.append(", ".join(f"`{each}`" for each in field.get("enum", [field.get("const")])))
    parts += [f"{sign} {field[name]:,}" for name, sign in _BOUNDS if name in field]
    if "maxLength" in field:
        parts.append(f"{field.get('minLength', 0)} to {field['maxLength']} characters")
    if "pattern" in field:
        parts.append(f"`{field['pattern']}`")
    inner = [*field.get("anyOf", ()), *field.get("prefixItems", ())[:1]]
    inner += [each for each in (field.get("items"), field.get("additionalProperties")) if isinstance(each, Mapping)]
    inner += field.get("patternProperties", {}).values()
    parts += [found for each in inner if (found := limit_words(each))]
    return ", ".join(parts)


def access_words(operation: Schema) -> str:
    """Return whom an operation is for; "" where a login is enough."""
    schemes = {scheme for each in operation["security"] for scheme in each}
    if not schemes:
        return "For anybody, without a token."
    if "run_token" in schemes:
        return "Asks for `Authorization: Bearer TOKEN`, the run's own token."
    permission = operation.get("x-permission")
    return f"Asks for the permission `{permission}`." if permission else ""


def answer_words(answer: Schema) -> str:
    """Return what an answer holds: its schema in backticks, or what is said of it."""
    content = answer.get("content", {})
    if "text/event-stream" in content:
        return "server-sent events"
    found: Schema = next((each["schema"] for each in content.values() if "schema" in each), {})
    return type_words(found) if "$ref" in found else str(answer["description"])
