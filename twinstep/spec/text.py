"""YAML as specs are written in it: the core schema of YAML 1.2, without aliases, tags and doubled keys. Pure.

PyYAML reads YAML 1.1, in which `010` is 8, `1:30` is 90 and `on` is true; here the first is 10, the others are
text. `parse.py` reads specs through `load_yaml`, and writes them through `dump_yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

MAX_DIGITS = 4000  # Python turns a few more than that into a number and back, and refuses the rest: it takes too long
MAX_VALUES = 10_000
"""Keys and values of one text: a spec has some hundred, and each costs time to read."""
_TAG = "tag:yaml.org,2002:"
# YAML 1.2.2, section 10.3.2: what a plain word may mean but text.
_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, less aliases (a few lines could unfold to gigabytes), tags and doubled keys."""

    composed = 0
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own way

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line}: aliases (*name) are not allowed")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"line {line}: tags ({event.tag}) are not allowed")
        self.composed += 1
        if self.composed > MAX_VALUES:
            raise yaml.YAMLError(f"line {line}: more keys and values than the {MAX_VALUES:,} it may have")
        if isinstance(event, yaml.ScalarEvent) and not is_text(event.value):
            raise yaml.YAMLError(f"line {line}: half a character (a lone surrogate) is no text")
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


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something else than text."""


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    if base == 10 and len(text) > MAX_DIGITS:
        line = node.start_mark.line + 1
        raise yaml.YAMLError(
            f"line {line}: a number has {len(text):,} digits, more than the {MAX_DIGITS:,} it may have"
        )
    return int(text[2:] if base != 10 else text, base)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    return str(loader.construct_scalar(node)).lower() == "true"


for _name, _pattern, _first in _CORE:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_TAG + "int", _int)
_Loader.add_constructor(_TAG + "float", _float)
_Loader.add_constructor(_TAG + "bool", _bool)


def is_text(value: str) -> bool:
    """Say whether a string can be written as UTF-8: one half of a pair of surrogates cannot."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def load_yaml(text: str) -> Any:
    """Return the plain data that one YAML (or JSON) document holds.

    Raises:
        yaml.YAMLError: it is none, or uses what is not allowed here; the message names the line.
        RecursionError: it is nested too deeply.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506  a subclass of SafeLoader


def plain_text(value: Any) -> str:
    """Return a value as text, whatever it is: a whole number too long for decimal digits, hexadecimal."""
    if isinstance(value, int) and value.bit_length() > 3 * MAX_DIGITS:
        return hex(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{plain_text(key)}: {plain_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain_text(each) for each in value) + "]"
    return str(value)


def dump_yaml(value: Any, *, flow: bool = False) -> str:
    """Return plain data as YAML, keys in their order; `flow` puts it on one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=float("inf") if flow else 110,
    )


class _ManifestDumper(yaml.SafeDumper):
    """Quotes whatever a YAML reader of either version could take for something else than text: `yes`, `1:30`, `1e3`."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out in full: a reader of manifests expects no anchors."""
        return True


def _lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TAG + "str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _lines)
for _name, _pattern, _first in _CORE:
    _ManifestDumper.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def dump_manifests(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return Kubernetes objects as one YAML stream, keys in their order, the same bytes for the same objects."""
    return yaml.dump_all(
        objects, Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=110, explicit_start=True
    )
